"""Finds convolutions with a bias that nothing else has taken, and the sum behind them, in a captured graph."""

from __future__ import annotations

from torch import fx
from torch.nn import functional as F

from advisor.ops import dimensions, dispatch, dispatch_table, match, storage
from advisor.ops.bias_act.rewrite import bias_of, without_bias
from advisor.ops.bias_add import api, spec

_CONVOLUTIONS = {F.conv2d, F.conv_transpose2d}
_OF_VOLUMES = {F.conv3d, F.conv_transpose3d}


def _is_convolution(node: fx.Node) -> bool:
    """Of images; or the image of a convolution of volumes that nobody else sees."""
    return node.op == "call_function" and (node.target in _CONVOLUTIONS or dimensions.image_of(node) is not None)


def _behind(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The sum that takes the convolution's result and nothing else does, and what it adds."""
    user = match.only_user(node)
    other = match.addend(user, node) if user is not None else None
    return (user, other) if user is not None and other is not None and match.read_later(other, user) else None


def _refused(node: fx.Node, *, residual: bool) -> str:
    x = match.value(node)
    shape = None if x is None else match.static_shape(x)
    if x is None or shape is None:
        return "its shape is not known"
    reason = spec.TENSORS.refusal(shape=shape, channels_last=True, dtype=match.dtype_name(x), arch=storage.MIN_ARCH)
    return dispatch.refusal(reason, spec.wins(residual=residual, dtype=match.dtype_name(x)))


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Move the bias of such convolutions behind them, with the sum where one follows. `report` gains one entry a convolution."""
    if not dispatch_table.read()["bias_add"].taken and not dispatch.forced():
        return  # nothing is dispatched: nothing to look for
    graph = graph_module.graph
    for node in list(graph.nodes) if not compiled else ():
        if node.op == "call_function" and node.target in _OF_VOLUMES:
            dimensions.seen_as_image(node)
    for node in list(graph.nodes):
        if node._erased or not _is_convolution(node) or bias_of(node) is None:
            continue
        path = match.path(node)
        found = _behind(node)
        reason = "left to Inductor" if compiled else _refused(node, residual=found is not None)
        if reason:
            report.unmatched[path] = reason
            continue
        report.matched[path] = spec.name(residual=found is not None)
        _put(node, found)


def _put(node: fx.Node, behind: tuple[fx.Node, fx.Node] | None) -> None:
    graph, volumes = node.graph, dimensions.image_of(node)
    bias, plain = bias_of(node), without_bias(node)
    last, other = behind if behind is not None else (node, None)
    with graph.inserting_before(last):
        fused = graph.call_function(api.bias_add, (plain, bias, other, volumes is None))
    dead = (node, *((volumes,) if volumes is not None else ()))
    match.replace(last, fused, dead if last is not node else dead[1:])
