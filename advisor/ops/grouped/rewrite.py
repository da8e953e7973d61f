"""Finds grouped 3 x 3 convolutions in a captured graph."""

from __future__ import annotations

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import dispatch, match
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
    reason = spec.unsupported_convolution(
        shape=(1, call.channels, 1, 1),
        weight_shape=call.weight_shape,
        stride=call.stride,
        padding=call.padding,
        dilation=call.dilation,
        groups=call.groups,
    )
    if reason:
        return reason
    result = match.value(node)
    if result is None:
        return "the result's dtype is not known"
    dtype = match.dtype_name(result)
    if dtype not in spec.STORAGE:
        return f"dtype {dtype}"
    wins = spec.wins(dtype=dtype, group=call.weight_shape[1], stride=call.stride[0])
    return dispatch.refusal("", wins) or call


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in where a 3 x 3 convolution has fewer groups than channels.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; autocast's cast of the input, which
    is inside the convolution, is then written out before it. `report` gains one entry a grouped convolution.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not F.conv2d:
            continue
        call = _grouped(node)
        if isinstance(call, str):
            if call:
                report.unmatched[match.path(node)] = call
            continue
        x = call.x
        with graph.inserting_before(node):
            if compiled:
                before, after = match.value(x), match.value(node)
                if before is not None and after is not None and before.dtype != after.dtype:
                    x = graph.call_method("to", (x, after.dtype))
                new = graph.call_function(
                    torch.ops.advisor.grouped_conv2d.default, (x, call.weight, call.stride[0], call.groups)
                )
            else:
                new = graph.call_function(api.grouped_conv2d, (x, call.weight, call.stride[0], call.groups))
        report.matched[match.path(node)] = spec.name(call.weight_shape[1], call.stride[0])
        match.replace(node, new)
