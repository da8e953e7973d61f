"""Finds 1 x 1 convolutions before and behind batch norms in a captured graph."""

from __future__ import annotations

import math
import operator
from typing import cast

from torch import fx
from torch.nn import functional as F

from advisor.ops import dispatch, match
from advisor.ops.batchnorm_act import api as batchnorm_act
from advisor.ops.batchnorm_act import spec as batchnorm_spec
from advisor.ops.family import Producer
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
    reason = call.unsupported(spec.SUPPORTS)
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
    norms = [user for user in node.users if user.target is batchnorm_act.batchnorm_act and user.args[0] is node]
    if not norms:
        return "no batch norm of ours behind it"
    nbytes = math.prod(shape) * result.itemsize
    useless = [batchnorm_spec.takes_moments(nbytes, norm.args[1] is not None) for norm in norms]
    if all(useless):
        return f"the norm behind it has no use for its result's moments: {useless[0]}"
    n, _, h, w = shape
    wins = spec.wins(dtype=dtype, rows=n * h * w, in_channels=call.channels, out_channels=shape[1])
    return dispatch.refusal("", wins) or call


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


_NORMS = (batchnorm_act.batchnorm_act, batchnorm_act.forked_batchnorm_act)


def finish(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """A norm of ours and the 1 x 1 convolution behind it become one operation where the sums that the norm's gradient needs are
    better taken from the kernel that makes the convolution's.

    After the norms' own last look at the graph: moments are paired by then, and results that are used twice are given out twice.
    """
    if compiled:
        return
    for node in list(graph_module.graph.nodes):
        weight = _weight(node)
        if weight is None:
            continue
        handle = node.args[0]
        if not isinstance(handle, fx.Node) or list(handle.users) != [node]:
            continue
        norm = handle.args[0] if handle.target is operator.getitem else handle
        if not isinstance(norm, fx.Node) or norm.target not in _NORMS or not _adjoining(norm, node):
            continue
        result = _result(node)
        what = _together(norm, result, weight)
        if what:
            path = match.path(result)
            report.matched[path] = f"{report.matched[path]}, {what}" if path in report.matched else what
            report.unmatched.pop(path, None)
            _merge(norm, handle, node, weight)


def _weight(node: fx.Node) -> fx.Node | None:
    """The weight of the 1 x 1 convolution that the node is, PyTorch's or ours; None where it is none."""
    if node.target in (api.pointwise_conv2d, api.pointwise_conv2d_moments):
        return cast(fx.Node, node.args[1])
    if node.op != "call_function" or node.target is not F.conv2d:
        return None
    call = match.conv2d(node)
    if isinstance(call, str) or call.bias is not None or not isinstance(call.weight, fx.Node):
        return None
    other = call.unsupported(spec.ONE_TAP)
    return None if other or node.args[:1] != (call.x,) else call.weight


def _adjoining(norm: fx.Node, conv: fx.Node) -> bool:
    """Whether nothing runs between the two, so that the norm may as well stand where the convolution does."""
    node = norm.next
    while node.op in ("placeholder", "get_attr") or (node in norm.users and node.target is operator.getitem):
        node = node.next
    return node is conv


def _result(conv: fx.Node) -> fx.Node:
    """The node that stands for the convolution's result."""
    if conv.target is not api.pointwise_conv2d_moments:
        return conv
    return next(user for user in conv.users if user.args[1] == 0)


def _together(norm: fx.Node, result: fx.Node, weight: fx.Node) -> str:
    """What the norm and the convolution with this result are as one operation; "" where they stay apart."""
    x, z, taps = match.value(norm.args[0]), match.value(result), match.value(weight)
    shape = None if x is None else match.static_shape(x)
    if x is None or z is None or taps is None or shape is None or z.dtype != x.dtype:
        return ""
    n, c, h, w = shape
    dtype, out, activation, residual = (
        match.dtype_name(x),
        taps.shape[0],
        cast(str, norm.args[8]),
        norm.args[1] is not None,
    )
    wins = spec.gradient_wins(
        activation=activation,
        residual=residual,
        forked=norm.target is batchnorm_act.forked_batchnorm_act,
        dtype=dtype,
        rows=n * h * w,
        channels=c,
        out_channels=out,
    )
    reason = spec.unsupported_gradient(rows=n * h * w, dtype=dtype, channels=c, out_channels=out)
    if dispatch.refusal(reason, wins) or match.changed_in_place(result):
        return ""
    return spec.behind_norm(activation, residual, c, out)


def _merge(norm: fx.Node, handle: fx.Node, conv: fx.Node, weight: fx.Node) -> None:
    graph, leaving = conv.graph, conv.target is api.pointwise_conv2d_moments
    with graph.inserting_before(conv):
        given = {"conv_weight": weight, **norm.kwargs, "leaving": leaving}
        both = graph.call_function(api.batchnorm_act_pointwise, norm.args, given)
        y, z, *parts = match.results(both, 3 if leaving else 2)
    if not parts:
        match.replace(conv, z)
    else:
        for result, new in enumerate((z, *parts)):
            for user in [user for user in conv.users if user.args[1] == result]:
                match.replace(user, new)
        graph.erase_node(conv)
    for other in [user for user in norm.users if user is not handle]:  # the norm's result for whoever else reads it
        match.replace(other, y)
    for dead in dict.fromkeys((handle, norm, y)):
        if not dead.users and not dead._erased:
            graph.erase_node(dead)


PRODUCES = {api.pointwise_conv2d: Producer(api.pointwise_conv2d_moments, lambda node: "")}
