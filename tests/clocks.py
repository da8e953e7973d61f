"""How tests deal with time: by what has happened, in which order and how often, and with clocks that they set themselves."""

from __future__ import annotations

import time
from collections.abc import Callable


def until(happened: Callable[[], object], every_s: float = 0.01) -> None:
    """Returns once `happened()` is true. Its only limit is pytest's own, which no machine comes near: a slow one takes longer, and no more."""
    while not happened():
        time.sleep(every_s)


class Clock:
    """In place of a module's `time`: it goes on when it is told to, by `seconds`, and when somebody sleeps by it."""

    def __init__(self, seconds: float = 1000.0) -> None:
        self.seconds = seconds

    def monotonic(self) -> float:
        return self.seconds

    time = perf_counter = monotonic

    def monotonic_ns(self) -> int:
        return round(self.seconds * 1e9)

    time_ns = perf_counter_ns = monotonic_ns

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds
