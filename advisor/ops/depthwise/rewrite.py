"""Finds depthwise convolutions in a captured graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import dispatch, match
from advisor.ops.depthwise import api, spec

_PARAMETERS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DEFAULTS: dict[str, Any] = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def _pair(value: Any) -> tuple[int, int] | None:
    """Both numbers of an argument that may be one number for both."""
    both = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, (list, tuple)) else ()
    if len(both) == 1:
        both *= 2
    return both if len(both) == 2 and all(type(v) is int for v in both) else None


def _depthwise(node: fx.Node) -> tuple[Any, ...] | str:
    """What `api.depthwise_conv2d` is called with, or why the convolution is left alone; "" when it is an ordinary one."""
    bound = match.bound(node, _PARAMETERS, _DEFAULTS)
    groups = bound["groups"]
    if groups == 1:
        return ""
    x, weight = match.value(bound["input"]), match.value(bound["weight"])
    if x is None or weight is None or weight.dim() != 4 or x.dim() != 4:
        return "input or weight is not 4-D"
    channels, weight_shape = x.shape[1], match.static_shape(weight)
    if type(channels) is not int or weight_shape is None:
        return "channel count is dynamic"
    stride, dilation = _pair(bound["stride"]), _pair(bound["dilation"])
    if stride is None or dilation is None:
        return "stride or dilation is no number"
    padding = bound["padding"]
    if padding == "valid":
        padding = 0
    elif padding == "same":  # stride is 1 then; an odd number of taps is padded evenly
        padding = tuple(d * (k - 1) // 2 for d, k in zip(dilation, weight_shape[2:], strict=True))
    pads = _pair(padding)
    if pads is None:
        return f"padding {padding}"
    reason = spec.unsupported_convolution(
        shape=(1, channels, 1, 1),
        weight_shape=weight_shape,
        stride=stride,
        padding=pads,
        dilation=dilation,
        groups=groups,
    )
    if reason:
        return reason
    result = match.value(node)
    dtype = match.dtype_name(x if result is None else result)
    if dtype not in spec.STORAGE:
        return f"dtype {dtype}"
    wins = spec.wins(dtype=dtype, kernel=weight_shape[-1], stride=stride[0])
    return dispatch.refusal("", wins) or (
        bound["input"],
        bound["weight"],
        bound["bias"],
        stride[0],
        pads,
        dilation[0],
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
