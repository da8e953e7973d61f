"""Finds 1 x 1 convolutions of stride 2 between few channels in a captured graph."""

from __future__ import annotations

import torch
from torch import fx

from advisor.ops import dispatch, match
from advisor.ops.strided_pointwise import api, spec


def _strided(node: fx.Node) -> match.Conv2d | str:
    """The convolution that the kernels take, or why it is left alone; "" where it is of another kind."""
    call = match.conv2d(node)
    if isinstance(call, str) or call.unsupported(spec.SUPPORTS):
        return ""
    if call.bias is not None:
        return "has a bias"
    x, result = match.value(call.x), match.value(node)
    shape = None if x is None else match.static_shape(x)
    if result is None or shape is None:
        return "the input's shape is not known"
    dtype = match.dtype_name(result)
    if dtype not in spec.STORAGE:
        return f"dtype {dtype}"
    outputs = call.weight_shape[0]
    wins = spec.wins(spec.call(shape, outputs), dtype)
    return match.said_of(spec.name(call.channels, outputs), dispatch.refusal("", wins)) or call


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in where a 1 x 1 convolution of stride 2 goes between few channels.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; autocast's casts, which are inside the
    convolution, are then written out before it. `report` gains one entry a convolution that the kernels know.
    """
    graph = graph_module.graph
    for node, call in match.convolutions(graph, report, _strided):
        with graph.inserting_before(node):
            if compiled:
                operands = match.in_dtype_of(node, call.x), match.in_dtype_of(node, call.weight)
                new = graph.call_function(torch.ops.advisor.strided_pointwise_conv2d.default, operands)
            else:
                new = graph.call_function(api.strided_pointwise_conv2d, (call.x, call.weight))
        report.matched[match.path(node)] = spec.name(call.channels, call.weight_shape[0])
        match.replace(node, new)
