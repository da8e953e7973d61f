"""One update of the optimizer with a change on and off, from the same state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from advisor.core.findings import Semantics
from advisor.core.verdict import Check
from advisor.trials.numerics.distance import sums


def state_of(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """What a change of the optimizer shows in: its class, its own `step`, its options."""
    options = tuple(
        tuple(sorted((k, repr(v)) for k, v in group.items() if k not in ("params", "lr")))
        for group in optimizer.param_groups
    )
    return type(optimizer), id(optimizer.__dict__.get("step")), options


def compare_update(
    optimizer: torch.optim.Optimizer,
    on: Callable[[], None],
    off: Callable[[], None],
    semantics: Semantics,
    user_hooks: dict[Any, Any],
) -> Check:
    """One optimizer step from the same state with the change on (as it is now) and off; leaves it on."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:
        return Check(
            passed=None, detail="the optimizer's gradients are gone at the boundary: its update was not compared"
        )
    try:
        changed = _update(optimizer, parameters, user_hooks)
    finally:
        off()
    try:
        plain = _update(optimizer, parameters, user_hooks)
    finally:
        on()
    found = sums(changed, plain)
    if found[5]:
        return Check(
            passed=False, detail="the optimizer's update has NaN or infinite values", numbers={"of_bound": math.inf}
        )
    error = math.sqrt(found[0] / found[1]) if found[1] else (0.0 if found[0] == 0 else math.inf)
    # The difference p' − p of fp32 parameters keeps few bits of a small update; that rounding is no fault of either.
    size = math.sqrt(sum(float((p.detach().float() ** 2).sum()) for p in parameters))
    rounding = 2.0**-23 * size / math.sqrt(found[1]) if found[1] else 0.0
    bound = rounding if semantics is Semantics.EXACT else max(1e-3, 4.0 * rounding)
    ratio = error / bound if bound else (0.0 if error == 0 else math.inf)
    detail = f"{type(optimizer).__name__}: update off by {error:.1e}"
    return Check(passed=ratio <= 1.0, detail=detail, numbers={"error": error, "of_bound": ratio})


def _update(
    optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], user_hooks: dict[Any, Any]
) -> list[torch.Tensor]:
    """What one step does to the parameters; parameters, gradients and optimizer state are put back."""
    before = [p.detach().clone() for p in parameters]
    grads = [(p, p.grad, p.grad.clone()) for p in parameters if p.grad is not None]
    states = {
        p: {k: (v, v.clone() if isinstance(v, torch.Tensor) else v) for k, v in optimizer.state[p].items()}
        for p in list(optimizer.state)
    }
    held = optimizer._optimizer_step_post_hooks
    removed = {key: held.pop(key) for key in list(held) if key in user_hooks}
    try:
        with torch.no_grad():
            optimizer.step()
        return [p.detach() - old for p, old in zip(parameters, before, strict=True)]
    finally:
        held.update(removed)
        with torch.no_grad():
            for parameter, old in zip(parameters, before, strict=True):
                parameter.copy_(old)
            for parameter, gradient, values in grads:
                gradient.copy_(values)
                parameter.grad = gradient
            for key in list(optimizer.state):
                if key not in states:
                    del optimizer.state[key]
            for key, entries in states.items():
                kept = optimizer.state[key]
                for name in [n for n in kept if n not in entries]:
                    del kept[name]
                for name, (value, copy) in entries.items():
                    if isinstance(value, torch.Tensor):
                        value.copy_(copy)
                    kept[name] = value
