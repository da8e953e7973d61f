"""Captured graphs: the Dynamo backend that runs the kernel families' rewrites, and what rewrites share to read a graph.

The graph is what Dynamo captured, before autograd. What does not match runs as it did. The graph's parameters and buffers
are the user's own objects.
"""

from __future__ import annotations

import copy
import inspect
import operator
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, storage
from advisor.ops.convolution_support import Sizes, Support

ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
_RELU = {F.relu, torch.relu, torch.relu_, "relu", "relu_"}
_WRITES = {
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
    operator.ifloordiv,
    operator.imod,
    operator.ipow,
    operator.setitem,
}
_MEANS = {torch.mean, "mean"}
_GELU = {"none": ("gelu", 0.0), "tanh": ("gelu_tanh", 0.0)}
_STRAIGHT = {F.silu: "silu", F.hardswish: "hardswish", F.relu6: "relu6"}


@dataclass(slots=True)
class MatchReport:
    """What a capture replaced with one family's operations, by module path, and what it left alone and why."""

    matched: dict[str, str] = field(default_factory=dict)  # module path → "bn+add+relu"
    unmatched: dict[str, str] = field(default_factory=dict)  # module path → reason
    graphs: int = 0


_LINE = re.compile(r'File "([^"]+)", line (\d+)')  # of a traceback


def path(node: fx.Node) -> str:
    """`layer1.0.bn1`: the module that makes this call, and the node's name too where it makes several of the kind.

    For a function outside any module below the captured one: the node's name and the line that calls it, `out (net.py:26)`.
    """
    found = _module(node)
    if not found:
        lines = _LINE.findall(node.meta.get("stack_trace") or "")
        return f"{node.name} ({Path(lines[-1][0]).name}:{lines[-1][1]})" if lines else node.name
    alike = (other for other in node.graph.nodes if other.target == node.target and other is not node)
    return f"{found}.{node.name}" if any(_module(other) == found for other in alike) else found


def _module(node: fx.Node) -> str:
    """The innermost module on Dynamo's stack, by its path from the captured module; empty for that module itself."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    found = str(list(stack.values())[-1][0])
    found = re.sub(r"^L\[['\"]\w+['\"]\]\.?", "", found)
    found = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", found).replace("getattr", "")
    found = re.sub(r"(?:^|\.)_modules(?=\.|$)", "", found)  # torch 2.8 has the dictionary in a path at its begin, too
    # The forward inside one of our own, as that for channels_last is, which are closures.
    found = re.sub(r"^.*\bcell_contents(?=\.|$)", "", found)
    return found.strip(".").removeprefix("__self__").strip(".")


def value(node: Any) -> torch.Tensor | None:
    """The fake tensor that stands for the node's value: shape, dtype and strides. None when it is no tensor."""
    found = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def static_shape(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The shape when every size is a plain number, else None."""
    shape = tuple(tensor.shape)
    return shape if all(type(size) is int for size in shape) else None


def empty(tensor: torch.Tensor) -> bool:
    """Whether it is known to hold no values, as a detector's boxes where there are none: a compiled operation could not launch on it."""
    return any(type(size) is int and size == 0 for size in tensor.shape)


def dtype_name(tensor: torch.Tensor) -> str:
    """`bfloat16`."""
    return storage.name(tensor.dtype)


def only_user(node: fx.Node) -> fx.Node | None:
    """The one node that uses this one; None when there are none or several, or when only one of both records gradients."""
    users = list(node.users)
    return users[0] if len(users) == 1 and recorded_alike(node, users[0]) else None


_GRAD_MODE = torch._C._set_grad_enabled  # the node that torch.no_grad() and its like leave in a graph, at both ends
_INFERENCE_MODE = torch.autograd.grad_mode._enter_inference_mode
_END_OF_INFERENCE_MODE = torch.autograd.grad_mode._exit_inference_mode


def recorded_alike(*nodes: fx.Node) -> bool:
    """Whether autograd records all of these nodes or none: else no single operation does what they do."""
    graph = nodes[0].graph
    switches = (_GRAD_MODE, _INFERENCE_MODE)
    if not any(graph.find_nodes(op="call_function", target=switch) for switch in switches):
        return True
    return len({_recorded(node) for node in nodes}) == 1


def _recorded(node: fx.Node) -> tuple[bool, bool]:
    """Whether gradients are enabled where the node stands, and whether inference mode is."""
    gradients, inference = True, False
    for before in node.graph.nodes:
        if before is node:
            break
        if before.target is _GRAD_MODE:
            gradients = bool(before.args[0])
        elif before.target is _INFERENCE_MODE:
            inference = bool(before.args[0])
        elif before.target is _END_OF_INFERENCE_MODE:
            inference = False
    return gradients, inference


def operand(node: fx.Node) -> Any:
    """The call's first argument, which functions of one tensor name `input`; None when it has none."""
    return node.args[0] if node.args else node.kwargs.get("input")


def bound(node: fx.Node, parameters: Sequence[str], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, given the function's parameters in order and its defaults."""
    return {**defaults, **dict(zip(parameters, node.args, strict=False)), **node.kwargs}


def operands(node: Any, functions: Container[Any]) -> tuple[Any, Any] | None:
    """Both operands where the node calls one of these functions of two with nothing else: no `alpha`, `rounding_mode` or `out`."""
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method") or node.target not in functions:
        return None
    return (node.args[0], node.args[1]) if len(node.args) == 2 and not node.kwargs else None


def mean(node: Any) -> tuple[fx.Node, list[int], bool] | None:
    """What the node is the mean of, over which dimensions, from the front and in order, and whether they stay; None for any other node.

    So for a mean in another dtype than its input's, or of all there is.
    """
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method") or node.target not in _MEANS:
        return None
    given = bound(node, ("input", "dim", "keepdim"), {"dim": None, "keepdim": False})
    x, dims = value(given.get("input")), given["dim"]
    dims = (dims,) if isinstance(dims, int) else dims
    if x is None or not x.dim() or not isinstance(dims, (tuple, list)) or not all(type(d) is int for d in dims):
        return None
    if any(given.get(name) is not None for name in ("dtype", "out")):
        return None
    return given["input"], sorted(d % x.dim() for d in dims), bool(given["keepdim"])


_CONV2D = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONV2D_DEFAULTS: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


@dataclass(frozen=True, slots=True)
class Conv2d:
    """A call of `F.conv2d`: its tensors as the graph has them, and its numbers."""

    x: Any
    weight: Any
    bias: Any
    channels: int  # of the input
    weight_shape: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int

    def unsupported(self, supports: Support) -> str:
        """Why the convolution is none of a family's that supports this, whatever it is run on; empty where it is."""
        sizes = (1, self.channels, 1, 1), self.weight_shape, self.stride, self.padding, self.dilation, self.groups
        return supports.another(Sizes(*sizes))


def convolutions(
    graph: fx.Graph, report: MatchReport, taken: Callable[[fx.Node], Conv2d | str]
) -> Iterator[tuple[fx.Node, Conv2d]]:
    """The graph's calls of `F.conv2d` that `taken` gives back, for the caller to replace.

    `taken` says of the others why they are left alone, which goes into the report, or "" of those that are no concern of its.
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not F.conv2d:
            continue
        call = taken(node)
        if not isinstance(call, str):
            yield node, call
        elif call:
            report.unmatched[path(node)] = call


def in_dtype_of(result: fx.Node, x: Any) -> Any:
    """`x` in the dtype of the node's result: autocast's cast, which is inside the node, written out at the insertion point."""
    before, after = value(x), value(result)
    if before is None or after is None or before.dtype == after.dtype:
        return x
    return result.graph.call_method("to", (x, after.dtype))


def said_of(what: str, reason: str) -> str:
    """The reason, with what it is said of where it does not tell: "scale+add: no measurement on file"."""
    return f"{what}: {reason}" if reason == dispatch.UNMEASURED else reason


def conv2d_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of `F.conv2d`, by name."""
    return bound(node, _CONV2D, _CONV2D_DEFAULTS)


def conv2d(node: fx.Node) -> Conv2d | str:
    """The call of `F.conv2d` that the node is, with strings for padding worked out; or why its numbers are not known."""
    given = conv2d_arguments(node)
    x, weight = value(given["input"]), value(given["weight"])
    if x is None or weight is None or weight.dim() != 4 or x.dim() != 4:
        return "input or weight is not 4-D"
    channels, weight_shape = x.shape[1], static_shape(weight)
    if type(channels) is not int or weight_shape is None:
        return "channel count is dynamic"
    stride, dilation = _pair(given["stride"]), _pair(given["dilation"])
    if stride is None or dilation is None:
        return "stride or dilation is no number"
    padding = given["padding"]
    if padding == "valid":
        padding = 0
    elif padding == "same":  # stride is 1 then
        if any(d * (k - 1) % 2 for d, k in zip(dilation, weight_shape[2:], strict=True)):
            return "padding same is uneven"
        padding = tuple(d * (k - 1) // 2 for d, k in zip(dilation, weight_shape[2:], strict=True))
    pads = _pair(padding)
    if pads is None:
        return f"padding {padding}"
    return Conv2d(
        given["input"],
        given["weight"],
        given["bias"],
        channels,
        weight_shape,
        stride,
        pads,
        dilation,
        given["groups"],
    )


def _pair(value: Any) -> tuple[int, int] | None:
    """Both numbers of an argument that may be one number for both."""
    both = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(both) == 1:
        both *= 2
    return both if len(both) == 2 and all(type(v) is int for v in both) else None


def activation(node: fx.Node) -> tuple[str, float] | None:
    """The activation a node computes of its `operand`, with LeakyReLU's slope, or None."""
    if node.op not in ("call_function", "call_method"):
        return None
    target, args, kwargs = node.target, node.args, dict(node.kwargs)
    if target in _RELU:
        return "relu", 0.0
    if target in _STRAIGHT:
        return _STRAIGHT[target], 0.0
    if target is F.hardtanh:
        low = kwargs.get("min_val", args[1] if len(args) > 1 else -1.0)
        high = kwargs.get("max_val", args[2] if len(args) > 2 else 1.0)
        return ("relu6", 0.0) if (low, high) == (0.0, 6.0) else None
    if target is F.leaky_relu:
        slope = kwargs.get("negative_slope", args[1] if len(args) > 1 else 0.01)
        return ("leaky_relu", float(slope)) if isinstance(slope, (int, float)) else None
    if target is F.gelu:
        return _GELU.get(str(kwargs.get("approximate", "none"))) if len(args) < 2 else None
    return None


def changes_in_place(user: fx.Node, tensor: Any) -> bool:
    """Whether `user` writes into `tensor`: its first argument, one of a list that is, or its `out`."""
    if user.kwargs.get("out") is tensor:
        return True
    first = operand(user)
    if first is not tensor and not (isinstance(first, (list, tuple)) and tensor in first):
        return False
    if user.op == "call_method":
        return str(user.target).endswith("_")
    if user.target in _WRITES or getattr(user.target, "__name__", "").endswith("_"):
        return True
    try:
        given = inspect.signature(cast(Callable[..., Any], user.target)).bind(*user.args, **user.kwargs)
    except (TypeError, ValueError):  # no Python function: none of those has an argument for it
        return False
    return given.arguments.get("inplace") is True


def addend(add: fx.Node, term: fx.Node, *, mixed: bool = False) -> fx.Node | None:
    """The other operand, when `add` is a plain sum of `term` and a second tensor of one shape and, unless `mixed`, dtype."""
    both = operands(add, ADD)
    if both is None:
        return None
    other = both[1] if both[0] is term else both[0]
    if not isinstance(other, fx.Node) or other is term:
        return None
    a, b = value(term), value(other)
    if a is None or b is None or a.shape != b.shape or (a.dtype != b.dtype and not mixed):
        return None
    return other


def permutes(node: Any, order: tuple[int, ...]) -> bool:
    """Whether the node permutes its first argument's dimensions into this order."""
    if not isinstance(node, fx.Node) or node.target not in ("permute", torch.permute):
        return False
    given = node.args[1] if len(node.args) == 2 and isinstance(node.args[1], (tuple, list)) else node.args[1:]
    permuted = value(node)
    return permuted is not None and tuple(int(d) % permuted.dim() for d in given) == order  # type: ignore[arg-type]  # numbers, in a captured graph


def changed_in_place(node: fx.Node) -> bool:
    """Whether a node of the graph writes into this one's value, or into a view of it."""
    return any(changes_in_place(user, one) for one in _sharing(node) for user in one.users)


def handed_out(node: fx.Node) -> bool:
    """Whether this node's value, or a view of it, leaves the graph, for others to write into."""
    return any(user.op == "output" for one in _sharing(node) for user in one.users)


def read_later(term: fx.Node, reader: fx.Node) -> bool:
    """Whether `term` can be read further down than by `reader`, which is then gone, with nothing else in the graph the wiser.

    Not where it is written into from there on. Where `reader` itself writes into it, nothing else may look at it any more:
    what takes its place writes elsewhere.
    """
    later = _behind(reader)
    sharing = _sharing(term)
    if not changes_in_place(reader, term):
        return not any(user in later and changes_in_place(user, one) for one in sharing for user in one.users)
    before = [one for one in sharing if one is not reader and one not in later]
    if any(one.op in ("placeholder", "get_attr") for one in before):
        return False
    return not any(user in later for one in before for user in one.users)


def _behind(node: fx.Node) -> set[fx.Node]:
    """The nodes that run after this one."""
    found = set()
    while node.op != "output":
        node = node.next
        found.add(node)
    return found


def _sharing(node: fx.Node) -> list[fx.Node]:
    """The node and those whose values are views of the same memory."""
    memory, found = _memory(node), [node]
    for one in found:
        near = (*one.users, *one.all_input_nodes) if memory else ()
        found += [other for other in dict.fromkeys(near) if other not in found and _memory(other) == memory]
    return found


def _memory(node: fx.Node) -> int:
    """What the fake tensors of views of one tensor have in common; 0 when the value is no tensor."""
    found = value(node)
    return 0 if found is None else int(found.untyped_storage()._cdata)


_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}


def without_idle_dropouts(graph: fx.Graph) -> None:
    """Dropouts that drop nothing leave the graph: PyTorch gives back their input itself and draws no random number for them.

    Networks have them between a norm and its activation (MONAI) and between an activation and a convolution (timm).
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _DROPOUTS:
            continue
        given = bound(node, ("input", "p", "training", "inplace"), {"p": 0.5, "training": True})
        x = given.get("input")
        if isinstance(x, fx.Node) and (given["training"] is False or given["p"] in (0, 0.0)):
            node.replace_all_uses_with(x)
            graph.erase_node(node)


_SIGMOIDS = {torch.sigmoid, F.sigmoid, "sigmoid"}
_PRODUCTS = {operator.mul, torch.mul, "mul"}


def written_out_silu(graph: fx.Graph) -> None:
    """`x * torch.sigmoid(x)` becomes `F.silu(x)`, where nobody else has the sigmoid: the same, rounded once in place of twice."""
    for node in list(graph.nodes):
        for x, gate in _both_ways(node):
            if gate.target not in _SIGMOIDS or operand(gate) is not x or list(gate.users) != [node]:
                continue
            if dtype_of(gate) != dtype_of(x) or not recorded_alike(gate, node) or not read_later(x, gate):
                continue
            with graph.inserting_before(node):
                silu = graph.call_function(F.silu, (x,))
            replace(node, silu, (gate,))
            break


def _both_ways(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The factors of a product of two tensors, in both orders."""
    one, other = operands(node, _PRODUCTS) or (None, None)
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        yield from ((one, other), (other, one))


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype of the node's value; None when it is no tensor."""
    found = value(node)
    return None if found is None else found.dtype


def after_changes(graph: fx.Graph) -> None:
    """What reads a tensor after an operation that changed it in place reads that operation's result, which is the same tensor.

    So `out.add_(shortcut)` as a statement looks as `out += shortcut` does.
    """
    for node in graph.nodes:
        changed = operand(node)
        if not isinstance(changed, fx.Node) or len(changed.users) < 2 or not changes_in_place(node, changed):
            continue
        if not _memory(node) or _memory(node) != _memory(changed):
            continue
        later = _behind(node)
        for user in [user for user in changed.users if user in later]:
            user.replace_input_with(changed, node)


def replace(old: fx.Node, new: fx.Node, dead: Sequence[fx.Node] = ()) -> None:
    """`new` takes the place of `old`; `old` and then `dead`, as far as nobody uses them any more, leave the graph."""
    new.meta.update(old.meta)
    old.replace_all_uses_with(new)
    for node in (old, *dead):
        if not node.users and not node._erased:
            node.graph.erase_node(node)


def results(call: fx.Node, count: int) -> list[fx.Node]:
    """Nodes of the first results of a call that gives a tuple, where the graph is inserting."""
    return [call.graph.call_function(operator.getitem, (call, place)) for place in range(count)]


def _rewrite_or_leave(
    rewrite: Callable[..., None], graph_module: fx.GraphModule, report: MatchReport, *, compiled: bool
) -> None:
    """Run one family's rewrite. When it raises, or leaves a graph that does not hold together, the graph is as it was."""
    before, matched = copy.deepcopy(graph_module.graph), dict(report.matched)
    try:
        rewrite(graph_module, report, compiled=compiled)
        graph_module.graph.lint()
    except Exception as error:  # the user's training goes on without this family
        graph_module.graph = before
        report.matched = matched
        report.unmatched[f"graph {report.graphs}"] = f"the rewrite failed: {type(error).__name__}: {error}"


def twin(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The same graph once more, over the same tensors: rewrites of one leave the other as it is, bodies of checkpoints included."""
    found = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    found.meta = dict(graph_module.meta)
    for name, child in graph_module.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(found, name, twin(child))
    return found


def backend(
    reports: Mapping[str, MatchReport], *, mode: str | None, instead: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A Dynamo backend that puts in the operations of the families named in `reports`, in the catalog's order.

    After them, where it is named, `weight_casts`: it takes the weights that no family's operation reads as they are.

    `mode` None runs the (rewritten) graph eagerly; else it is torch.compile's mode for Inductor. `instead` is given the graph and its
    inputs in Inductor's place, and returns what runs.
    """
    from advisor.ops import (  # which read graphs through this module
        concatenation,
        consumers,
        dimensions,
        recomputation,
        weight_casts,
    )
    from advisor.ops.sites import install

    families = [family for family in catalog.FAMILIES if family.id in reports]
    rewrites = [(family.rewrite, reports[family.id]) for family in families]
    if weight_casts.ID in reports:
        rewrites.append((weight_casts.rewrite, reports[weight_casts.ID]))
    finishes = [(finish, reports[family.id]) for family in families if (finish := family.finish) is not None]

    def compile_graph(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        for _, report in rewrites:
            report.graphs += 1
        parts = [graph_module]
        for node, body in recomputation.bodies(graph_module):
            reason = recomputation.left_alone(body, compiled=mode is not None)
            if not reason:
                parts.append(body)
            for family in families if reason else ():
                reports[family.id].unmatched[path(node)] = reason
        for part in parts if families else ():
            without_idle_dropouts(part.graph)
            after_changes(part.graph)
            consumers.without_idle_casts(part.graph)
            written_out_silu(part.graph)
            dimensions.as_images(part.graph)
        for rewrite, report in (*rewrites, *finishes):
            for part in parts if rewrite is not weight_casts.rewrite else parts[:1]:
                _rewrite_or_leave(rewrite, part, report, compiled=mode is not None)
        if mode is None:
            for part in parts if families else ():
                concatenation.keep_nhwc(part.graph)
            for part in parts:
                install.install(part.graph)
            recomputation.as_written(graph_module)  # which compiles the checkpoints' bodies anew
        if rewrites or mode is None:
            graph_module.recompile()
        if mode is None:
            forward: Callable[..., Any] = graph_module.forward
            return forward
        if instead is not None:
            return cast(Callable[..., Any], instead(graph_module, inputs))
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(
            graph_module, list(inputs), config_patches=list_mode_options(mode) if mode != "default" else None
        )
        return cast(Callable[..., Any], compiled)

    return compile_graph
