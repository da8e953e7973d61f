"""A replay of a captured forward and backward as a function that autograd knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch.autograd.function import once_differentiable

from advisor.transforms import direct_gradients
from advisor.transforms.base import Undo
from advisor.transforms.graphs.captured import Captured, InFlight


class Replay(torch.autograd.Function):
    """`direct`: in the parameters' place stands one leaf, and their gradients go past autograd."""

    @staticmethod
    def forward(ctx: Any, captured: Captured, direct: bool, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for static, real in zip(captured.inputs, tensors, strict=False):
            static.data.copy_(real)
        captured.forward.replay()
        captured.replays += 1
        token = InFlight()
        captured.in_flight = ref(token)
        ctx.captured, ctx.token, ctx.direct = captured, token, direct
        ctx.parameters, ctx.outputs = captured.by_id, len(captured.outputs)
        ctx.set_materialize_grads(False)
        own = len(captured.outputs) - len(captured.computed)
        # What the script gets it may keep; what hooks set is another in the next forward.
        outputs = (*(o.clone() for o in captured.outputs[:own]), *(o.detach() for o in captured.outputs[own:]))
        ctx.mark_non_differentiable(
            *(o for o, wanted in zip(outputs, captured.differentiable, strict=True) if not wanted)
        )
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            ctx.captured.twice = True
        found: tuple[torch.Tensor | None, ...] = _backward(ctx, *gradients)
        return found


@once_differentiable
def _backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    captured: Captured = ctx.captured
    found = replay_backward(ctx, gradients, torch._C._autograd._get_current_graph_task_keep_graph())
    inputs = (None if g is None else g.clone() for g in captured.input_grads)  # the script may keep them
    if not ctx.direct:
        given = [found[i] for i in captured.places]
        return (None, None, *inputs, *(None if g is None else g.detach() for g in given))
    if direct_gradients.is_whole_backward(ctx):
        captured.gradients.accumulate(found)
    return (None, None, *inputs, None)


def replay_backward(ctx: Any, gradients: Sequence[torch.Tensor | None], retain: bool) -> list[torch.Tensor | None]:
    """The parameters' gradients. `retain`: whether the script may run it once more, so that what it reads must stay."""
    captured: Captured = ctx.captured
    arrived = [g for g, wanted in zip(gradients, captured.differentiable, strict=True) if wanted]
    found = captured.replay_backward(arrived)
    ctx.token.done = not retain
    return found


_serving = 0  # how many applications want `autograd.grad` and its like to find what has no edges
_served = Undo()


def serving() -> bool:
    """Whether `autograd.grad` finds gradients that have no edges."""
    return _serving > 0


def serve(undo: Undo) -> None:
    """Have `autograd.grad` and its like find them, until `undo` runs."""
    global _serving
    if not _serving:
        direct_gradients.serve_partial_backwards(_served, Replay._backward_cls, replay_backward)
    _serving += 1

    def end() -> None:
        global _serving
        _serving -= 1
        if not _serving:
            _served.run()

    undo.push(end)
