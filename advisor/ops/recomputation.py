"""Activation checkpoints in a captured graph.

Dynamo puts a body and everything that it uses into one node, which is meant for AOTAutograd. Run as it is, it saves what the
body writes into (batch norm's counters) as its inputs, at which autograd stops in the backward; and it leaves the state of the
random numbers to Inductor, so that a dropout would draw another mask the second time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from advisor.ops import match

_CHOOSES = "_checkpoint_context_fn"  # in a body's meta: the user's function that says which results are kept


def bodies(graph_module: fx.GraphModule) -> list[tuple[fx.Node, fx.GraphModule]]:
    """The graph's checkpoints, also those inside others, each with the graph that is run again in the backward."""
    found: list[tuple[fx.Node, fx.GraphModule]] = []
    for node in graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint
    ):
        body = getattr(graph_module, node.args[0].target)
        found += [(node, body), *bodies(body)]
    return found


def left_alone(body: fx.GraphModule, *, compiled: bool) -> str:
    """Why kernels are not put into a checkpoint's body; empty where they are."""
    if compiled:
        return "in an activation checkpoint: left to Inductor"
    return "in an activation checkpoint that chooses what it keeps" if _CHOOSES in body.meta else ""


def as_written(graph_module: fx.GraphModule) -> None:
    """Every checkpoint of the graph is the call of torch.utils.checkpoint that the user wrote."""
    there = bodies(graph_module)
    for node, body in reversed(there):  # inner ones first
        inputs = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
        written = tuple(i for i, tensor in enumerate(inputs) if any(_writes(user, tensor) for user in tensor.users))
        node.target = _checkpoint
        node.args = (node.args[0], written, *node.args[1:])
    for _, body in there:
        body.recompile()


def _writes(user: fx.Node, tensor: fx.Node) -> bool:
    if user.target is _checkpoint:
        _, written, *inputs = user.args
        return any(inputs[i] is tensor for i in written)  # type: ignore[union-attr, index]  # a body has outputs and inputs
    return match.changes_in_place(user, tensor)


def _checkpoint(body: fx.GraphModule, written: tuple[int, ...], *inputs: Any, **how: Any) -> Any:
    """The body's outputs. Those of its inputs that it writes into are not saved: they are what they are when it runs again."""
    held = {i: inputs[i] for i in written}

    def run(*saved: Any) -> Any:
        rest = iter(saved)
        return body(*(held[i] if i in held else next(rest) for i in range(len(inputs))))

    if _CHOOSES in body.meta:  # what the user chose to keep
        how["context_fn"] = body.meta[_CHOOSES]
    return checkpoint(
        run, *(tensor for i, tensor in enumerate(inputs) if i not in held), **{"use_reentrant": False, **how}
    )
