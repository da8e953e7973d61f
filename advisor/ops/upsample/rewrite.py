"""Finds interpolate, and the cat that follows it, in a captured graph.

Under autocast on CUDA PyTorch interpolates in fp32, and a concatenation with the result is fp32 as a whole. Where all that reads
it, directly or through padding and concatenation, rounds it to the low dtype, as convolutions do, the operation rounds itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import consumers, dispatch, match, storage
from advisor.ops.pooling.spec import Pair
from advisor.ops.upsample import api, spec

_PARAMETERS = ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
_DEFAULTS = {
    "size": None,
    "scale_factor": None,
    "mode": "nearest",
    "align_corners": None,
    "recompute_scale_factor": None,
    "antialias": False,
}
_FUNCTIONS = (F.interpolate, F.upsample, F.upsample_bilinear, F.upsample_nearest)


@dataclass(frozen=True, slots=True)
class _Call:
    x: fx.Node
    shape: tuple[int, ...]
    size: Pair
    factors: tuple[float, float] | None
    mode: str
    align_corners: bool


@dataclass(frozen=True, slots=True)
class _Pattern:
    """The nodes that one operation stands for, the last first, and what is concatenated."""

    nodes: tuple[fx.Node, ...]
    tensors: tuple[fx.Node, ...]
    position: int


def _call(node: fx.Node) -> _Call | str:
    """The call's arguments, or why it is left alone."""
    bound = match.bound(node, _PARAMETERS, _DEFAULTS)
    if node.target is F.upsample_bilinear:
        bound |= {"mode": "bilinear", "align_corners": True}
    x, out = match.value(bound["input"]), match.value(node)
    shape = None if x is None else match.static_shape(x)
    size = None if out is None else match.static_shape(out)
    if shape is None or size is None:
        return "its shape is not known"
    if len(shape) != 4:
        return f"{len(shape)}-D input"
    if not match.read_later(bound["input"], node):
        return "its input is changed in place elsewhere"
    if bound["antialias"]:
        return "antialias"
    factors = bound["scale_factor"]
    if factors is not None and not isinstance(factors, (tuple, list)):
        factors = (factors, factors)
    if factors is not None and not all(isinstance(f, (int, float)) for f in factors):
        return "sizes are dynamic"
    if bound["recompute_scale_factor"]:
        factors = None  # then PyTorch takes the scale from the sizes
    return _Call(
        bound["input"],
        shape,
        (size[2], size[3]),
        (float(factors[0]), float(factors[-1])) if factors else None,
        str(bound["mode"]),
        bool(bound["align_corners"]),
    )


def _patterns(node: fx.Node, call: _Call) -> list[_Pattern]:
    """What the operation could stand for here, the most first."""
    alone = _Pattern((node,), (call.x,), 0)
    nodes: tuple[fx.Node, ...] = (node,)
    user = match.only_user(node)
    padding = None if user is None else consumers.padding(user)
    if user is not None and padding is not None and not any(padding):  # UNets pad, by nothing where the sizes fit
        nodes, user = (user, node), match.only_user(user)
    together = None if user is None else consumers.concatenated(user)
    if user is None or together is None:
        return [alone]
    tensors, dim = together
    if dim not in (1, -3) or len(tensors) < 2 or tensors.count(nodes[0]) != 1:
        return [alone]
    position = tensors.index(nodes[0])
    whole = tuple(call.x if i == position else t for i, t in enumerate(tensors))
    return [_Pattern((user, *nodes), whole, position), alone]


def _dtype(pattern: _Pattern) -> torch.dtype | str:
    """The dtype to work in, or why the operation does not fit."""
    last = pattern.nodes[0]
    values = [match.value(t) for t in pattern.tensors]
    x, out = values[pattern.position], match.value(last)
    if x is None or out is None or any(value is None for value in values):
        return "a concatenated value is not known"
    if all(value is not None and value.dtype == out.dtype for value in values):
        return out.dtype
    low = x.dtype
    if any(value is not None and value.dtype not in (low, torch.float32) for value in values):
        return "concatenated tensors differ in dtype"
    if consumers.taken_as(last) != low:
        return f"not all that reads its fp32 result casts it: {', '.join(user.name for user in last.users)}"
    return low


def _refused(call: _Call, pattern: _Pattern, dtype: torch.dtype) -> str:
    shapes = []
    for number, tensor in enumerate(pattern.tensors):
        value = match.value(tensor)
        shape = None if value is None else match.static_shape(value)
        if shape is None:
            return "a concatenated shape is not known"
        if number != pattern.position:
            shapes.append(shape)
    name = storage.name(dtype)
    unsupported = spec.unsupported(
        shape=call.shape,
        others=tuple(shapes),
        size=call.size,
        factors=call.factors,
        mode=call.mode,
        align_corners=call.align_corners,
        channels_last=True,
        dtype=name,
        arch=storage.MIN_ARCH,
    )
    joined = len(pattern.tensors) > 1
    wins = spec.wins(call.mode, align_corners=call.align_corners, concatenates=joined, dtype=name)
    return dispatch.refusal(unsupported, wins)


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in for each interpolation, with the concatenation where that follows and nothing else reads it.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation. `report` gains one entry an
    interpolation.
    """
    calls = {node: match.path(node) for node in graph_module.graph.nodes if node.target in _FUNCTIONS}
    for node, path in calls.items():
        call = _call(node)
        if isinstance(call, str):
            report.unmatched[path] = call
            continue
        reasons = []
        for pattern in _patterns(node, call):
            dtype = _dtype(pattern)
            reasons.append(dtype if isinstance(dtype, str) else _refused(call, pattern, dtype))
            if isinstance(dtype, torch.dtype) and not reasons[-1]:
                _substitute(graph_module.graph, call, pattern, dtype, compiled=compiled)
                report.matched[path] = call.mode + ("+cat" if len(pattern.tensors) > 1 else "")
                break
        else:
            report.unmatched[path] = reasons[0]


def _substitute(graph: fx.Graph, call: _Call, pattern: _Pattern, dtype: torch.dtype, *, compiled: bool) -> None:
    last = pattern.nodes[0]
    with graph.inserting_before(last):
        tensors = [_in_dtype(graph, tensor, dtype) for tensor in pattern.tensors]
        rest: tuple[Any, ...] = (pattern.position, call.size, call.factors, call.mode, call.align_corners)
        if compiled:
            rest = (
                pattern.position,
                list(call.size),
                list(call.factors) if call.factors else None,
                call.mode,
                call.align_corners,
            )
        function = torch.ops.advisor.upsample_concat.default if compiled else api.upsample_concat
        fused = graph.call_function(function, (tensors, *rest))
    match.replace(last, fused, pattern.nodes[1:])
    consumers.store_as(fused, dtype)


def _in_dtype(graph: fx.Graph, tensor: fx.Node, dtype: torch.dtype) -> fx.Node:
    value = match.value(tensor)
    return tensor if value is None or value.dtype == dtype else graph.call_method("to", (tensor, dtype))
