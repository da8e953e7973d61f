"""Model calls of a script that has trained nothing so far: their period, once it may be taken for one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable

from advisor.loop.period import MAX_PERIOD, smallest_period

# Model calls without any backward pass or optimizer before a script is taken to train nothing: an evaluation before the
# training may take as many. Slow ones are not waited for beyond so many seconds, once there are a few.
FORWARD_PATIENCE, FORWARD_LEAST, FORWARD_PATIENCE_S = 256, 16, 60.0


class ModelCalls:
    """Args: patient: a training may follow, and is waited for."""

    def __init__(self, *, patient: bool) -> None:
        self._waits = patient
        self._calls: deque[Hashable] = deque(maxlen=2 * MAX_PERIOD)
        self._count = 0
        self._since_ns = 0

    def saw(self, key: Hashable) -> list[Hashable]:
        """The calls of the last two periods, where there is one and it has been waited for; else none."""
        self._calls.append(key)
        self._count += 1
        self._since_ns = self._since_ns or time.perf_counter_ns()
        period = 0 if self._patient() else self._period()
        return list(self._calls)[-2 * period :] if period else []

    def _patient(self) -> bool:
        """Too few model calls were seen to rule out that a training follows. The heap is searched now and then only."""
        count = self._count
        if not self._waits or (count >= FORWARD_PATIENCE and count % FORWARD_PATIENCE == 0):
            return False
        seconds = (time.perf_counter_ns() - self._since_ns) / 1e9
        return count < FORWARD_LEAST or count % FORWARD_LEAST > 0 or seconds < FORWARD_PATIENCE_S

    def _period(self) -> int:
        return smallest_period(tuple(self._calls), covering=set(self._calls))

    @property
    def rounds(self) -> int:
        """How often the period has come; 0 where there is none."""
        period = self._period()
        return self._count // period if period else 0
