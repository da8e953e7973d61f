"""Finds group_norm or instance_norm (+ activation) in a captured graph."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import consumers, dispatch, match, storage
from advisor.ops.group_norm import api, spec

_GROUP = ("input", "num_groups", "weight", "bias", "eps")
_GROUP_DEFAULTS = {"weight": None, "bias": None, "eps": 1e-5}
_INSTANCE = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
_INSTANCE_DEFAULTS = {
    "running_mean": None,
    "running_var": None,
    "weight": None,
    "bias": None,
    "use_input_stats": True,
    "eps": 1e-5,
}


@dataclass(frozen=True, slots=True)
class _Norm:
    """`nodes`: the norm and, as far as they are there, the cast of its result and the activation behind it."""

    nodes: tuple[fx.Node, ...]
    x: fx.Node
    groups: int
    weight: Any
    bias: Any
    eps: float
    activation: str = "none"
    slope: float = 0.0


def _norm(node: fx.Node) -> _Norm | str:
    """The call with its activation, or why it is left alone."""
    if node.target is F.instance_norm:
        given = match.bound(node, _INSTANCE, _INSTANCE_DEFAULTS)
        if given["use_input_stats"] is not True or given["running_mean"] is not None:
            return "it keeps running statistics"
    else:
        given = match.bound(node, _GROUP, _GROUP_DEFAULTS)
    x = match.value(given["input"])
    if x is None or not isinstance(given["eps"], float):
        return "its input or eps is not known"
    if x.dim() != 4:
        return f"{x.dim()}-D input"
    if match.static_shape(x) is None:
        return "shape is dynamic"
    groups = x.shape[1] if node.target is F.instance_norm else given["num_groups"]
    nodes, activation, slope = _behind(node)
    return _Norm(
        nodes,
        _widened(given["input"]),
        groups,
        given["weight"],
        given["bias"],
        given["eps"],
        activation,
        slope,
    )


def _behind(norm: fx.Node) -> tuple[tuple[fx.Node, ...], str, float]:
    """The norm with the cast of its result and the activation behind it, and which that is."""
    nodes: tuple[fx.Node, ...] = (norm,)
    user = match.only_user(norm)
    if user is not None and consumers.casts_to(user) in consumers.HALF:
        nodes, user = (norm, user), match.only_user(user)
    follows = match.activation(user) if user is not None else None
    if user is not None and follows is not None and follows[0] in spec.ACTIVATIONS:
        return (*nodes, user), *follows
    return nodes, "none", 0.0


def _widened(x: fx.Node) -> fx.Node:
    """What a norm in fp32 reads in half precision: `norm(x.float())`, as diffusion models write it, sums up in fp32 as the kernels do."""
    narrow = match.operand(x) if consumers.casts_to(x) is torch.float32 else None
    value = match.value(narrow)
    return narrow if isinstance(narrow, fx.Node) and value is not None and value.dtype in consumers.HALF else x


def _result(norm: _Norm, *, compiled: bool) -> torch.dtype | str:
    """The dtype to store the result in; or why the kernels cannot take this norm."""
    x, result = match.value(norm.x), consumers.taken_as(norm.nodes[-1])
    if x is None or result is None:
        return "its input is not known"
    # The kernels' backward reads the input, of which PyTorch's keeps a copy where channels are last.
    if not match.read_later(norm.x, norm.nodes[0]):
        return "its input is changed in place elsewhere"
    if match.handed_out(norm.x):
        return "its input leaves the graph"
    dtypes = {"dtype": match.dtype_name(x), "result": storage.name(result)}
    parameters = [match.value(p) for p in (norm.weight, norm.bias) if p is not None]
    given = tuple("unknown type" if p is None else match.dtype_name(p) for p in parameters)
    reason = spec.unsupported(
        shape=tuple(x.shape),
        # A compiled graph would copy; run eagerly, the operation looks for itself at each call.
        channels_last=not compiled or x.is_contiguous(memory_format=torch.channels_last),
        groups=norm.groups,
        parameters=given,
        activation=norm.activation,
        arch=storage.MIN_ARCH,
        **dtypes,
    )
    wins = spec.wins(channels=x.shape[1], groups=norm.groups, activation=norm.activation, **dtypes)
    return dispatch.refusal(reason, wins or spec.narrow(given)) or result


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in for every group or instance norm (+ activation); `report` gains one entry a norm.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; else the thin eager function is
    called.
    """
    graph = graph_module.graph
    # Places are named before any of them is rewritten: a name says whether its module makes the call more than once.
    calls = [
        node for node in graph.nodes if node.op == "call_function" and node.target in (F.group_norm, F.instance_norm)
    ]
    for node, path in [(node, match.path(node)) for node in calls]:
        norm = _norm(node)
        if isinstance(norm, str):
            report.unmatched[path] = norm
            continue
        result = _result(norm, compiled=compiled)
        if isinstance(result, str):
            report.unmatched[path] = result
            continue
        last = norm.nodes[-1]
        arguments = (norm.x, norm.groups, norm.weight, norm.bias, norm.eps, norm.activation, result, norm.slope)
        with graph.inserting_before(last):
            if compiled:
                call = graph.call_function(torch.ops.advisor.group_norm.default, arguments)
                fused = graph.call_function(operator.getitem, (call, 0))
            else:
                fused = graph.call_function(api.group_norm, arguments)
        widening = match.operand(node)
        match.replace(last, fused, (*norm.nodes[-2::-1], *((widening,) if widening is not norm.x else ())))
        consumers.store_as(fused, result)
        kind = "instancenorm" if node.target is F.instance_norm else f"groupnorm{norm.groups}"
        report.matched[path] = kind + ("" if norm.activation == "none" else f"+{norm.activation}")
