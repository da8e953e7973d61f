"""Finds layer normalisation over the channels in a captured graph, with the permutes round it.

Three ways to write it: `F.layer_norm` over the last dimension of an NHWC tensor (ConvNeXt's blocks); the same between
permute(0, 2, 3, 1) and permute(0, 3, 1, 2) (torchvision's and timm's LayerNorm2d); and by hand over dimension 1 (ConvNeXt's own
code): mean, difference, mean square, quotient, weight and bias.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import consumers, dispatch, match, storage
from advisor.ops.layer_norm import api, spec

_PARAMETERS = ("input", "normalized_shape", "weight", "bias", "eps")
_DEFAULTS = {"weight": None, "bias": None, "eps": 1e-5}
_CALLS = (F.layer_norm, torch.layer_norm)
_SUMS = (operator.add, torch.add, "add")
_DIFFERENCES = (operator.sub, torch.sub, "sub")
_PRODUCTS = (operator.mul, torch.mul, "mul")
_QUOTIENTS = (operator.truediv, torch.div, "div")
_POWERS = (operator.pow, torch.pow, "pow")
_ROOTS = (torch.sqrt, "sqrt")
_TO_NHWC, _TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)


@dataclass(frozen=True, slots=True)
class _Norm:
    """`nodes`: what the operation stands for, the last one's value being its result."""

    nodes: tuple[fx.Node, ...]
    x: fx.Node
    weight: Any
    bias: Any
    eps: float
    dim: int
    by_hand: bool = False


def _call(node: fx.Node) -> _Norm | str:
    """`F.layer_norm`, with permutes on both sides where they cancel; or why it is left alone."""
    given = match.bound(node, _PARAMETERS, _DEFAULTS)
    x = match.value(given["input"])
    if x is None or not isinstance(given["eps"], float):
        return "its input or eps is not known"
    if x.dim() < 2 or tuple(given["normalized_shape"]) != tuple(x.shape[-1:]):
        return "it normalises over more than the channels"
    after = match.only_user(node)
    around = match.permutes(given["input"], _TO_NHWC) and after is not None and match.permutes(after, _TO_NCHW)
    if around and after is not None and match.recorded_alike(given["input"], node):
        nodes: tuple[fx.Node, ...] = (given["input"], node, after)
        return _Norm(nodes, given["input"].args[0], given["weight"], given["bias"], given["eps"], 1)
    return _Norm((node,), given["input"], given["weight"], given["bias"], given["eps"], -1)


def _over_channels(node: Any) -> fx.Node | None:
    """What `mean(·, 1, keepdim=True)` is the mean of."""
    found = match.mean(node)
    return found[0] if found is not None and found[1:] == ([1], True) else None


def _per_channel(node: Any) -> fx.Node | None:
    """The [C] tensor behind `parameter[:, None, None]`."""
    if isinstance(node, fx.Node) and node.target is operator.getitem:
        parameter, index = node.args
        if index == (slice(None), None, None) and isinstance(parameter, fx.Node):
            return parameter
    return None


def _scaled(node: fx.Node, functions: tuple[Any, ...]) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """The only user of `node` when it combines it with `parameter[:, None, None]`: user, index and parameter."""
    user = match.only_user(node)
    both = match.operands(user, functions)
    if user is None or both is None:
        return None
    other = both[1] if both[0] is node else both[0]
    parameter = _per_channel(other)
    return (user, other, parameter) if parameter is not None and isinstance(other, fx.Node) else None


def _by_hand(quotient: fx.Node) -> _Norm | None:
    """(x - mean) / sqrt(mean((x - mean)²) + eps) * weight[:, None, None] + bias[:, None, None], or nothing."""
    over, root = match.operands(quotient, _QUOTIENTS) or (None, None)
    x, mean = match.operands(over, _DIFFERENCES) or (None, None)
    if not isinstance(x, fx.Node) or _over_channels(mean) is not x:
        return None
    if not isinstance(root, fx.Node) or root.target not in _ROOTS or len(root.args) != 1 or root.kwargs:
        return None
    shifted = root.args[0]
    variance, eps = match.operands(shifted, _SUMS) or (None, None)
    square = _over_channels(variance)
    centred, exponent = match.operands(square, _POWERS) or (None, None)
    if exponent != 2 or not isinstance(eps, float) or match.operands(centred, _DIFFERENCES) != (x, mean):
        return None
    scaled = _scaled(quotient, _PRODUCTS)
    offset = _scaled(scaled[0], _SUMS) if scaled is not None else None
    if scaled is None or offset is None:
        return None
    inner = (mean, centred, square, variance, shifted, root, over, quotient, scaled[1], scaled[0], offset[1])
    nodes = tuple(dict.fromkeys(n for n in inner if isinstance(n, fx.Node)))
    if any(user not in (*nodes, offset[0]) for n in nodes for user in n.users):
        return None  # something else uses a part of it
    if not match.recorded_alike(*nodes, offset[0]):
        return None
    return _Norm((*nodes, offset[0]), x, scaled[2], offset[2], eps, 1, by_hand=True)


def _result(norm: _Norm, *, compiled: bool) -> torch.dtype | str:
    """The dtype to store the result in; or why the kernels cannot take this norm."""
    x, result = match.value(norm.x), consumers.taken_as(norm.nodes[-1])
    if x is None or result is None:
        return "its input is not known"
    if norm.dim == 1 and x.dim() != 4:
        return f"{x.dim()}-D input"
    if match.empty(x):
        return "its input is empty"
    if not isinstance(x.shape[norm.dim], int):
        return "channel count is dynamic"
    if not match.read_later(norm.x, norm.nodes[0]):
        return "its input is changed in place elsewhere"
    if norm.by_hand and match.handed_out(norm.x):  # the backward reads it, and PyTorch's only the difference
        return "its input leaves the graph"
    parameters = [match.value(p) for p in (norm.weight, norm.bias) if p is not None]
    reason = spec.unsupported(
        rows=1,
        channels=x.shape[norm.dim],
        # A compiled graph would copy; run eagerly, the operation looks for itself at each call.
        contiguous=norm.dim == -1 or not compiled or x.is_contiguous(memory_format=torch.channels_last),
        dtype=match.dtype_name(x),
        result=storage.name(result),
        parameters=tuple("unknown type" if p is None else match.dtype_name(p) for p in parameters),
        arch=storage.MIN_ARCH,
    )
    wins = spec.wins(channels=x.shape[norm.dim], dtype=match.dtype_name(x), result=storage.name(result))
    return dispatch.refusal(reason, wins) or result


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in for every norm over the channels; `report` gains one entry a norm.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; else the thin eager function is
    called.
    """
    graph = graph_module.graph
    # Places are named before any of them is rewritten: a name says whether its module makes the call more than once.
    candidates = [node for node in graph.nodes if node.target in (*_CALLS, *_QUOTIENTS)]
    for node, path in [(node, match.path(node)) for node in candidates]:
        norm = _call(node) if node.target in _CALLS else _by_hand(node)
        if norm is None:
            continue
        if isinstance(norm, str):
            report.unmatched[path] = norm
            continue
        result = _result(norm, compiled=compiled)
        if isinstance(result, str):
            report.unmatched[path] = result
            continue
        last = norm.nodes[-1]
        with graph.inserting_before(last):
            arguments = (norm.x, norm.weight, norm.bias, norm.eps, norm.dim, result)
            function = torch.ops.advisor.layer_norm.default if compiled else api.layer_norm
            fused = graph.call_function(function, arguments)
        match.replace(last, fused, norm.nodes[-2::-1])
        consumers.store_as(fused, result)
        report.matched[path] = "layernorm" + (" with its permutes" if norm.dim == 1 else "")
