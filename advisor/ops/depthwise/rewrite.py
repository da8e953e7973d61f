"""Finds depthwise convolutions in a captured graph."""

from __future__ import annotations

import torch
from torch import fx

from advisor.ops import dispatch, match
from advisor.ops.depthwise import api, spec
from advisor.ops.family import Producer


def _depthwise(node: fx.Node) -> match.Conv2d | str:
    """The convolution that the kernels take, or why it is left alone; "" when it has other groups than one a channel."""
    if match.conv2d_arguments(node)["groups"] == 1:
        return ""
    call = match.conv2d(node)
    if isinstance(call, str):
        return call
    if call.groups != call.channels:
        return ""  # the grouped family's
    reason = call.unsupported(spec.SUPPORTS)
    if reason:
        return reason
    x, result = match.value(call.x), match.value(node)
    if x is None or result is None:
        return "the result's dtype is not known"
    dtype = match.dtype_name(result)
    if dtype not in spec.STORAGE:
        return f"dtype {dtype}"
    channels, *_, kernel = call.weight_shape
    stride, dilation = call.stride[0], call.dilation[0]
    sizes = {"channels": channels, "kernel": kernel, "stride": stride, "dilation": dilation, "image": min(x.shape[2:])}
    wins = spec.wins(**sizes, bias=call.bias is not None, dtype=dtype)
    name = spec.name(kernel, stride, dilation)
    return match.said_of(name, dispatch.refusal("", wins)) or call


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in where a convolution has as many groups as channels in and out.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; autocast's cast of the input, which
    is inside the convolution, is then written out before it. `report` gains one entry a depthwise convolution.
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


def _moments_win(node: fx.Node) -> str:
    given, found = match.value(node.args[0]), match.value(node)
    weight, (stride, padding, dilation) = match.value(node.args[1]), node.args[3:6]
    shape = None if given is None else match.static_shape(given)
    if shape is None or weight is None or found is None:
        return "its sizes are not known"
    call = spec.call(shape, int(weight.shape[-1]), stride, padding, dilation)  # type: ignore[arg-type]  # sizes are known in a captured graph
    return spec.moments_win(call, match.dtype_name(found))


PRODUCES = {api.depthwise_conv2d: Producer(api.depthwise_conv2d_moments, _moments_win)}
