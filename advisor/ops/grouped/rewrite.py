"""Finds grouped 3 x 3 convolutions in a captured graph."""

from __future__ import annotations

import torch
from torch import fx

from advisor.ops import dispatch, match
from advisor.ops.family import Producer
from advisor.ops.grouped import api, spec


def _grouped(node: fx.Node) -> match.Conv2d | str:
    """The convolution that the kernels take, or why it is left alone; "" where it is ordinary or depthwise."""
    if match.conv2d_arguments(node)["groups"] == 1:
        return ""
    call = match.conv2d(node)
    if isinstance(call, str):
        return call
    if call.groups == call.channels:
        return ""
    if call.bias is not None:
        return "has a bias"
    reason = call.unsupported(spec.SUPPORTS)
    if reason:
        return reason
    result = match.value(node)
    if result is None:
        return "the result's dtype is not known"
    dtype = match.dtype_name(result)
    if dtype not in spec.STORAGE:
        return f"dtype {dtype}"
    wins = spec.wins(dtype=dtype, group=call.weight_shape[1], stride=call.stride[0])
    name = spec.name(call.weight_shape[1], call.stride[0])
    return match.said_of(name, dispatch.refusal("", wins)) or call


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in where a 3 x 3 convolution has fewer groups than channels.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; autocast's cast of the input, which
    is inside the convolution, is then written out before it. `report` gains one entry a grouped convolution.
    """
    graph = graph_module.graph
    for node, call in match.convolutions(graph, report, _grouped):
        with graph.inserting_before(node):
            if compiled:
                x = match.in_dtype_of(node, call.x)
                new = graph.call_function(
                    torch.ops.advisor.grouped_conv2d.default, (x, call.weight, call.stride[0], call.groups)
                )
            else:
                new = graph.call_function(api.grouped_conv2d, (call.x, call.weight, call.stride[0], call.groups))
        report.matched[match.path(node)] = spec.name(call.weight_shape[1], call.stride[0])
        match.replace(node, new)


def _moments_win(node: fx.Node) -> str:
    weight, stride = match.value(node.args[1]), node.args[2]
    if weight is None or not isinstance(stride, int):
        return "its sizes are not known"
    return spec.moments_win(int(weight.shape[1]), stride)


PRODUCES = {api.grouped_conv2d: Producer(api.grouped_conv2d_moments, _moments_win)}
