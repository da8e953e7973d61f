"""Do two sets of runs train alike: loss trajectories of fresh processes with the same seed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from advisor.core.units import percent_text
from advisor.core.verdict import Check

# Losses of single steps jump with their batch; means over this many steps are compared.
WINDOW = 5
# Fewer losses than this say nothing about a trajectory.
LEAST = 10
# Allowed difference of window means, relative to the loss's own size: training amplifies any other rounding, and random
# layers or augmentation may draw other numbers. A wrong gradient or a frozen layer is off by more within tens of steps.
TOLERANCE, PRECISION_TOLERANCE = 0.10, 0.15
# The plain runs' own spread, times this, is allowed as well; and so is this many times what the losses jump by from step to
# step: trainings with small batches and large steps go apart from any difference in rounding, and are as good as before.
SPREAD_FACTOR = 4.0
JUMP_FACTOR = 2.0


def compare(plain: Sequence[Sequence[float]], stack: Sequence[Sequence[float]], *, precision: bool = False) -> Check:
    """Whether every stack run's losses stay in the envelope of the plain runs.

    Steps at which a plain run's own loss is not finite say nothing; passed is None where those leave too few, or the plain runs
    have no losses: nothing to compare with. A stack run without losses, with too few, or with NaN or infinite ones at other steps fails.
    """
    plain = [run for run in plain if run]
    if not plain:
        return Check(passed=None, detail="advisor cannot see a loss in the script's steps")
    if not stack or not all(len(run) > 0 for run in stack):
        return Check(passed=False, detail="no losses were seen with the changes on")
    # One batch that overflows is no licence for a training that is NaN from then on.
    finite = [i for i, values in enumerate(zip(*plain, strict=False)) if all(map(math.isfinite, values))]
    if len(finite) < min(LEAST, *map(len, plain)):
        return Check(passed=None, detail="the plain script's own losses are not finite")
    plain, stack = ([[run[i] for i in finite if i < len(run)] for run in runs] for runs in (plain, stack))
    if not all(math.isfinite(value) for run in stack for value in run):
        return Check(passed=False, detail="the loss became NaN or infinite")
    length = min(len(run) for run in (*plain, *stack))
    if length < LEAST:
        return Check(
            passed=False, detail=f"only {length} losses to compare, fewer than {LEAST}", numbers={"steps": length}
        )
    tolerance = PRECISION_TOLERANCE if precision else TOLERANCE
    plain_windows = [_windows(run[:length]) for run in plain]
    stack_windows = [_windows(run[:length]) for run in stack]
    values = [value for run in plain for value in run[:length]]
    scale = math.fsum(abs(v) for v in values) / len(values)
    columns = list(zip(*plain_windows, strict=True))
    # Runs that have gone apart cross now and then: how far chance takes them shows in the windows around, too.
    spreads = [max(column) - min(column) for column in columns]
    spreads = [max(spreads[max(0, i - 1) : i + 2]) for i in range(len(spreads))]
    worst = 0.0
    for i, (column, spread) in enumerate(zip(columns, spreads, strict=True)):
        centre = math.fsum(column) / len(column)
        # From the window before on: the fall from an untrained net's first losses is no noise of what comes later.
        jumps = _jumps([run[max(0, i - 1) * WINDOW : length] for run in plain])
        allowed = tolerance * max(abs(centre), scale) + SPREAD_FACTOR * spread + JUMP_FACTOR * jumps
        difference = max(abs(run[i] - centre) for run in stack_windows)
        worst = max(worst, difference / allowed if allowed > 0 else (0.0 if difference == 0 else math.inf))
    numbers = {"steps": float(length), "of_bound": worst}
    told = (
        f"losses of {length} steps at {percent_text(worst)} of the envelope"
        if math.isfinite(worst)
        else "losses differ from a constant zero"
    )
    return Check(
        passed=worst <= 1.0,
        detail=told if worst <= 1.0 else f"the loss leaves the plain runs' envelope ({told})",
        numbers=numbers,
    )


def apart(check: Check) -> bool:
    """Whether this comparison failed for nothing but distance, which further plain runs may show to be chance's."""
    return check.passed is False and math.isfinite(check.numbers.get("of_bound", math.inf))


def _jumps(runs: Sequence[Sequence[float]]) -> float:
    """Standard deviation of the losses around their trend, from the differences of neighbours."""
    differences = [b - a for run in runs for a, b in itertools.pairwise(run)]
    return math.sqrt(math.fsum(d * d for d in differences) / len(differences) / 2.0)


def _windows(values: Sequence[float]) -> list[float]:
    count = len(values) // WINDOW
    return [math.fsum(values[i * WINDOW : (i + 1) * WINDOW]) / WINDOW for i in range(count)]
