"""Finds patterns in the graph that Dynamo captured, before autograd, and puts advisor's operations in their place.

What does not match runs as it did. The graph's parameters and buffers are the user's own objects.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops.batchnorm_act import api, spec

_ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
_RELU = {F.relu, torch.relu, torch.relu_, "relu", "relu_"}
_STRAIGHT = {F.silu: "silu", F.hardswish: "hardswish", F.relu6: "relu6"}


@dataclass(slots=True)
class MatchReport:
    """What a capture replaced, by module path, and what it left alone and why."""

    matched: dict[str, str] = field(default_factory=dict)  # module path → "bn+add+relu"
    unmatched: dict[str, str] = field(default_factory=dict)  # module path → reason
    graphs: int = 0


def _path(node: fx.Node) -> str:
    """`layer1.0.bn1` from Dynamo's module stack; the node's own name when it was a function outside any module."""
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return node.name
    path = str(list(stack.values())[-1][0])
    path = re.sub(r"^L\[['\"]\w+['\"]\]\.?", "", path)
    path = re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).replace("._modules", "").replace("getattr", "")
    return path.strip(".") or node.name


def _value(node: Any) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 else None


def _activation(node: fx.Node) -> tuple[str, float] | None:
    """The activation a node computes of its first argument, with LeakyReLU's slope, or None."""
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
        return ("gelu", 0.0) if kwargs.get("approximate", "none") == "none" and len(args) < 2 else None
    return None


@dataclass(frozen=True, slots=True)
class _BatchNorm:
    node: fx.Node
    x: fx.Node
    running_mean: fx.Node
    running_var: fx.Node
    weight: fx.Node
    bias: fx.Node
    momentum: float
    eps: float


_PARAMETERS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}


def _batch_norm(node: fx.Node) -> _BatchNorm | str:
    """The call's arguments, or why it is left alone."""
    bound: dict[str, Any] = {**_DEFAULTS, **dict(zip(_PARAMETERS, node.args, strict=False)), **node.kwargs}
    if bound["training"] is not True:
        return "not in training mode"
    if not isinstance(bound["momentum"], float):
        return "momentum is None (cumulative average)"
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = _value(bound.get(name))
        if value is None:
            return f"no {name}"
        if value.dtype != torch.float32:
            return f"{name} is {value.dtype}"
    x = _value(bound["input"])
    if x is None or x.dim() != 4:
        return "input is not 4-D"
    if not isinstance(x.shape[1], int):
        return "channel count is dynamic"
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in spec.STORAGE:
        return f"dtype {dtype}"
    if x.shape[1] % spec.vector_width(dtype):
        return f"{x.shape[1]} channels are no multiple of {spec.vector_width(dtype)}"
    if any(_changes_in_place(user, bound["input"]) for user in bound["input"].users if user is not node):
        return "its input is changed in place elsewhere"
    return _BatchNorm(
        node,
        bound["input"],
        bound["running_mean"],
        bound["running_var"],
        bound["weight"],
        bound["bias"],
        bound["momentum"],
        float(bound["eps"]),
    )


def _changes_in_place(user: fx.Node, tensor: Any) -> bool:
    if not user.args or user.args[0] is not tensor:
        return False
    if user.op == "call_method":
        return str(user.target).endswith("_")
    if user.target is operator.iadd or user.kwargs.get("inplace") is True:
        return True
    return _activation(user) is not None and len(user.args) > 1 and user.args[-1] is True


def _addend(add: fx.Node, norm: fx.Node) -> fx.Node | None:
    """The other operand, when `add` is a plain sum of two tensors of one shape and dtype."""
    if add.op not in ("call_function", "call_method") or add.target not in _ADD or add.kwargs or len(add.args) != 2:
        return None
    other = add.args[1] if add.args[0] is norm else add.args[0]
    if not isinstance(other, fx.Node) or other is norm:
        return None
    a, b = _value(norm), _value(other)
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return None
    return other


def fuse_batchnorm(graph_module: fx.GraphModule, report: MatchReport, *, compiled: bool) -> None:
    """Rewrite batch_norm (+ add) (+ activation) in place.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; else the thin eager function is
    called. `report` gains one entry a batch norm.
    """
    graph = graph_module.graph
    report.graphs += 1
    running: list[tuple[fx.Node, fx.Node, int]] = []  # statistics to copy back: (buffer, op's second output, row)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not F.batch_norm:
            continue
        norm, path = _batch_norm(node), _path(node)
        if isinstance(norm, str):
            report.unmatched[path] = norm
            continue
        last, residual, activation, slope = node, None, "none", 0.0
        user = _only_user(last)
        addend = _addend(user, node) if user is not None else None
        if user is not None and addend is not None:
            after = _only_user(user)
            follows = _activation(after) if after is not None else None
            if follows is not None and follows[0] in spec.RESIDUAL_ACTIVATIONS and after is not None:
                last, residual, (activation, slope) = after, addend, follows
            else:
                last, residual = user, addend
        elif user is not None and (follows := _activation(user)) is not None and user.args[0] is node:
            last, (activation, slope) = user, follows
        arguments = (
            norm.x,
            residual,
            norm.running_mean,
            norm.running_var,
            norm.weight,
            norm.bias,
            norm.momentum,
            norm.eps,
            activation,
            slope,
        )
        with graph.inserting_before(last):
            if compiled:
                call = graph.call_function(torch.ops.advisor.batchnorm_act.default, arguments)
                fused = graph.call_function(operator.getitem, (call, 0))
                statistics = graph.call_function(operator.getitem, (call, 1))
                running += [(norm.running_mean, statistics, 2), (norm.running_var, statistics, 3)]
            else:
                fused = graph.call_function(api.batchnorm_act, arguments)
        fused.meta.update(last.meta)
        last.replace_all_uses_with(fused)
        for dead in (last, *([user] if residual is not None and last is not user else []), node):
            if dead is not None and dead.graph is graph and not dead.users and dead in graph.nodes:
                graph.erase_node(dead)
        report.matched[path] = "+".join(
            ["bn", *(["add"] if residual is not None else []), *([activation] if activation != "none" else [])]
        )
    if compiled:
        _copy_back(graph, running)
    else:
        _count_batches_at_once(graph)
    graph.lint()
    graph_module.recompile()


def _copy_back(graph: fx.Graph, running: list[tuple[fx.Node, fx.Node, int]]) -> None:
    """New running statistics into the module's buffers, all in one multi-tensor copy at the end of the graph."""
    if not running:
        return
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    with graph.inserting_before(output):
        rows = [graph.call_function(operator.getitem, (statistics, row)) for _, statistics, row in running]
        graph.call_function(torch._foreach_copy_, ([buffer for buffer, _, _ in running], rows))


def _count_batches_at_once(graph: fx.Graph) -> None:
    """`num_batches_tracked.add_(1)` of every batch norm as one multi-tensor launch instead of one launch each."""
    counts = [
        node
        for node in graph.nodes
        if node.op == "call_method"
        and node.target == "add_"
        and not node.users
        and node.args[1:] == (1,)
        and (value := _value(node.args[0])) is not None
        and value.dtype == torch.int64
        and value.dim() == 0
    ]
    if len(counts) < 2:
        return
    with graph.inserting_before(counts[-1]):
        graph.call_function(torch._foreach_add_, ([node.args[0] for node in counts], 1))
    for node in counts:
        graph.erase_node(node)


def backend(report: MatchReport, *, fuse: bool, mode: str | None) -> Callable[..., Any]:
    """A Dynamo backend. `mode` None runs the (rewritten) graph eagerly; else it is torch.compile's mode for Inductor."""

    def compile_graph(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if fuse:
            fuse_batchnorm(graph_module, report, compiled=mode is not None)
        if mode is None:
            forward: Callable[..., Any] = graph_module.forward
            return forward
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(
            graph_module, list(inputs), config_patches=list_mode_options(mode) if mode != "default" else None
        )
        return cast(Callable[..., Any], compiled)

    return compile_graph
