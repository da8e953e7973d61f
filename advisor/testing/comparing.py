"""Two steps against each other in one process: paired blocks in ABBA order and an interval, never two single times.

The statistics are those of `advisor apply` (trials/statistics.py). Pairs are taken in stages, as many as the question
needs; what remains open after the last stage is inconclusive and is said to be.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from statistics import fmean, median
from typing import Any, Protocol

import torch

from advisor.core.errors import AdvisorError
from advisor.core.verdict import Status
from advisor.testing import amounts
from advisor.testing.amounts import Amount
from advisor.testing.device_lock import alone, locked
from advisor.testing.judged import JudgedBudget
from advisor.trials import statistics

WARMUP = 5
BLOCK_S = 0.1  # long against a scheduler's grain; twenty pairs take four seconds
LEAST_STEPS, MOST_STEPS = 3, 200

Step = Callable[[], Any]


class TurnsWatch(Protocol):
    """Times calls of a step."""

    def times(self, step: Step, count: int) -> list[float]:
        """Microseconds of each of `count` calls in a row."""


class HostStopwatch:
    """The host's clock: for steps on a CPU."""

    def times(self, step: Step, count: int) -> list[float]:
        marks = [time.perf_counter_ns()]
        for _ in range(count):
            step()
            marks.append(time.perf_counter_ns())
        return [(b - a) / 1e3 for a, b in itertools.pairwise(marks)]


class DeviceStopwatch:
    """CUDA events at the steps' ends; the queue is empty at both ends of a block, so that blocks do not mix."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def times(self, step: Step, count: int) -> list[float]:
        torch.cuda.synchronize(self._device)
        stream = torch.cuda.current_stream(self._device)
        events: list[Any] = []
        for index in range(count + 1):
            if index:
                step()
            event = torch.cuda.Event(enable_timing=True)
            event.record(stream)
            events.append(event)
        events[-1].synchronize()
        return [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(events)]


class Comparison:
    """`a` and `b`, ready to be asked.

    Args:
        max_pairs: pairs after which an open question is inconclusive.
        undecided: called with the reason then; returns to let the test pass, raises to end it otherwise.
    """

    def __init__(
        self,
        a: Step,
        b: Step,
        *,
        device: torch.device | None = None,
        stopwatch: TurnsWatch | None = None,
        max_pairs: int = statistics.STAGES[-1],
        undecided: Callable[[str], None] | None = None,
    ) -> None:
        if not callable(a) or not callable(b):
            raise AdvisorError("a step to compare is no callable", expected="two callables without arguments")
        if max_pairs < statistics.STAGES[0]:
            raise AdvisorError(f"max_pairs={max_pairs}", expected=f"{statistics.STAGES[0]} or more")
        self._steps = (a, b)
        self._device = device or torch.device("cpu")
        self._watch: TurnsWatch = stopwatch or (
            DeviceStopwatch(self._device) if self._device.type == "cuda" else HostStopwatch()
        )
        self._max_pairs = max_pairs
        self._undecided = undecided
        self._block = 0
        self._blocks: tuple[list[list[float]], list[list[float]]] = ([], [])
        self.budgets: list[JudgedBudget] = []

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """One time of each block (a, b) so far, microseconds a step: medians, or means where a part of the steps takes much longer.

        Of a step that does more in every fourth call the median knows nothing.
        """
        bursts = any(statistics.bursty(list(itertools.chain(*blocks))) for blocks in self._blocks)
        a, b = ([fmean(block) if bursts else median(block) for block in blocks] for blocks in self._blocks)
        return list(zip(a, b, strict=True))

    @property
    def gain(self) -> tuple[float, float, float] | None:
        """Share of a's time that b saves: (low, point, high) at 99 %; None before the first stage."""
        found = statistics.gain_interval(self.pairs)
        return None if found is None else (found[0].low, found[1], found[0].high)

    def assert_faster(self, by: Amount = 0.0) -> None:
        """b saves more than `by` of a's time, beyond noise."""
        __tracebackhide__ = True
        share = amounts.share(by, "by")
        self._assert(share, f"the second step is not faster than the first by {share:.1%}")

    def assert_not_slower(self, than: Amount = "1 %") -> None:
        """b takes no more than a and `than` of it, beyond noise."""
        __tracebackhide__ = True
        share = amounts.share(than, "than")
        self._assert(-share, f"the second step is slower than the first by more than {share:.1%}")

    def _assert(self, threshold: float, failed: str) -> None:
        __tracebackhide__ = True
        decision = self._decide(threshold)
        if decision.point is not None:
            passed = decision.status != Status.REVERTED
            self.budgets.append(
                JudgedBudget(
                    title="time of the second step over the first",
                    unit="frac",
                    value=1 - decision.point,
                    limit=1 - threshold,
                    bound="max",
                    passed=passed,
                )
            )
        if decision.status == Status.REVERTED:
            raise AssertionError(f"{failed}: {decision.reason}")
        if decision.status == Status.INCONCLUSIVE:
            reason = f"inconclusive: {decision.reason}"
            if self._undecided is None:
                raise AssertionError(reason)
            self._undecided(reason)

    def _decide(self, threshold: float) -> statistics.Decision:
        while True:
            decision = statistics.decide(self.pairs, threshold, max_pairs=self._max_pairs)
            if decision.status != Status.MORE:
                return decision
            self._sample(next(s for s in (*statistics.STAGES, self._max_pairs) if s > len(self.pairs)))

    def _sample(self, pairs: int) -> None:
        with alone(), locked(self._device):
            if not self._block:
                self._calibrate()
            timed: list[list[float]] = [[], []]
            for pair in range(len(self._blocks[0]), min(pairs, self._max_pairs)):
                for which in (0, 1) if pair % 2 == 0 else (1, 0):
                    timed[which] = self._watch.times(self._steps[which], self._block)
                for blocks, times in zip(self._blocks, timed, strict=True):
                    blocks.append(times)

    def _calibrate(self) -> None:
        """Warm both up, and choose how many steps a block of the faster one needs."""
        fastest = min(median(self._watch.times(step, WARMUP)) for step in self._steps)
        wanted = math.ceil(BLOCK_S * 1e6 / fastest) if fastest > 0 else MOST_STEPS
        self._block = max(LEAST_STEPS, min(MOST_STEPS, wanted))
