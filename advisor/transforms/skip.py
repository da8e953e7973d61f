"""Skip one optimizer step from inside, as GradScaler does from outside: without gradients an optimizer changes nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from advisor.loop.updates import closure_of, with_closure
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
    """Whenever `decide` says so before a step, hide all gradients for that step. They are back when `step` returns; when it raises they are gone.

    A step that is given a closure gets its gradients there: it is decided about them each time that has run.
    """
    hidden: list[tuple[torch.Tensor, torch.Tensor]] = []

    def hide(optimizer: torch.optim.Optimizer) -> None:
        if decide(optimizer):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        hidden.append((parameter, parameter.grad))
                        parameter.grad = None

    def put_back() -> None:
        for parameter, gradient in hidden:
            parameter.grad = gradient
        hidden.clear()

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        hidden.clear()  # of a step that raised: by now the script has others, or has zeroed them
        closure = closure_of(args, kwargs)
        if closure is None:
            hide(optimizer)
            return None

        @functools.wraps(closure)
        def decided() -> Any:
            put_back()
            loss = closure()
            hide(optimizer)
            return loss

        return with_closure(args, kwargs, decided)

    undo.push(optimizer.register_step_pre_hook(before).remove)
    undo.push(optimizer.register_step_post_hook(lambda *_: put_back()).remove)
