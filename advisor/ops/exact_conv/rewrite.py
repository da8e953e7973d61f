"""Finds convolutions and linear layers in strict fp32 in a captured graph."""

from __future__ import annotations

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import dispatch, match
from advisor.ops.exact_conv import api, linear, spec, tf32

COMPUTED = "float32"
_LINEAR = ("input", "weight", "bias")


def _strict(node: fx.Node) -> match.Conv2d | str:
    """The convolution that the kernels take, or why it is left alone; "" where it is not computed in fp32."""
    result = match.value(node)
    if result is None or match.dtype_name(result) != COMPUTED:
        return ""
    call = match.conv2d(node)
    if isinstance(call, str):
        return call
    if call.groups == call.channels and call.groups > 1:
        return ""  # depthwise
    reason = call.unsupported(spec.SUPPORTS)
    if reason:
        return reason
    x = match.value(call.x)
    shape = None if x is None else match.static_shape(x)
    if shape is None:
        return "its sizes are not known"
    sized = spec.call(shape, call.weight_shape, call.stride[0], call.padding, call.dilation[0], call.groups)
    return (
        dispatch.refusal("", tf32.ALLOWED if tf32.allowed() else match.said_of(spec.name(sized), spec.wins(sized)))
        or call
    )


def _linear(node: fx.Node) -> str:
    """Why the kernels leave this linear layer, which is computed in fp32, alone; empty where they take it."""
    x, weight = match.value(node.args[0]), match.value(match.bound(node, _LINEAR, {})["weight"])
    shape = None if x is None else match.static_shape(x)
    if shape is None or weight is None or weight.dim() != 2 or 0 in shape:
        return "its sizes are not known"
    wins = spec.wins(spec.linear_call(shape, weight.shape[0]), spec.LINEAR)
    name = spec.linear_name(shape[-1], weight.shape[0])
    return dispatch.refusal("", tf32.ALLOWED if tf32.products_allowed() else match.said_of(name, wins))


def _rewrite_linear(graph: fx.Graph, report: match.MatchReport, *, compiled: bool) -> None:
    operation = torch.ops.advisor.exact_linear.default if compiled else linear.exact_linear
    for node in list(graph.nodes):
        result = match.value(node)
        if node.op != "call_function" or node.target is not F.linear or result is None:
            continue
        if match.dtype_name(result) != COMPUTED:
            continue
        reason = _linear(node)
        if reason:
            report.unmatched[match.path(node)] = reason
            continue
        given = match.bound(node, _LINEAR, {"bias": None})
        with graph.inserting_before(node):
            new = graph.call_function(operation, tuple(given[name] for name in _LINEAR))
        report.matched[match.path(node)] = spec.LINEAR
        match.replace(node, new)


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in where a convolution or a linear layer is computed in fp32 and TF32 is off.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation. `report` gains one entry for each
    of them in fp32.
    """
    graph = graph_module.graph
    _rewrite_linear(graph, report, compiled=compiled)
    for node, call in match.convolutions(graph, report, _strict):
        numbers = (call.stride[0], call.padding, call.dilation[0], call.groups)
        with graph.inserting_before(node):
            if compiled:
                arguments = (match.in_dtype_of(node, call.x), call.weight, call.bias, *numbers)
                new = graph.call_function(torch.ops.advisor.exact_conv2d.default, arguments)
            else:
                new = graph.call_function(api.exact_conv2d, (call.x, call.weight, call.bias, *numbers))
        report.matched[match.path(node)] = (
            f"{spec.KIND} k{call.weight_shape[2]}x{call.weight_shape[3]} s{call.stride[0]}"
        )
        match.replace(node, new)
