"""Finds depthwise convolutions in a captured graph."""

from __future__ import annotations

import torch
from torch import fx

from advisor.ops import dispatch, match
from advisor.ops.depthwise import api, spec


def _depthwise(node: fx.Node) -> match.Conv2d | str:
    """The convolution that the kernels take, or why it is left alone; "" when it is an ordinary one."""
    if match.conv2d_arguments(node)["groups"] == 1:
        return ""
    call = match.conv2d(node)
    if isinstance(call, str):
        return call
    reason = call.unsupported(spec)
    if reason:
        return reason
    result = match.value(node)
    if result is None:
        return "the result's dtype is not known"
    dtype = match.dtype_name(result)
    if dtype not in spec.STORAGE:
        return f"dtype {dtype}"
    channels, *_, kernel = call.weight_shape
    wins = spec.wins(channels=channels, kernel=kernel, stride=call.stride[0], dilation=call.dilation[0])
    return dispatch.refusal("", wins) or call


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in where a convolution has as many groups as channels in and out.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; autocast's cast of the input, which
    is inside the convolution, is then written out before it. `report` gains one entry a grouped convolution.
    """
    graph = graph_module.graph
    for node, call in match.convolutions(graph, report, _depthwise):
        stride, dilation = call.stride[0], call.dilation[0]
        with graph.inserting_before(node):
            if compiled:
                x = match.in_dtype_of(node, call.x)
                new = graph.call_function(
                    torch.ops.advisor.depthwise_conv2d.default,
                    (x, call.weight, call.bias, stride, list(call.padding), dilation),
                )
            else:
                new = graph.call_function(
                    api.depthwise_conv2d, (call.x, call.weight, call.bias, stride, call.padding, dilation)
                )
        report.matched[match.path(node)] = spec.name(call.weight_shape[-1], stride, dilation)
        match.replace(node, new)
