"""Finds batch_norm + (activation) + max_pool2d in a captured graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import dispatch, match, moments, storage
from advisor.ops.batchnorm_act.rewrite import BatchNorm, batch_norm, copy_back
from advisor.ops.batchnorm_max_pool import api, spec
from advisor.ops.pooling.rewrite import max_pool_window
from advisor.ops.pooling.spec import PoolWindow


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in where a norm's result, through at most one activation, goes into a max-pooling and nowhere else.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; else the thin eager function is
    called. `report` gains one entry a max-pooling behind a norm.
    """
    graph = graph_module.graph
    running: list[tuple[fx.Node, fx.Node, int]] = []  # statistics to copy back: (buffer, op's second output, row)
    paths = {node: match.path(node) for node in graph.nodes if max_pool_window(node) is not None}
    for node, path in paths.items():
        pooling, chain = max_pool_window(node), _chain(node)
        if pooling is None or chain is None:
            continue
        if isinstance(pooling, str):
            report.unmatched[path] = pooling
            continue
        nodes, activation, slope = chain
        norm, window = batch_norm(nodes[-1]), pooling[1]
        reason = norm if isinstance(norm, str) else _refused(norm, nodes, activation, slope, window)
        if isinstance(norm, BatchNorm) and norm.shared and compiled and not reason:
            reason = "the norm's running statistics are used elsewhere too"  # they are copied back at the graph's end
        if isinstance(norm, str) or reason:
            report.unmatched[path] = reason
            continue
        running += _substitute(graph, node, norm, nodes, activation, slope, window, compiled=compiled)
        report.matched[path] = f"bn{'' if activation == 'none' else '+' + activation}+max_pool"
    copy_back(graph, running)


def _chain(pool: fx.Node) -> tuple[tuple[fx.Node, ...], str, float] | None:
    """The nodes before a pooling, last first, down to the batch norm; with the activation among them."""
    before = match.operand(pool)
    if not isinstance(before, fx.Node):
        return None
    nodes: tuple[fx.Node, ...] = (before,)
    activation, slope = "none", 0.0
    follows = match.activation(before)
    if follows is not None:
        activation, slope = follows
        norm = match.operand(before)
        if not isinstance(norm, fx.Node):
            return None
        nodes = (before, norm)
    if nodes[-1].op != "call_function" or nodes[-1].target is not F.batch_norm:
        return None
    return nodes, activation, slope


def _refused(norm: BatchNorm, nodes: tuple[fx.Node, ...], activation: str, slope: float, window: PoolWindow) -> str:
    if any(match.only_user(node) is None for node in nodes):
        return "what is pooled is used elsewhere too"
    if norm.variant:
        return f"{norm.variant}: the norm by itself"
    x = match.value(norm.x)
    shape = None if x is None else match.static_shape(x)
    if shape is None:
        return "its input's shape is not known"
    unsupported = spec.unsupported(
        shape=shape,
        window=window,
        channels_last=True,
        dtype=norm.dtype,
        activation=activation,
        slope=slope,
        arch=storage.MIN_ARCH,
    )
    return dispatch.refusal(unsupported, spec.wins(activation, norm.dtype))


def _substitute(
    graph: fx.Graph,
    pool: fx.Node,
    norm: BatchNorm,
    nodes: tuple[fx.Node, ...],
    activation: str,
    slope: float,
    window: PoolWindow,
    *,
    compiled: bool,
) -> list[tuple[fx.Node, fx.Node, int]]:
    arguments: tuple[Any, ...] = (
        norm.x,
        norm.running_mean,
        norm.running_var,
        norm.weight,
        norm.bias,
        norm.momentum,
        norm.eps,
        activation,
        slope,
        *window.arguments,
    )
    running: list[tuple[fx.Node, fx.Node, int]] = []
    with graph.inserting_before(norm.node):  # who reads the running statistics next finds them updated
        if compiled:
            call = graph.call_function(torch.ops.advisor.batchnorm_max_pool.default, arguments)
            fused, statistics = match.results(call, 2)
            running += norm.updated_by(statistics)
        else:
            fused = graph.call_function(api.batchnorm_max_pool, arguments)
    match.replace(pool, fused, nodes)
    return running


def finish(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Norms take the moments of what they normalise from the kernel that made it, as behind a network's first convolution."""
    if not compiled:
        moments.pair(graph_module.graph, {api.batchnorm_max_pool: lambda norm: ""})
