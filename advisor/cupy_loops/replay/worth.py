"""Whether replaying a loop pays: plain steps and replayed ones by the clock, each stretch between two waits for the device.

Plain steps are timed while their calls are seen, and seeing costs: what that took is taken off, so that a loop that gains nothing is left.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from advisor.core.units import duration_text
from advisor.cupy_loops.clock import synchronize

WARM = 10  # replayed steps before the clock starts: graphs are judged, arrays that are held are found
TIMED = 20  # replayed steps of one stretch on the clock
STRETCHES = 3  # of which the best counts: a plot or a file that is saved in one is no fault of the replay's
LEAST_GAIN = 0.02  # of a plain step


class Worth:
    """Told of each boundary; `verdict` is why the loop is to be left, or "".

    Attributes:
        seeing_s: what looking at calls has taken since the clock of plain steps started.
        known: replayed steps have been found to be faster.
    """

    def __init__(self, module: Any, now: Callable[[], float] = time.perf_counter) -> None:
        self._module, self.now = module, now
        self.seeing_s = 0.0
        self._plain_s = 0.0  # of one step
        self._started = 0.0
        self._steps = 0
        self.known = False
        self._each: list[float] = []  # seconds of a replayed step, by stretch

    def plain(self, first: bool, last: bool) -> None:
        """A plain step begins; `first` of those on the clock, or the `last`, which is not on it any more."""
        if first:
            self._start()
            self.seeing_s = 0.0
            self._steps = 0
            return
        self._steps += 1
        if last:
            synchronize(self._module)
            self._plain_s = max(0.0, self.now() - self._started - self.seeing_s) / self._steps

    def recorded(self) -> None:
        """A program is made: its steps go on the clock."""
        self._steps = -WARM

    def broken(self) -> None:
        """A step went another way: the stretch is no measure."""
        self._steps = -1

    def replayed(self) -> str:
        """A step was replayed to its end. Why the loop is to be left alone; "" for nothing."""
        if self.known or not self._plain_s:
            return ""
        self._steps += 1
        if self._steps == 0:
            self._start()
        if self._steps < TIMED:
            return ""
        synchronize(self._module)
        self._each.append((self.now() - self._started) / TIMED)
        best = min(self._each)
        self.known = best <= (1 - LEAST_GAIN) * self._plain_s
        if self.known or len(self._each) < STRETCHES:
            self._steps = 0
            self._start()
            return ""
        return f"a replayed step takes {duration_text(best * 1e6)}, a plain one {duration_text(self._plain_s * 1e6)}"

    def _start(self) -> None:
        synchronize(self._module)
        self._started = self.now()
