"""Finds convolutions of three channels in a captured graph."""

from __future__ import annotations

import torch
from torch import fx

from advisor.ops import dispatch, match
from advisor.ops.family import Producer
from advisor.ops.first_conv import api, spec


def _first(node: fx.Node) -> match.Conv2d | str:
    """The convolution that the kernels take, or why it is left alone; "" when it has other channels."""
    weight = match.value(match.conv2d_arguments(node)["weight"])
    if weight is not None and (weight.dim() != 4 or weight.shape[1] != spec.IN_CHANNELS):
        return ""
    call = match.conv2d(node)
    if isinstance(call, str):
        return call
    if call.channels != spec.IN_CHANNELS:
        return ""  # groups of three
    reason = call.unsupported(spec.SUPPORTS)
    if reason:
        return reason
    x, result = match.value(call.x), match.value(node)
    if x is None or result is None:
        return "dtypes are not known"
    if x.requires_grad:
        return "the input needs a gradient"
    dtype = match.dtype_name(result)
    if dtype not in spec.COMPUTE:
        return f"computed in {dtype}"
    channels, kernel = call.weight_shape[0], call.weight_shape[-1]
    wins = spec.wins(dtype=dtype, kernel=kernel, stride=call.stride[0], channels=channels)
    return dispatch.refusal("", wins) or call


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in where a convolution has three input channels and its input needs no gradient.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; it is told the dtype of the result,
    which is autocast's. `report` gains one entry a convolution of three channels.
    """
    graph = graph_module.graph
    for node, call in match.convolutions(graph, report, _first):
        with graph.inserting_before(node):
            if compiled:
                result = match.value(node)
                assert result is not None  # seen above
                new = graph.call_function(
                    torch.ops.advisor.first_conv2d.default,
                    (call.x, call.weight, call.bias, call.stride[0], list(call.padding), result.dtype),
                )
            else:
                new = graph.call_function(
                    api.first_conv2d, (call.x, call.weight, call.bias, call.stride[0], call.padding)
                )
        report.matched[match.path(node)] = spec.name(call.weight_shape[-1], call.stride[0], call.weight_shape[0])
        match.replace(node, new)


def _moments_win(node: fx.Node) -> str:
    weight, stride = match.value(node.args[1]), node.args[3]
    shape = None if weight is None else match.static_shape(weight)
    if shape is None or not isinstance(stride, int):
        return "its sizes are not known"
    return spec.moments_win(shape[-1], stride, shape[0])


PRODUCES = {api.first_conv2d: Producer(api.first_conv2d_moments, _moments_win)}
