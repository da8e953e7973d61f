"""Where the steps of a loop are, from the calls that it makes: the smallest period of their sequence, and a call that marks it.

An evaluation, a print or a plot between two steps breaks the period there; what is looked at is the end of the sequence, and it must be
most of it, so that the optimizer's loop over its parameters is no period of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

REPEATS = 3  # of the period, at least, at the end of the sequence
LEAST_SHARE = 0.2  # of all calls seen, in those repeats; a print every seventh step leaves no more
EARLY = 2000  # calls before a period that brings no batch is one: a loop over layers or parameters, inside a step, has one too


@dataclass(frozen=True, slots=True)
class Anchor:
    """The call that a step begins with: the `count`-th of the calls `key` in it begins the next one."""

    key: Hashable
    count: int
    period: int  # calls in a step


def period_of(calls: Sequence[Hashable]) -> tuple[int, int]:
    """The smallest period of the longest possible end of `calls` that repeats it at least `REPEATS` times, and how long that end is; (0, 0)
    without one.

    By the failure function of Knuth, Morris and Pratt over the sequence backwards: O(n).
    """
    backwards = calls[::-1]
    borders = [0] * len(backwards)
    best = (0, 0)
    length = 0
    for i in range(1, len(backwards)):
        while length and backwards[i] != backwards[length]:
            length = borders[length - 1]
        length += backwards[i] == backwards[length]
        borders[i] = length
        period = i + 1 - length
        if i + 1 >= REPEATS * period:
            best = (period, i + 1)
    return best


def find_anchor(calls: Sequence[tuple[str, str]], preferred: Sequence[str] = ()) -> Anchor | None:
    """The anchor of a loop that makes these calls, each a name and the line that made it; None while no period shows.

    Args:
        preferred: names that begin a step by nature: those that bring a batch to the device.
    """
    period, covered = period_of(calls)
    if not period or covered < LEAST_SHARE * len(calls):
        return None
    step = calls[len(calls) - period :]
    again = {key for key, times in Counter(calls).items() if times > 1 and key[0] in preferred}
    if again.isdisjoint(step) if again else len(calls) < EARLY:
        return None
    by_key, by_name = Counter(step), Counter(name for name, _ in step)
    key = min(by_key, key=lambda k: (by_key[k], k[0] not in preferred, by_name[k[0]], step.index(k)))
    return Anchor(key=key, count=by_key[key], period=period)
