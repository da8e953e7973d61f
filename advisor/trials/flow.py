"""The whole flow of steps in fresh processes, epoch starts and evaluations included, comparable between processes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from advisor.trials.records import Measurement


def every_us(arms: Sequence[Sequence[Measurement]]) -> list[list[list[float]]]:
    """Times of every step, of as many of each run; what the script does between some steps weighs alike in all of them.

    Runs are timed for so long, or from so many seconds on, so the faster ones come by other steps than the slower ones: of two windows
    of thirty steps one has an epoch's start in it, of a second, and the other none. Such a step counts as often as in all runs together,
    with what it took here; where an arm had none of its kind it does not count, as nobody knows what it takes there.
    """
    count = min((len(run.every_us) for arm in arms for run in arm), default=0)
    found = [[list(run.every_us[:count]) for run in arm] for arm in arms]
    if not all(any(not reason for reason in _held(run, count)) for arm in arms for run in arm):
        return found
    extra = [
        [_take_out(steps, _held(run, count)) for steps, run in zip(*pair, strict=True)]
        for pair in zip(found, arms, strict=True)
    ]
    runs = sum(map(len, arms))
    for reason in sorted(set.intersection(*({reason for run in arm for reason in run} for arm in extra))):
        rate = sum(len(run.get(reason, ())) for arm in extra for run in arm) / (count * runs)
        for arm, of_arm in zip(found, extra, strict=True):
            usual = fmean(us for run in of_arm for us in run.get(reason, ()))
            for steps, own in zip(arm, of_arm, strict=True):
                more = rate * (fmean(own[reason]) if reason in own else usual)
                steps[:] = [us + more for us in steps]
    return found


def _held(run: Measurement, count: int) -> tuple[str, ...]:
    """Of each of the first `count` steps; all are plain ones where nobody has noted it."""
    return run.held[:count] or ("",) * count


def _take_out(steps: list[float], held: Sequence[str]) -> dict[str, list[float]]:
    """Put the mean of the plain steps in place of the others.

    Returns:
        By how much those were above it, by what they held.
    """
    plain = fmean(us for us, reason in zip(steps, held, strict=True) if not reason)
    extra: dict[str, list[float]] = {}
    for i, reason in enumerate(held):
        if reason:
            extra.setdefault(reason, []).append(steps[i] - plain)
            steps[i] = plain
    return extra
