"""Finds 1 x 1 convolutions before batch norms in a captured graph."""

from __future__ import annotations

import math

from torch import fx

from advisor.ops import dispatch, match
from advisor.ops.batchnorm_act import api as batchnorm_act
from advisor.ops.batchnorm_act import spec as batchnorm_spec
from advisor.ops.moments import Producer
from advisor.ops.pointwise import api, spec


def _pointwise(node: fx.Node) -> match.Conv2d | str:
    """The convolution that the kernel takes, or why it is left alone; "" where it has other taps or groups."""
    given = match.conv2d_arguments(node)
    weight = match.value(given["weight"])
    if given["groups"] != 1 or (weight is not None and tuple(weight.shape[2:]) != (1, 1)):
        return ""
    call = match.conv2d(node)
    if isinstance(call, str):
        return call
    if call.bias is not None:
        return "has a bias"
    reason = call.unsupported(spec)
    if reason:
        return reason
    result = match.value(node)
    shape = None if result is None else match.static_shape(result)
    if result is None or shape is None:
        return "the result's shape is not known"
    dtype = match.dtype_name(result)
    if dtype not in spec.STORAGE:
        return f"dtype {dtype}"
    if match.changed_in_place(node):
        return "its result is changed in place"
    if not any(_takes_moments(user, node, math.prod(shape) * result.itemsize) for user in node.users):
        return "no batch norm behind it takes the moments of its result"
    n, _, h, w = shape
    wins = spec.wins(dtype=dtype, rows=n * h * w, in_channels=call.channels, out_channels=shape[1])
    return dispatch.refusal("", wins) or call


def _takes_moments(user: fx.Node, node: fx.Node, nbytes: int) -> bool:
    """Whether `user` is a batch norm of ours over the node's value with a use for its moments."""
    if user.target is not batchnorm_act.batchnorm_act or user.args[0] is not node:
        return False
    return not batchnorm_spec.takes_moments(nbytes, user.args[1] is not None)


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in where a 1 x 1 convolution goes into a batch norm that our kernels run, which is put in before.

    `report` gains one entry a 1 x 1 convolution. With `compiled` the graph goes on to Inductor, whose batch norms take no moments.
    """
    graph = graph_module.graph
    for node, call in match.convolutions(graph, report, _pointwise):
        if compiled:
            report.unmatched[match.path(node)] = "left to Inductor, whose batch norms take no moments"
            continue
        with graph.inserting_before(node):
            new = graph.call_function(api.pointwise_conv2d, (call.x, call.weight))
        report.matched[match.path(node)] = spec.name(call.channels, call.weight_shape[0])
        match.replace(node, new)


PRODUCES = {api.pointwise_conv2d: Producer(api.pointwise_conv2d_moments, lambda node: "")}
