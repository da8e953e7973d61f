"""The gradient that reaches the last layers of a model, with a change on and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from advisor.trials.numerics import layers
from advisor.trials.numerics.plain import SEEDS, PlainStep
from advisor.trials.numerics.precision import EPSILON
from advisor.trials.numerics.seen import Layer, Seen, leaves, noting

# The gradient that reaches the last layers may be off by this much: what stands behind them has no depth. Or by so many times what one rounding
# of all that goes in moves it by, where that is little enough to see a fault beside it.
_ARRIVES, _ARRIVES_FACTOR, _MOST_ARRIVES = 0.1, 4.0, 0.4
_DRAWN_FACTOR, _DRAWS = 2.0, 2  # and by so many times what another seed's is, of so many


def arrived(plain: PlainStep, modules: dict[str, Layer], seen: Seen) -> tuple[float, list[str]]:
    """How far the gradient that reaches the last layers is from what reaches them in the plain step, which is on now, or 0.0 where it may be
    so far; and which modules none reaches any more.

    Nothing but what stands between the last layers and the outputs makes it, so that a deep net's noise is not in it: the smallest of
    all layers' errors. But where the loss is computed inside of the model (diffusion), it is the difference of what the net gives and what it
    was to give, and small where the two are close: then what one rounding of all that goes in makes of it tells what it may be.
    """
    inmost = leaves(plain.call.root.module)  # what holds others may lose a gradient on its way to them
    called = [n for n in modules if n in inmost and seen.calls[n] and all(c.output is not None for c in seen.calls[n])]
    got = _gradients(plain, modules, called)
    lost, names, pairs = [], [], []
    for name in called:
        there = [c.gradient.float() for c in reversed(seen.calls[name]) if c.gradient is not None]
        base = [gradient.float() * (plain.lift * seen.scale) for gradient in got.get(name, ())]
        if base and not there:
            lost.append(name)
        elif base and [t.shape for t in there] == [t.shape for t in base]:
            names.append(name)
            pairs.append((there, base))
    errors = _largest(pairs)
    far = min(errors, default=0.0)
    if far <= _ARRIVES:
        return 0.0, lost
    moved = _gradients(plain, modules, names, jitter=EPSILON[plain.target_class], seed=1)
    usual = _largest([([t.float() for t in moved[name]], [t.float() for t in got[name]]) for name in names])
    last = min(range(len(names)), key=usual.__getitem__)  # scaled by a third, all are off by that
    if errors[last] <= min(_MOST_ARRIVES, _ARRIVES_FACTOR * usual[last]):
        return 0.0, lost
    return 0.0 if plain.random and far <= _DRAWN_FACTOR * _drawn(plain, modules, names, got) else far, lost


def _drawn(plain: PlainStep, modules: dict[str, Layer], names: list[str], got: dict[str, list[torch.Tensor]]) -> float:
    """How far another seed takes what reaches the last layers: a loss inside of the model may draw its own target (a diffusion's noise), and
    another layout draws other numbers. 0.0 where they hardly depend on it.
    """
    least = []
    for seed in SEEDS[:_DRAWS]:
        other = _gradients(plain, modules, names, reseed=seed)
        pairs = [
            ([t.float() for t in other[n]], [t.float() for t in got[n]])
            for n in names
            if [t.shape for t in other.get(n, ())] == [t.shape for t in got[n]]
        ]
        least.append(min(_largest(pairs), default=0.0))
    return min(least) if min(least) > _ARRIVES else 0.0


def _gradients(
    plain: PlainStep, modules: dict[str, Layer], names: list[str], **options: Any
) -> dict[str, list[torch.Tensor]]:
    """By name, what reaches the outputs of these modules in the plain step, with the rows in another order; options as `PlainStep.again`."""
    got: dict[str, list[torch.Tensor]] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: Layer, args: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.requires_grad:
                output.register_hook(noting(lambda gradient: got.setdefault(name, []).append(gradient)))

        return hook

    hooks = [modules[name].register_forward_hook(note(name)) for name in names]
    try:
        plain.again(rolled=True, **options)
    finally:
        for remaining in hooks:
            remaining.remove()
    return got


def _largest(pairs: list[tuple[list[torch.Tensor], list[torch.Tensor]]]) -> list[float]:
    """Of each pair the largest error of its calls."""
    there = {f"{n} {i}": t for n, (one, _) in enumerate(pairs) for i, t in enumerate(one)}
    found = layers.apart(there, {f"{n} {i}": t for n, (_, base) in enumerate(pairs) for i, t in enumerate(base)})
    return [max(found[f"{n} {i}"].error for i in range(len(base))) for n, (_, base) in enumerate(pairs)]
