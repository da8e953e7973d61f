"""What rewrites share to read a captured graph, and to put nodes into the place of others.

The graph is what Dynamo captured, before autograd. What does not match runs as it did. The graph's parameters and buffers
are the user's own objects.
"""

from __future__ import annotations

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

from advisor.ops import dispatch, storage
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
    tensors = given["input"], given["weight"], given["bias"]
    return Conv2d(*tensors, channels, weight_shape, stride, pads, dilation, given["groups"])


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
    later = behind(reader)
    sharing = _sharing(term)
    if not changes_in_place(reader, term):
        return not any(user in later and changes_in_place(user, one) for one in sharing for user in one.users)
    before = [one for one in sharing if one is not reader and one not in later]
    if any(one.op in ("placeholder", "get_attr") for one in before):
        return False
    return not any(user in later for one in before for user in one.users)


def behind(node: fx.Node) -> set[fx.Node]:
    """The nodes that run after this one."""
    found = set()
    while node.op != "output":
        node = node.next
        found.add(node)
    return found


def _sharing(node: fx.Node) -> list[fx.Node]:
    """The node and those whose values are views of the same memory."""
    own, found = memory(node), [node]
    for one in found:
        near = (*one.users, *one.all_input_nodes) if own else ()
        found += [other for other in dict.fromkeys(near) if other not in found and memory(other) == own]
    return found


def memory(node: fx.Node) -> int:
    """What the fake tensors of views of one tensor have in common; 0 when the value is no tensor."""
    found = value(node)
    return 0 if found is None else int(found.untyped_storage()._cdata)


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """The dtype of the node's value; None when it is no tensor."""
    found = value(node)
    return None if found is None else found.dtype


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
