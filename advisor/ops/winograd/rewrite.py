"""Finds 3 x 3 convolutions of stride 1 between many channels in a captured graph."""

from __future__ import annotations

import torch
from torch import fx

from advisor.ops import dispatch, match
from advisor.ops.winograd import api, spec


def _wide(node: fx.Node) -> match.Conv2d | str:
    """The convolution that the kernels take, or why it is left alone; "" where it is of another kind."""
    call = match.conv2d(node)
    if isinstance(call, str) or call.unsupported(spec.SUPPORTS):
        return ""
    if call.bias is not None:
        return "has a bias"
    result = match.value(node)
    if result is None:
        return "the result's dtype is not known"
    dtype, outputs = match.dtype_name(result), call.weight_shape[0]
    if dtype != spec.DTYPE:
        return f"dtype {dtype}"
    wins = spec.wins_between(call.channels, outputs, dtype)
    return match.said_of(spec.name(call.channels, outputs), dispatch.refusal("", wins)) or call


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in where a 3 x 3 convolution of stride 1 goes between many channels.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; autocast's cast of the input, which
    is inside the convolution, is then written out before it. `report` gains one entry a convolution that the kernels know.
    """
    graph = graph_module.graph
    for node, call in match.convolutions(graph, report, _wide):
        with graph.inserting_before(node):
            if compiled:
                x = match.in_dtype_of(node, call.x)
                new = graph.call_function(torch.ops.advisor.winograd.default, (x, call.weight))
            else:
                new = graph.call_function(api.winograd, (call.x, call.weight))
        report.matched[match.path(node)] = spec.name(call.channels, call.weight_shape[0])
        match.replace(node, new)
