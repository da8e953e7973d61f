"""The plain step, replayed several times to learn its own noise.

Repeats; inputs and weights moved by one rounding of the compute dtype; other seeds for models with dropout.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from advisor.core.findings import Semantics
from advisor.trials.numerics.distance import Distance, distance
from advisor.trials.numerics.layout import in_nhwc, nchw
from advisor.trials.numerics.precision import EPSILON, coarser, compute_class
from advisor.trials.numerics.replay import ReplayedCall, Result, Variation, finite, replay
from advisor.trials.numerics.state import SavedState

_REPEATS = 3
# A step that takes longer than this is replayed less often: of RepLKNet-31B in fp32 (2.6 s a step on an H200) the plain step's noise alone took
# 40 s. A bound from fewer draws is nearer, and what is beyond it is judged layer by layer.
LONG_S = 0.4
_FEW_REPEATS, _FEW_DRAWS, _FEW_ROLLED = 2, 2, 1
# Draws of a model with random layers, each also with the rows in another order. What a few draws of dropout leave of a deep layer's
# gradient has a heavy tail: of a small VGG in training two draws and a factor of 1.5 refused 30 % of right changes, these and
# bounds.DRAW_FACTOR 1 % (simulated from 60 draws; and bf16 of VGG-16 on an H200, once).
SEEDS = (101, 202, 303, 404)
# Where these are all alike: a layer that is left out in one step of five is so, or is not, in all of these too in one case of a hundred.
MORE_SEEDS = tuple(range(501, 517))


@dataclass(slots=True, eq=False)
class PlainStep:
    """One root's call without the change: its result as captured, and with the samples in another order; and its noise."""

    call: ReplayedCall
    saved: SavedState
    base: Result
    rolled: Result | None  # None: the model refuses them in another order
    target_class: str  # that a change of it may compute in
    repeats: list[Distance] = field(default_factory=list)
    noise: list[Distance] = field(default_factory=list)
    seeds: list[Distance] = field(default_factory=list)  # other random seeds, when they matter
    draws: list[Distance] = field(default_factory=list)  # and the others among themselves, from the first of them
    random: bool = False  # whether they matter to any
    looked_closer: bool = False  # whether `noise` has what appeal.py adds to it
    unusable: str = ""
    nhwc: bool = True  # whether any of its images, or of the filters that they meet, is in channels_last
    lift: float = 1.0  # of output gradients with the change on, below one where it overflows

    def differs(self, other: Distance) -> bool:
        """Whether this is farther than the same call is from itself. A layer that is left out has no gradients: another structure."""
        return (
            bool(other.broken)
            or other.largest > 2.0 * max(d.largest for d in self.repeats) + EPSILON[self.target_class]
        )

    def laid_out(self, value: torch.Tensor) -> torch.Tensor:
        """The value of a step with a change on, as plain layers of this step have it."""
        return value if self.nhwc else nchw(value)

    def again(
        self,
        *,
        rolled: bool = False,
        gradients: dict[int, torch.Tensor | None] | None = None,
        **options: Any,
    ) -> Result:
        """The call once more, with what is on now; options are those of a `Variation`."""
        how = Variation(rolled=rolled and self.rolled is not None, **options)
        return replay(self.call, self.saved, how, gradients=gradients)

    def off(self, result: Result, *, rolled: bool = False) -> Distance:
        """How far a result of `again` is from the plain call in that order."""
        return distance(result, self.rolled if rolled and self.rolled is not None else self.base)

    def moved(self, *, rolled: bool = False, **options: Any) -> Distance:
        """How far the call is, with these options, from the plain one in that order."""
        return self.off(self.again(rolled=rolled, **options), rolled=rolled)


def observe(call: ReplayedCall, saved: SavedState, semantics: Semantics, precision: str, computes_in: str) -> PlainStep:
    """Replay the plain step until its noise is known; `precision`, `computes_in` as `Gate.judge` has them."""
    script_class = coarser(compute_class(saved.device, call), computes_in)
    # What the candidate's own rounding would do is the yardstick for a change of precision.
    target_class = coarser(precision, script_class) if semantics is Semantics.PRECISION else script_class
    base, drew = replay(call, saved), saved.drew()
    plain = PlainStep(call, saved, base, _in_another_order(call, saved), target_class)
    plain.nhwc = in_nhwc(call.args, call.kwargs, *call.root.module.parameters())
    if not finite(plain.base):
        plain.unusable = "the plain step has NaN or infinite gradients itself"
        return plain
    for _ in range((_REPEATS if base.seconds <= LONG_S else _FEW_REPEATS) - 1):
        plain.repeats.append(plain.moved())
    for seed in (1, 2):
        plain.noise.append(plain.moved(jitter=EPSILON[target_class], seed=seed))
    if drew:
        _draw(plain)
    if semantics is Semantics.PRECISION and call.autocast[0]:
        # The script has autocast already: what counts is whether the change is farther from fp32 than the script is.
        with contextlib.suppress(RuntimeError):  # a model with half-precision casts of its own cannot run without
            plain.noise.append(distance(plain.base, plain.again(autocast=False)))
    return plain


def _draw(plain: PlainStep) -> None:
    """Note what other random seeds do, where they matter: all of them or, to a layer that is left out now and then, a few."""
    few = plain.base.seconds > LONG_S
    drawn = plain.again(reseed=SEEDS[0])
    seeds, draws = [plain.off(drawn)], []
    for seed in SEEDS[1 : _FEW_DRAWS if few else None]:
        result = plain.again(reseed=seed)
        seeds.append(plain.off(result))
        draws.append(distance(result, drawn))
        del result
    del drawn
    more = (plain.moved(reseed=seed) for seed in MORE_SEEDS)
    plain.random = any(map(plain.differs, chain(seeds, more)))
    if plain.random:
        seeds += [plain.moved(reseed=seed, rolled=True) for seed in SEEDS[: _FEW_ROLLED if few else None]]
        plain.seeds, plain.draws = ([d for d in found if not d.broken] for found in (seeds, draws))


def _in_another_order(call: ReplayedCall, saved: SavedState) -> Result | None:
    try:
        return replay(call, saved, Variation(rolled=True))
    except Exception:  # the model's own: what it asks of its inputs, another order does not have
        return None
