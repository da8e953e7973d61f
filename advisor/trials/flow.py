"""The whole flow of steps in fresh processes, epoch starts and evaluations included, comparable between processes. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from advisor.trials.records import Measurement

LEAST_TURNS = 2  # of a run whose steps are taken by whole turns of its loader's workers
NO_WAIT_FRAC = 0.03  # of the mean step: a wait shorter than this is none


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


def in_turns(arms: Sequence[Sequence[Measurement]]) -> list[list[list[float]]] | None:
    """The mean step of each whole turn of the loader's workers; None where a run has too few turns, or its loader no workers to take turns.

    Workers deliver one batch each in turn, so the last of them comes late and the others at once: of twenty steps behind six workers three
    take half a second and the others a tenth, and a window that ends one step later has four. From one batch of a worker to its next takes
    what that worker needs, wherever the turn begins. Steps before the first wait are left out where a run waits at all: they were fed by
    what had been made during the start and its first, longer steps.
    """
    # What some steps hold besides is comparable in as many steps of each run alone.
    plain = not any(reason for arm in arms for run in arm for reason in run.held)
    steps_of = [[list(run.every_us) for run in arm] for arm in arms] if plain else every_us(arms)
    found = []
    for arm, of_arm in zip(arms, steps_of, strict=True):
        turned = [_turns(steps, run) for steps, run in zip(of_arm, arm, strict=True)]
        if not all(turned):
            return None
        found.append(turned)
    return found


def _turns(steps: Sequence[float], run: Measurement) -> list[float]:
    """Of one run; empty where there are too few."""
    count = len(steps)
    if run.workers < 2 or not count:
        return []
    waits = [us > NO_WAIT_FRAC * fmean(steps) for us in run.waited_us[:count]]
    first = waits.index(True) + 1 if any(waits) else 0
    turns = (count - first) // run.workers
    if turns < LEAST_TURNS:
        turns = count // run.workers
    starts = range(count - turns * run.workers, count, run.workers)
    return [fmean(steps[at : at + run.workers]) for at in starts] if turns >= LEAST_TURNS else []


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
