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
