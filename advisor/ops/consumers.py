"""In which dtype the users of a value take it: autocast runs norms in fp32, and what follows casts the result back.

An operation of ours may then store its result in half precision at once. Values stay the same: fp32 rounded once.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import match

# Autocast casts the arguments of these to half precision. Of their arguments the first is the value, the others are parameters.
_LOWERED = {F.conv1d, F.conv2d, F.conv3d, F.conv_transpose2d, F.linear}
_VIEWS = {"permute", "flatten", "view", "reshape", "contiguous", "transpose"}
_VIEW_FUNCTIONS = {torch.permute, torch.flatten, torch.reshape, torch.transpose}


def is_view(node: fx.Node) -> bool:
    """Whether the node rearranges its first argument without computing anything."""
    return (node.op == "call_method" and node.target in _VIEWS) or (
        node.op == "call_function" and node.target in _VIEW_FUNCTIONS
    )


def taken_as(node: fx.Node) -> torch.dtype | None:
    """The one dtype to which all users cast this value before they use it, else the value's own; None for no tensor."""
    value = match.value(node)
    if value is None:
        return None
    found = {_taken_by(user, node) for user in node.users}
    only = found.pop() if len(found) == 1 else None
    return only or value.dtype


def _taken_by(user: fx.Node, node: fx.Node) -> torch.dtype | None:
    if not user.args or user.args[0] is not node or node in user.args[1:]:
        return None
    if is_view(user):
        return taken_as(user)
    result = match.value(user)
    if user.op == "call_function" and user.target in _LOWERED and result is not None:
        return result.dtype  # a product's result has the dtype of its cast arguments
    return None


def store_as(node: fx.Node, dtype: torch.dtype) -> None:
    """Note that the node and the views of it now hold `dtype`, for whoever reads the graph next."""
    value = match.value(node)
    if value is None or value.dtype == dtype:
        return
    node.meta["example_value"] = value.to(dtype)
    for user in node.users:
        if is_view(user):
            store_as(user, dtype)
