"""Two updates of the optimizer with a change on and off, from the same state: what they do to parameters, and to that state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from advisor.core.findings import Semantics
from advisor.core.verdict import Check
from advisor.trials.numerics.bounds import CEILING, joined
from advisor.trials.numerics.distance import rows

UPDATE = "update"
# A parameter's own update, or state, is judged by itself unless it moves less than this share of the optimizer's mean.
_FLOOR = 1e-3

# What moves (`UPDATE`, or the state's name), by the parameter whose it is.
Moves = dict[str, dict[torch.Tensor, torch.Tensor]]


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
    """Two optimizer steps from the same state with the change on (as it is now) and off; leaves it on."""
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if not parameters:
        return Check(
            passed=None, detail="the optimizer's gradients are gone at the boundary: its update was not compared"
        )
    try:
        changed = _moves(optimizer, parameters, user_hooks)
    finally:
        off()
    try:
        plain = _moves(optimizer, parameters, user_hooks)
    finally:
        on()
    name = type(optimizer).__name__
    checks = []
    for what, moves in plain.items():
        # A state that only one of the two keeps is its own business: what it is for shows in the second update.
        owners = [p for p, move in moves.items() if p in changed.get(what, {}) and changed[what][p].shape == move.shape]
        values = [
            p.detach() if what == UPDATE else optimizer.state.get(p, {}).get(what, torch.zeros(())) for p in owners
        ]
        checks += _judged(
            f"{name}: {what}", [changed[what][p] for p in owners], [moves[p] for p in owners], values, semantics
        )
    return joined(checks)


def _judged(
    what: str,
    changed: list[torch.Tensor],
    plain: list[torch.Tensor],
    values: list[torch.Tensor],
    semantics: Semantics,
) -> list[Check]:
    """How far what moved is off, of all parameters and of each by itself; `values` are what it moved from."""
    found = rows([move.to(base.device) for move, base in zip(changed, plain, strict=True)], plain)
    if any(row[5] for row in found):
        return [Check(passed=False, detail=f"{what} has NaN or infinite values", numbers={"of_bound": math.inf})]
    off, moved = ([math.sqrt(row[column]) for row in found] for column in (0, 1))
    # The difference p' − p keeps few bits of a small update; that rounding is no fault of either.
    sizes = [math.sqrt(row[1]) + size for row, size in zip(rows(values, values), moved, strict=True)]
    rounding = [torch.finfo(move.dtype).eps * size for move, size in zip(plain, sizes, strict=True)]
    far, most = math.hypot(*moved), math.hypot(*rounding)
    bound = most if semantics is Semantics.EXACT else max(1e-3 * far, 4.0 * most)
    mean = far / math.sqrt(max(1, sum(move.numel() for move in plain)))
    checks = [_check(what, math.hypot(*off), far, bound)]
    for move, error, size, least in zip(plain, off, moved, rounding, strict=True):
        least = max(4.0 * least, _FLOOR * mean * math.sqrt(move.numel()))
        shape = "x".join(map(str, move.shape))
        checks.append(_check(f"{what} of one parameter ({shape})", error, size, max(CEILING * size, least)))
    return checks


def _check(what: str, error: float, size: float, bound: float) -> Check:
    ratio = error / bound if bound else (0.0 if error == 0 else math.inf)
    relative = error / size if size else (0.0 if error == 0 else math.inf)
    numbers = {"error": relative, "of_bound": ratio}
    return Check(passed=ratio <= 1.0, detail=f"{what} off by {relative:.1e}", numbers=numbers)


def _numbers_of(state: dict[str, Any]) -> list[tuple[str, torch.Tensor]]:
    return [(n, v) for n, v in state.items() if isinstance(v, torch.Tensor) and v.is_floating_point()]


def _moves(optimizer: torch.optim.Optimizer, parameters: list[torch.Tensor], user_hooks: dict[Any, Any]) -> Moves:
    """What two steps in a row do; parameters, gradients and optimizer state are put back.

    The second starts from the state that the first has left.
    """
    before = {p: p.detach().clone() for p in parameters}
    grads = [(p, p.grad, p.grad.clone(), _laid_as(p, p.grad)) for p in parameters if p.grad is not None]
    states = {
        p: {k: (v, v.clone() if isinstance(v, torch.Tensor) else v) for k, v in optimizer.state[p].items()}
        for p in list(optimizer.state)
    }
    held = optimizer._optimizer_step_post_hooks
    removed = {key: held.pop(key) for key in list(held) if key in user_hooks}

    def give_gradients(*, users: bool = False) -> None:
        for parameter, gradient, values, fitting in grads:
            chosen = gradient if users else fitting
            chosen.copy_(values)
            parameter.grad = chosen

    try:
        with torch.no_grad():
            give_gradients()
            optimizer.step()
            give_gradients()
            optimizer.step()
            moves: Moves = {UPDATE: {p: p.detach() - old for p, old in before.items()}}
            for p in parameters:
                entries = states.get(p, {})
                for name, value in _numbers_of(optimizer.state[p]):
                    _, old = entries.get(name, (None, None))
                    known = isinstance(old, torch.Tensor) and old.shape == value.shape
                    moves.setdefault(name, {})[p] = value - old if known else value.clone()
        return moves
    finally:
        held.update(removed)
        with torch.no_grad():
            for parameter, old in before.items():
                parameter.copy_(old)
            give_gradients(users=True)
            _put_back(optimizer, states)


def _put_back(optimizer: torch.optim.Optimizer, states: dict[Any, dict[str, tuple[Any, Any]]]) -> None:
    """The optimizer's state is what it was: each entry, and what was in it."""
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


def _laid_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, or one with the parameter's strides, as the backward makes them: a change may have laid the weights out anew since this
    one was made, and a fused optimizer takes no other.
    """
    same = gradient.layout is not torch.strided or gradient.stride() == parameter.stride()
    return gradient if same else torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)
