"""Finds max and average pooling of volumes in a captured graph, as modules or functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import dispatch, match, storage
from advisor.ops.volume_pooling import api, spec
from advisor.ops.volume_pooling.spec import Triple, VolumeWindow

_MAX = (F.max_pool3d, torch.max_pool3d)
_MAX_PARAMETERS = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_AVG_PARAMETERS = (
    "input",
    "kernel_size",
    "stride",
    "padding",
    "ceil_mode",
    "count_include_pad",
    "divisor_override",
)
_DEFAULTS = {
    "stride": None,
    "padding": 0,
    "dilation": 1,
    "ceil_mode": False,
    "return_indices": False,
    "divisor_override": None,
}


def _triple(value: Any) -> Triple | None:
    """(d, h, w) from a number or a sequence of one or three; None when it is neither."""
    values = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if len(values) == 1:
        values *= 3
    return (values[0], values[1], values[2]) if len(values) == 3 and all(type(v) is int for v in values) else None


def _window(node: fx.Node) -> tuple[Any, VolumeWindow] | str:
    """Input and window of the call, or why it is left alone."""
    given = match.bound(node, _MAX_PARAMETERS if node.target in _MAX else _AVG_PARAMETERS, _DEFAULTS)
    if given["return_indices"] or given["divisor_override"] is not None:
        return "indices or another divisor are asked for"
    if given["ceil_mode"] or _triple(given["dilation"]) != (1, 1, 1):
        return "ceil_mode or dilation"
    kernel, padding = _triple(given["kernel_size"]), _triple(given["padding"])
    stride = kernel if given["stride"] in (None, (), []) else _triple(given["stride"])
    if kernel is None or stride is None or padding is None:
        return "sizes are dynamic"
    return given["input"], spec.window(kernel, stride, padding)


def _refused(operation: str, x: Any, window: VolumeWindow) -> str:
    value = match.value(x)
    shape = None if value is None else match.static_shape(value)
    if value is None or shape is None:
        return "its input's shape is not known"
    dtype = match.dtype_name(value)
    reason = spec.unsupported(
        operation, shape=shape, window=window, channels_last=True, dtype=dtype, arch=storage.MIN_ARCH
    )
    return dispatch.refusal(reason, spec.wins(operation, dtype=dtype))


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operations in, each pooling call by itself. With `compiled` the graph goes on to Inductor, which is left its own."""
    graph = graph_module.graph
    calls = {node: match.path(node) for node in graph.nodes if node.target in (*_MAX, F.avg_pool3d)}
    for node, path in calls.items():
        operation = "max_pool3d" if node.target in _MAX else "avg_pool3d"
        found = "left to Inductor" if compiled else _window(node)
        reason = found if isinstance(found, str) else _refused(operation, *found)
        if isinstance(found, str) or reason:
            report.unmatched[path] = reason
            continue
        x, window = found
        with graph.inserting_before(node):
            call = (
                graph.call_function(api.max_pool3d, (x, *window))
                if operation == "max_pool3d"
                else graph.call_function(api.avg_pool3d, (x, *window[:2]))
            )
        match.replace(node, call)
        report.matched[path] = f"{operation} {window.label}"
