"""Skip one optimizer step from inside, as GradScaler does from outside: without gradients an optimizer changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from advisor.transforms.base import Undo


def lacks_momentum(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the next step of this SGD allocates momentum buffers."""
    return any(
        group.get("momentum", 0) != 0
        and (parameter not in optimizer.state or optimizer.state[parameter].get("momentum_buffer") is None)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    )


def skip_step_hooks(
    undo: Undo, optimizer: torch.optim.Optimizer, decide: Callable[[torch.optim.Optimizer], bool]
) -> None:
    """Whenever `decide` says so before a step, hide all gradients for that step. They are back when `step` returns."""
    hidden: list[tuple[torch.Tensor, torch.Tensor]] = []

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if decide(optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        hidden.append((parameter, parameter.grad))
                        parameter.grad = None

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for parameter, gradient in hidden:
            parameter.grad = gradient
        hidden.clear()

    undo.push(optimizer.register_step_pre_hook(before).remove)
    undo.push(optimizer.register_step_post_hook(after).remove)
