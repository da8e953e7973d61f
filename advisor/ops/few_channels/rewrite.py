"""Finds convolutions of a few input channels, of images and volumes, in a captured graph."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.nn import functional as F

from advisor.ops import dispatch, match, storage
from advisor.ops.few_channels import api, spec

_DIMS = {F.conv2d: 2, F.conv3d: 3}


def _sizes(value: Any, dims: int) -> tuple[int, ...] | None:
    """One number a dimension."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,) * dims
    values *= dims if len(values) == 1 else 1
    return values if len(values) == dims and all(type(v) is int for v in values) else None


def _call(node: fx.Node, dims: int) -> tuple[Any, ...] | str:
    """The operation's arguments; or why it is left alone, "" of convolutions of more channels."""
    given = match.conv2d_arguments(node)
    x, weight, result = match.value(given["input"]), match.value(given["weight"]), match.value(node)
    shape = None if x is None else match.static_shape(x)
    if x is None or weight is None or result is None or shape is None or len(shape) != dims + 2:
        return ""
    if not 1 <= shape[1] < spec.CHANNELS or given["groups"] != 1:
        return ""
    sizes = [_sizes(given[key], dims) for key in ("stride", "padding", "dilation")]
    if any(size is None for size in sizes):
        return "padding by a word, or sizes that are dynamic"
    if x.requires_grad:
        return "the input needs a gradient"
    reason = spec.unsupported(
        shape=shape,
        dense=True,
        dtype=match.dtype_name(x),
        compute=match.dtype_name(result),
        groups=1,
        arch=storage.MIN_ARCH,
    )
    refused = dispatch.refusal(reason, spec.wins(dims=dims, channels=shape[1], compute=match.dtype_name(result)))
    return refused or (given["input"], given["weight"], given["bias"], *sizes)


def _dispatched(dims: int) -> bool:
    """Whether there is anything to look for."""
    return dispatch.forced() or not all(spec.wins(dims=dims, channels=c) for c in range(1, spec.CHANNELS))


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in for each such convolution. `report` gains one entry a convolution."""
    graph = graph_module.graph
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _DIMS or not _dispatched(_DIMS[node.target]):
            continue
        dims, path = _DIMS[node.target], match.path(node)
        found = _call(node, dims)
        if found and compiled:
            found = "left to Inductor"
        if isinstance(found, str):
            if found:
                report.unmatched[path] = found
            continue
        weight = match.value(found[1])
        with graph.inserting_before(node):
            call = graph.call_function(api.few_channels_conv, found)
        match.replace(node, call)
        report.matched[path] = spec.name(dims, weight.shape[1], tuple(weight.shape[2:])) if weight is not None else ""
