"""Finds batch_norm (+ add) (+ activation) in a captured graph."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import dispatch, match, storage
from advisor.ops.batchnorm_act import api, spec

_PARAMETERS = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}


@dataclass(frozen=True, slots=True)
class BatchNorm:
    """A batch_norm call in training mode that kernels can take."""

    node: fx.Node
    x: fx.Node
    running_mean: fx.Node
    running_var: fx.Node
    weight: fx.Node
    bias: fx.Node
    momentum: float
    eps: float
    dtype: str


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The nodes that one operation stands for: the norm, then the addition, then the activation, as far as they are there."""

    nodes: tuple[fx.Node, ...]
    residual: fx.Node | None = None
    activation: str = "none"
    slope: float = 0.0

    @property
    def label(self) -> str:
        return spec.name(self.activation, self.residual is not None)


def batch_norm(node: fx.Node) -> BatchNorm | str:
    """The call's arguments, or why it is left alone."""
    bound = match.bound(node, _PARAMETERS, _DEFAULTS)
    if bound["training"] is not True:
        return "not in training mode"
    if not isinstance(bound["momentum"], float):
        return "momentum is None (cumulative average)"
    for name in ("weight", "bias", "running_mean", "running_var"):
        value = match.value(bound.get(name))
        if value is None:
            return f"no {name}"
        if value.dtype != torch.float32:
            return f"{name} is {value.dtype}"
    x = match.value(bound["input"])
    if x is None or x.dim() != 4:
        return "input is not 4-D"
    if not isinstance(x.shape[1], int):
        return "channel count is dynamic"
    dtype = match.dtype_name(x)
    if dtype not in storage.STORAGE:
        return f"dtype {dtype}"
    if x.shape[1] % storage.vector_width(dtype):
        return f"{x.shape[1]} channels are no multiple of {storage.vector_width(dtype)}"
    if any(match.changes_in_place(user, bound["input"]) for user in bound["input"].users if user is not node):
        return "its input is changed in place elsewhere"
    return BatchNorm(
        node,
        bound["input"],
        bound["running_mean"],
        bound["running_var"],
        bound["weight"],
        bound["bias"],
        bound["momentum"],
        float(bound["eps"]),
        dtype,
    )


def _patterns(norm: BatchNorm) -> list[_Pattern]:
    """What the operation could stand for here, the most first."""
    node = norm.node
    found = [_Pattern((node,))]
    user = match.only_user(node)
    if user is None:
        return found
    residual = match.addend(user, node)
    if residual is not None:
        found.insert(0, _Pattern((node, user), residual))
        after = match.only_user(user)
        follows = match.activation(after) if after is not None else None
        if after is not None and follows is not None and follows[0] in spec.RESIDUAL_ACTIVATIONS:
            found.insert(0, _Pattern((node, user, after), residual, *follows))
    elif (follows := match.activation(user)) is not None and user.args[0] is node:
        found.insert(0, _Pattern((node, user), None, *follows))
    return found


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Rewrite batch_norm (+ add) (+ activation) in place.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; else the thin eager function is
    called. `report` gains one entry a batch norm.
    """
    graph = graph_module.graph
    running: list[tuple[fx.Node, fx.Node, int]] = []  # statistics to copy back: (buffer, op's second output, row)
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not F.batch_norm:
            continue
        norm, path = batch_norm(node), match.path(node)
        if isinstance(norm, str):
            report.unmatched[path] = norm
            continue
        reasons: list[str] = []
        for pattern in _patterns(norm):
            wins = spec.wins(activation=pattern.activation, residual=pattern.residual is not None, dtype=norm.dtype)
            reasons.append(dispatch.refusal("", wins))
            if not reasons[-1]:
                running += _substitute(graph, norm, pattern, compiled=compiled)
                report.matched[path] = pattern.label
                break
        else:
            report.unmatched[path] = reasons[0]
    if compiled:
        copy_back(graph, running)
    else:
        _count_batches_at_once(graph)


def _substitute(
    graph: fx.Graph, norm: BatchNorm, pattern: _Pattern, *, compiled: bool
) -> list[tuple[fx.Node, fx.Node, int]]:
    last = pattern.nodes[-1]
    arguments = (
        norm.x,
        pattern.residual,
        norm.running_mean,
        norm.running_var,
        norm.weight,
        norm.bias,
        norm.momentum,
        norm.eps,
        pattern.activation,
        pattern.slope,
    )
    running: list[tuple[fx.Node, fx.Node, int]] = []
    with graph.inserting_before(last):
        if compiled:
            call = graph.call_function(torch.ops.advisor.batchnorm_act.default, arguments)
            fused = graph.call_function(operator.getitem, (call, 0))
            statistics = graph.call_function(operator.getitem, (call, 1))
            running += [(norm.running_mean, statistics, 2), (norm.running_var, statistics, 3)]
        else:
            fused = graph.call_function(api.batchnorm_act, arguments)
    match.replace(last, fused, pattern.nodes[-2::-1])
    return running


def copy_back(graph: fx.Graph, running: list[tuple[fx.Node, fx.Node, int]]) -> None:
    """New running statistics into the module's buffers, all in one multi-tensor copy at the end of the graph."""
    if not running:
        return
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    with graph.inserting_before(output):
        rows = [graph.call_function(operator.getitem, (statistics, row)) for _, statistics, row in running]
        graph.call_function(torch._foreach_copy_, ([buffer for buffer, _, _ in running], rows))


def _count_batches_at_once(graph: fx.Graph) -> None:
    """`num_batches_tracked.add_(1)` of every batch norm as one multi-tensor launch instead of one launch each."""
    counts: list[Any] = [
        node
        for node in graph.nodes
        if node.op == "call_method"
        and node.target == "add_"
        and not node.users
        and node.args[1:] == (1,)
        and (value := match.value(node.args[0])) is not None
        and value.dtype == torch.int64
        and value.dim() == 0
    ]
    if len(counts) < 2:
        return
    with graph.inserting_before(counts[-1]):
        graph.call_function(torch._foreach_add_, ([node.args[0] for node in counts], 1))
    for node in counts:
        graph.erase_node(node)
