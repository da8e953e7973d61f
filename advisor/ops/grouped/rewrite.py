"""Finds grouped 3 x 3 convolutions in a captured graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import dispatch, match
from advisor.ops.grouped import api, spec

_PARAMETERS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DEFAULTS: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def _pair(value: Any) -> tuple[int, int] | None:
    """Both numbers of an argument that may be one number for both."""
    both = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(both) == 1:
        both *= 2
    return both if len(both) == 2 and all(type(v) is int for v in both) else None


def _grouped(node: fx.Node) -> tuple[Any, ...] | str:
    """What `api.grouped_conv2d` is called with, or why the convolution is left alone; "" where it is ordinary or depthwise."""
    bound = match.bound(node, _PARAMETERS, _DEFAULTS)
    groups = bound["groups"]
    x, weight = match.value(bound["input"]), match.value(bound["weight"])
    if groups == 1:
        return ""
    if x is None or weight is None or weight.dim() != 4 or x.dim() != 4:
        return "input or weight is not 4-D"
    channels, weight_shape = x.shape[1], match.static_shape(weight)
    if type(channels) is not int or weight_shape is None:
        return "channel count is dynamic"
    if groups == channels:
        return ""
    stride, dilation = _pair(bound["stride"]), _pair(bound["dilation"])
    if stride is None or dilation is None:
        return "stride or dilation is no number"
    padding = (1, 1) if bound["padding"] == "same" and weight_shape[2:] == (3, 3) else _pair(bound["padding"])
    if padding is None:
        return f"padding {bound['padding']}"
    if bound["bias"] is not None:
        return "has a bias"
    reason = spec.unsupported_convolution(
        shape=(1, channels, 1, 1),
        weight_shape=weight_shape,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
    )
    if reason:
        return reason
    result = match.value(node)
    dtype = match.dtype_name(x if result is None else result)
    if dtype not in spec.STORAGE:
        return f"dtype {dtype}"
    wins = spec.wins(dtype=dtype, group=weight_shape[1], stride=stride[0])
    return dispatch.refusal("", wins) or (bound["input"], bound["weight"], stride[0], groups)


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in where a 3 x 3 convolution has fewer groups than channels.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; autocast's cast of the input, which
    is inside the convolution, is then written out before it. `report` gains one entry a grouped convolution.
    """
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target is not F.conv2d:
            continue
        found = _grouped(node)
        if isinstance(found, str):
            if found:
                report.unmatched[match.path(node)] = found
            continue
        x, weight, stride, groups = found
        with graph.inserting_before(node):
            if compiled:
                before, after = match.value(x), match.value(node)
                if before is not None and after is not None and before.dtype != after.dtype:
                    x = graph.call_method("to", (x, after.dtype))
                new = graph.call_function(torch.ops.advisor.grouped_conv2d.default, (x, weight, stride, groups))
            else:
                new = graph.call_function(api.grouped_conv2d, (x, weight, stride, groups))
        kernel = match.value(weight)
        report.matched[match.path(node)] = spec.name(0 if kernel is None else kernel.shape[1], stride)
        match.replace(node, new)
