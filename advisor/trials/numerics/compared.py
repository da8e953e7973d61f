"""The step with a change on, several times, held against the plain one from end to end."""

from __future__ import annotations

import math

from advisor.core.findings import Semantics
from advisor.core.verdict import Check
from advisor.trials.numerics.bounds import judged
from advisor.trials.numerics.plain import PlainStep
from advisor.trials.numerics.replay import Result, finite

# Two orders of the batch in turn show a stale output; six calls reach what engages late (a graph's capture).
TURNS = 6
# While a change of precision overflows, output gradients are lowered by this factor, as a GradScaler would.
_LOWER, _LOWER_TRIES = 2.0**-4, 5
# A replay that takes so many times the fastest one has switched something on.
_ENGAGING = 1.5


def compare(plain: PlainStep, semantics: Semantics) -> tuple[Check, float]:
    """The check of this root, of the turn that is nearest its bound; and what the turns took beyond the fastest, microseconds."""
    name = plain.call.root.name
    if plain.unusable:
        return Check(passed=None, detail=f"{name}: {plain.unusable}"), 0.0
    tries = _LOWER_TRIES if semantics is Semantics.PRECISION else 0

    def again(*, rolled: bool = False) -> Result:
        """With output gradients as low as it takes: another order of the rows, or other random numbers, may overflow later."""
        nonlocal tries
        result = plain.again(lift=plain.lift, rolled=rolled)
        while tries and not finite(result):
            tries, plain.lift = tries - 1, plain.lift * _LOWER
            result = plain.again(lift=plain.lift, rolled=rolled)
        return result

    seconds: list[float] = []
    worst: Check | None = None
    for turn in range(TURNS):
        rolled = turn % 2 == 1
        result = again(rolled=rolled)
        seconds.append(result.seconds)
        check = judged(name, plain.off(result, rolled=rolled), plain, semantics)
        if worst is None or worst.numbers.get("of_bound", 0.0) <= check.numbers.get("of_bound", 0.0):
            worst = check
        if check.passed is not True:
            worst = check
            break
    assert worst is not None  # there is at least one turn
    usual = min(seconds)
    return worst, math.fsum(s - usual for s in seconds if s > _ENGAGING * usual) * 1e6
