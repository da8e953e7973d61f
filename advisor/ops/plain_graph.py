"""A captured graph in the form in which families' patterns know it: what changes nothing is gone, what has several spellings has one.

Whoever reads graphs beside the families does the same (dimensions.py for volumes, consumers.py for casts).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import match

_DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}


def without_idle_dropouts(graph: fx.Graph) -> None:
    """Dropouts that drop nothing leave the graph: PyTorch gives back their input itself and draws no random number for them.

    Networks have them between a norm and its activation (MONAI) and between an activation and a convolution (timm).
    """
    for node in list(graph.nodes):
        if node.op != "call_function" or node.target not in _DROPOUTS:
            continue
        given = match.bound(node, ("input", "p", "training", "inplace"), {"p": 0.5, "training": True})
        x = given.get("input")
        if isinstance(x, fx.Node) and (given["training"] is False or given["p"] in (0, 0.0)):
            node.replace_all_uses_with(x)
            graph.erase_node(node)


_SIGMOIDS = {torch.sigmoid, F.sigmoid, "sigmoid"}
_PRODUCTS = {operator.mul, torch.mul, "mul"}


def written_out_silu(graph: fx.Graph) -> None:
    """`x * torch.sigmoid(x)` becomes `F.silu(x)`, where nobody else has the sigmoid: the same, rounded once in place of twice."""
    for node in list(graph.nodes):
        for x, gate in _both_ways(node):
            if gate.target not in _SIGMOIDS or match.operand(gate) is not x or list(gate.users) != [node]:
                continue
            if (
                match.dtype_of(gate) != match.dtype_of(x)
                or not match.recorded_alike(gate, node)
                or not match.read_later(x, gate)
            ):
                continue
            with graph.inserting_before(node):
                silu = graph.call_function(F.silu, (x,))
            match.replace(node, silu, (gate,))
            break


def _both_ways(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The factors of a product of two tensors, in both orders."""
    one, other = match.operands(node, _PRODUCTS) or (None, None)
    if isinstance(one, fx.Node) and isinstance(other, fx.Node):
        yield from ((one, other), (other, one))


def after_changes(graph: fx.Graph) -> None:
    """What reads a tensor after an operation that changed it in place reads that operation's result, which is the same tensor.

    So `out.add_(shortcut)` as a statement looks as `out += shortcut` does.
    """
    for node in graph.nodes:
        changed = match.operand(node)
        if not isinstance(changed, fx.Node) or len(changed.users) < 2 or not match.changes_in_place(node, changed):
            continue
        if not match.memory(node) or match.memory(node) != match.memory(changed):
            continue
        later = match.behind(node)
        for user in [user for user in changed.users if user in later]:
            user.replace_input_with(changed, node)
