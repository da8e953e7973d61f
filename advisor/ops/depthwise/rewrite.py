"""Finds depthwise convolutions in a captured graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import dispatch, match
from advisor.ops.depthwise import api, spec


def _depthwise(node: fx.Node) -> tuple[Any, ...] | str:
    """What `api.depthwise_conv2d` is called with, or why the convolution is left alone; "" when it is an ordinary one."""
    if match.conv2d_arguments(node)["groups"] == 1:
        return ""
    call = match.conv2d(node)
    if isinstance(call, str):
        return call
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
    channels, *_, kernel = call.weight_shape
    wins = spec.wins(channels=channels, kernel=kernel, stride=call.stride[0], dilation=call.dilation[0])
    return dispatch.refusal("", wins) or (
        call.x,
        call.weight,
        call.bias,
        call.stride[0],
        call.padding,
        call.dilation[0],
    )


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in where a convolution has as many groups as channels in and out.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; autocast's cast of the input, which
    is inside the convolution, is then written out before it. `report` gains one entry a grouped convolution.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not F.conv2d:
            continue
        found = _depthwise(node)
        if isinstance(found, str):
            if found:
                report.unmatched[match.path(node)] = found
            continue
        x, weight, bias, stride, padding, dilation = found
        with graph.inserting_before(node):
            if compiled:
                before, after = match.value(x), match.value(node)
                if before is not None and after is not None and before.dtype != after.dtype:
                    x = graph.call_method("to", (x, after.dtype))
                new = graph.call_function(
                    torch.ops.advisor.depthwise_conv2d.default, (x, weight, bias, stride, list(padding), dilation)
                )
            else:
                new = graph.call_function(api.depthwise_conv2d, (x, weight, bias, stride, padding, dilation))
        kernel = match.value(weight)
        report.matched[match.path(node)] = spec.name(0 if kernel is None else kernel.shape[-1], stride, dilation)
        match.replace(node, new)
