"""In which dtype the users of a value take it: autocast runs norms in fp32, and what follows casts the result back.

Views, padding with zeros and concatenation are looked through: rounding before them gives the values that rounding after them does.

An operation of ours may then store its result in half precision at once. Values stay the same: fp32 rounded once.
"""

from __future__ import annotations

from collections.abc import Container
from functools import reduce
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import match

# Autocast casts the arguments of these to half precision. Of their arguments the first is the value, the others are parameters.
LOWERED = {F.conv1d, F.conv2d, F.conv3d, F.conv_transpose2d, F.linear}
HALF = (torch.float16, torch.bfloat16)
_CONCATENATIONS = {torch.cat, torch.concat, torch.concatenate}
_PADS = {F.pad, torch._C._nn.pad}
_VIEWS = {"permute", "flatten", "view", "reshape", "contiguous", "transpose"}
_VIEW_FUNCTIONS = {
    torch.permute,
    torch.flatten,
    torch.reshape,
    torch.transpose,
    torch.unflatten,
    torch.squeeze,
    torch.unsqueeze,
}


def is_view(node: fx.Node) -> bool:
    """Whether the node rearranges its first argument without computing anything."""
    return (node.op == "call_method" and node.target in _VIEWS) or (
        node.op == "call_function" and node.target in _VIEW_FUNCTIONS
    )


_CASTS = {"float": torch.float32, "half": torch.float16, "bfloat16": torch.bfloat16}


def casts_to(node: Any) -> torch.dtype | None:
    """The dtype to which the node casts its first argument, and does nothing else; None where it is no such node."""
    if not isinstance(node, fx.Node) or node.op != "call_method":
        return None
    if node.target in _CASTS and len(node.args) == 1 and not node.kwargs:
        return _CASTS[str(node.target)]
    if node.target in ("to", "type") and len(node.args) == 2 and not node.kwargs:
        return node.args[1] if isinstance(node.args[1], torch.dtype) else None
    return None


def without_idle_casts(graph: fx.Graph) -> None:
    """Casts to the dtype that a value has leave the graph: PyTorch gives back the value itself.

    Diffusion models write them around each norm, so that it is in fp32 whatever the rest is in.
    """
    for node in list(graph.nodes):
        x, dtype = match.operand(node), casts_to(node)
        value = match.value(x)
        if dtype is not None and isinstance(x, fx.Node) and value is not None and value.dtype == dtype:
            node.replace_all_uses_with(x)
            graph.erase_node(node)


def padding(node: fx.Node) -> tuple[int, ...] | None:
    """By how much the node pads its first argument with zeros; None when it does something else."""
    if node.op != "call_function" or node.target not in _PADS:
        return None
    given = match.bound(node, ("input", "pad", "mode", "value"), {"mode": "constant", "value": None})
    amounts = given.get("pad")
    if not isinstance(amounts, (tuple, list)) or not all(type(a) is int for a in amounts):
        return None
    return tuple(amounts) if given["mode"] == "constant" and not given["value"] else None


def concatenated(node: fx.Node) -> tuple[tuple[fx.Node, ...], int] | None:
    """The tensors that the node concatenates, and along which dimension; None when it does something else."""
    if node.op != "call_function" or node.target not in _CONCATENATIONS:
        return None
    given = match.bound(node, ("tensors", "dim"), {"dim": 0})
    tensors, dim = given.get("tensors"), given["dim"]
    if not isinstance(tensors, (tuple, list)) or not all(isinstance(t, fx.Node) for t in tensors):
        return None
    return (tuple(tensors), dim) if type(dim) is int and given.get("out") is None else None


def taken_as(node: fx.Node) -> torch.dtype | None:
    """The one dtype to which all users cast this value before they use it, else the value's own; None for no tensor."""
    value = match.value(node)
    if value is None:
        return None
    found = {_taken_by(user, node) for user in node.users}
    only = found.pop() if len(found) == 1 else None
    return only or value.dtype


def _taken_by(user: fx.Node, node: fx.Node) -> torch.dtype | None:
    if concatenated(user) is not None:
        return taken_as(user)
    if not user.args or user.args[0] is not node or node in user.args[1:]:
        return None
    if is_view(user) or padding(user) is not None:
        return taken_as(user)
    if casts_to(user) in HALF:
        return casts_to(user)
    result = match.value(user)
    if user.op == "call_function" and user.target in LOWERED and result is not None:
        return result.dtype  # a product's result has the dtype of its cast arguments
    return None


def casting(node: fx.Node, dtype: torch.dtype, like: Container[Any]) -> list[fx.Node]:
    """The users for which autocast casts this value to `dtype`, functions `like` a convolution among them.

    None where a user changes it in place.
    """
    value = match.value(node)
    if value is None or value.dtype == dtype or any(match.changes_in_place(user, node) for user in node.users):
        return []
    return [user for user in node.users if _casts(user, node, dtype, like)]


def _casts(user: fx.Node, node: fx.Node, dtype: torch.dtype, like: Container[Any]) -> bool:
    if user.op != "call_function" or user.args[:1] != (node,) or node in user.args[1:] or node in user.kwargs.values():
        return False
    result = match.value(user)
    return (user.target in LOWERED or user.target in like) and result is not None and result.dtype == dtype


def store_as(node: fx.Node, dtype: torch.dtype) -> None:
    """Note that the node holds `dtype` now, and what that makes of values that are only moved, for whoever reads the graph next."""
    value = match.value(node)
    if value is None or value.dtype == dtype:
        return
    node.meta["example_value"] = value.to(dtype)
    for user in node.users:
        together = concatenated(user)
        if together is not None:
            parts = [part.dtype for part in map(match.value, together[0]) if part is not None]
            store_as(user, reduce(torch.promote_types, parts))
        elif is_view(user) or padding(user) is not None:
            store_as(user, dtype)
