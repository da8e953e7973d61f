"""Finds depthwise convolutions with large taps in a captured graph."""

from __future__ import annotations

import torch
from torch import fx

from advisor.ops import dispatch, match
from advisor.ops.large_depthwise import api, spec
from advisor.ops.storage import STORAGE


def _large(node: fx.Node) -> match.Conv2d | str:
    """The convolution that the kernels take, or why it is left alone; "" where it is no depthwise one with large taps."""
    if match.conv2d_arguments(node)["groups"] == 1:
        return ""
    call = match.conv2d(node)
    if isinstance(call, str):
        return call
    if call.groups != call.channels or max(call.weight_shape[2:]) < spec.TAPS[0]:
        return ""  # another family's
    reason = call.unsupported(spec.SUPPORTS)
    if reason:
        return reason
    result = match.value(node)
    if result is None:
        return "the result's dtype is not known"
    dtype = match.dtype_name(result)
    if dtype not in STORAGE:
        return f"dtype {dtype}"
    taps = call.weight_shape[2], call.weight_shape[3]
    return match.said_of(spec.name(taps), dispatch.refusal("", spec.wins(taps, dtype))) or call


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in where a convolution has as many groups as channels and large taps.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; autocast's cast of the input, which
    is inside the convolution, is then written out before it. `report` gains one entry for each such convolution.
    """
    graph = graph_module.graph
    for node, call in match.convolutions(graph, report, _large):
        with graph.inserting_before(node):
            if compiled:
                x = match.in_dtype_of(node, call.x)
                arguments = (x, call.weight, call.bias, list(call.padding))
                new = graph.call_function(torch.ops.advisor.large_depthwise_conv2d.default, arguments)
            else:
                new = graph.call_function(api.large_depthwise_conv2d, (call.x, call.weight, call.bias, call.padding))
        report.matched[match.path(node)] = spec.name((call.weight_shape[2], call.weight_shape[3]))
        match.replace(node, new)
