"""Finds dense convolutions with large taps in a captured graph."""

from __future__ import annotations

import torch
from torch import fx

from advisor.ops import dispatch, match
from advisor.ops.fft_conv import api, spec


def _large(node: fx.Node) -> match.Conv2d | str:
    """The convolution that transforms take, or why it is left alone; "" where its taps are few or its groups several."""
    if match.conv2d_arguments(node)["groups"] != 1:
        return ""
    call = match.conv2d(node)
    if isinstance(call, str):
        return call
    if max(call.weight_shape[2:]) < spec.TAPS:
        return ""
    reason = call.unsupported(spec.SUPPORTS)
    if reason:
        return reason
    x, result = match.value(call.x), match.value(node)
    shape = None if x is None else match.static_shape(x)
    if shape is None or result is None:
        return "sizes or the result's dtype are not known"
    dtype = match.dtype_name(result)
    if dtype != "float32":
        return f"dtype {dtype}"
    wins = spec.wins(spec.call(shape, call.weight_shape, call.padding), dtype)
    return match.said_of(spec.name(call.weight_shape[2:]), dispatch.refusal("", wins)) or call  # type: ignore[arg-type]  # the call, where it is one


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in where a dense convolution has large taps; its bias is added behind it.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation. `report` gains one entry for each such
    convolution.
    """
    graph = graph_module.graph
    for node, call in match.convolutions(graph, report, _large):
        with graph.inserting_before(node):
            if compiled:
                arguments = (match.in_dtype_of(node, call.x), call.weight, list(call.padding))
                new = graph.call_function(torch.ops.advisor.fft_conv2d.default, arguments)
            else:
                new = graph.call_function(api.fft_conv2d, (call.x, call.weight, call.padding))
            if call.bias is not None:
                bias = graph.call_method("view", (call.bias, 1, -1, 1, 1))
                new = graph.call_function(torch.add, (new, bias))
        report.matched[match.path(node)] = spec.name((call.weight_shape[2], call.weight_shape[3]))
        match.replace(node, new)
