"""Which of several ways to make a product is taken, from their times and errors. Pure: needs no torch."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from advisor.core.units import time_text

# Rates that a limit is told from were measured in other work, and a kernel may be this much faster.
RATES_ERROR = 1.1
LEAST_GAIN = 0.02  # of the usual way's time: less is not worth a detour
# Sums in another order are as near to the result as the usual ones: this much further off is another precision.
MORE_ERROR = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One way: its times in microseconds, and its relative error against fp64; `failed`: why it could not be run."""

    way: str
    times_us: tuple[float, ...] = ()
    error: float = math.inf
    failed: str = ""

    @property
    def typical_us(self) -> float:
        """The median."""
        return statistics.median(self.times_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is taken, with its time and the usual way's. `refused`: way → why not."""

    way: str
    time_us: float
    usual_us: float
    error: float
    refused: dict[str, str] = field(default_factory=dict)


def decide(usual: Timed, others: Sequence[Timed], *, least_us: float, most_error: float = math.inf) -> Choice:
    """The fastest way that is right; the usual one where none is faster beyond noise.

    Args:
        least_us: what this machine needs at least; 0.0 where it is not known. A time below that is an error of the clock, or a way that
            does not make the whole product: it is never taken. Where the usual way's own time is one, no time is believed.
        most_error: what the user's class of changes allows; beside it `MORE_ERROR` times the usual way's own error.

    Raises:
        ValueError: when the usual way has no time.
    """
    if not usual.times_us:
        raise ValueError(f"the usual way was not timed: {usual.failed or 'no times'}")
    allowed = min(most_error, MORE_ERROR * usual.error)
    below = _below(usual, least_us)
    refused = {}
    best = usual
    for other in others:
        reason = below or _refusal(other, usual, least_us, allowed)
        if reason:
            refused[other.way] = reason
        elif other.typical_us < best.typical_us:
            best = other
    return Choice(way=best.way, time_us=best.typical_us, usual_us=usual.typical_us, error=best.error, refused=refused)


def _refusal(other: Timed, usual: Timed, least_us: float, allowed: float) -> str:
    if other.failed or not other.times_us:
        return other.failed or "not timed: the time for it was over"
    below = _below(other, least_us)
    if below:
        return below
    if not other.error <= allowed:  # not a number is no error that is allowed
        return f"error {other.error:.1e}, where {allowed:.1e} is allowed"
    gain = 1.0 - other.typical_us / usual.typical_us
    if gain < LEAST_GAIN or max(other.times_us) >= min(usual.times_us):
        return f"{time_text(other.typical_us, usual.typical_us)}, which is not faster beyond noise than {time_text(usual.typical_us)}"
    return ""


def _below(timed: Timed, least_us: float) -> str:
    if least_us > RATES_ERROR * min(timed.times_us):
        took, least = time_text(min(timed.times_us), least_us), time_text(least_us)
        return f"error: {timed.way} took {took}, and this machine needs {least} at least"
    return ""
