"""The smallest repeating period of a sequence: how steps are told from single optimizer calls or backward passes."""

from __future__ import annotations

from collections.abc import Hashable, Sequence, Set

MAX_PERIOD = 12  # a WGAN with ten critic updates a generator update has 11


def smallest_period(
    sequence: Sequence[Hashable],
    *,
    covering: Set[Hashable] = frozenset(),
    repeats: int = 2,
    longest: int = MAX_PERIOD,
) -> int:
    """The least p such that the last `repeats` * p entries are the same p entries again and again; 0 when there is none.

    `covering` holds values that must occur in the period: five critic updates in a row are no period of their own while
    a generator's optimizer exists that has not been stepped yet.
    """
    count = len(sequence)
    for period in range(1, min(longest, count // repeats) + 1):
        tail = sequence[count - repeats * period :]
        if all(tail[i] == tail[i + period] for i in range(len(tail) - period)) and covering <= set(tail[:period]):
            return period
    return 0


def period_of(history: tuple[Hashable, ...], alive: set[Hashable], *, new: bool) -> int:
    """The period of optimizers' calls; 0 while there is none.

    Args:
        alive: optimizers that it has to hold, as long as one holds them all.
        new: there was no other period before.
    """
    if len(alive) == 1 and new:
        return 1  # there is but one optimizer, and never was another
    period = smallest_period(history, covering=alive)
    if not period and len(history) > MAX_PERIOD:
        # An optimizer that exists is never stepped: go by those that are.
        period = smallest_period(history, covering=set(history))
    return period


def begun_like(old: tuple[Hashable, ...], pattern: tuple[Hashable, ...]) -> tuple[tuple[Hashable, ...], int]:
    """The pattern, turned to begin where the old one did, and the position in it.

    A round may be entered in its middle: it begins at the first of a run of the calls that the old one began with.
    """
    starts = [i for i in range(len(pattern)) if old and pattern[i] == old[0] and pattern[i - 1] != old[0]]
    if not starts or not starts[0]:
        return pattern, 0
    shift = starts[0]
    return pattern[shift:] + pattern[:shift], len(pattern) - shift
