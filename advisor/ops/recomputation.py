"""Activation checkpoints in a captured graph that runs eagerly.

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


def as_written(graph_module: fx.GraphModule) -> None:
    """Every checkpoint of the graph is the call of torch.utils.checkpoint that the user wrote."""
    for node in graph_module.graph.nodes:
        if node.op == "call_function" and node.target is torch.ops.higher_order.tag_activation_checkpoint:
            body = getattr(graph_module, node.args[0].target)
            inputs = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
            written = tuple(
                i
                for i, tensor in enumerate(inputs)
                if any(match.changes_in_place(user, tensor) for user in tensor.users)
            )
            node.target = _checkpoint
            node.args = (node.args[0], written, *node.args[1:])


def _checkpoint(body: fx.GraphModule, written: tuple[int, ...], *inputs: Any, **how: Any) -> Any:
    """The body's outputs. Those of its inputs that it writes into are not saved: they are what they are when it runs again."""
    held = {i: inputs[i] for i in written}

    def run(*saved: Any) -> Any:
        rest = iter(saved)
        return body(*(held[i] if i in held else next(rest) for i in range(len(inputs))))

    if "_checkpoint_context_fn" in body.meta:  # what the user chose to keep
        how["context_fn"] = body.meta["_checkpoint_context_fn"]
    return checkpoint(
        run, *(tensor for i, tensor in enumerate(inputs) if i not in held), **{"use_reentrant": False, **how}
    )
