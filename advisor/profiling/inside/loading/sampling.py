"""Samples one thread's stack while it makes batches, for a bounded time, and times each batch whole.

A thread of Python's reads the stack: no signal, which would break into a library's reads, and no tracing, which would slow each line. It
gets its turn when the sampled thread lets go of the interpreter, at the latest behind the C function that is running, on the line that has
called it; a sample counts for the time since the one before, so that long calls weigh what they take.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from advisor.core.loading import FEWEST, HAND_OVER, LoaderWork, WorkLine
from advisor.profiling.inside.loading.naming import NamedWork, Naming, handing_over

EVERY_S = 0.01  # in a worker: a sample costs it a tenth of a millisecond
EVERY_HERE_S = 0.002  # in the training's thread, where there are a few steps to sample
MOST_SAMPLES = 320  # shares are then known to 3 %
MOST_S = 20.0
FIRST = 1  # batches passed over: imports, files that nobody has read yet
KEPT_BATCHES = 256
LINES = 8
FEEDER = "QueueFeederThread"
T = TypeVar("T")


class LoaderSampler:
    """Samples the thread that has made it. `saved` is called with what is known, in the sampling thread, now and then and at the end."""

    def __init__(self, *, worker: bool, saved: Callable[[LoaderWork], None] | None = None, clock: Any = time) -> None:
        self._worker, self._saved, self._clock = worker, saved, clock
        self._thread_id = threading.get_ident()
        self._naming = Naming()
        self._weights: defaultdict[NamedWork, float] = defaultdict(float)
        self._handing_s = 0.0
        self.samples = 0
        self._seen = 0
        self._each_s: list[float] = []
        self._began: float | None = None  # of the batch that is being made
        self._since = 0.0  # the first batch that counts began
        self._until = 0.0
        self._cost_s = 0.0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to sample, in a thread of its own."""
        self._thread = threading.Thread(target=self._run, name="advisor-loader", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more samples and batches are taken. May be called twice."""
        self._over.set()

    @property
    def over(self) -> bool:
        """Whether it has ended, asked to or because there is enough."""
        return self._over.is_set()

    def around(self, fetch: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`fetch`, each call of it a batch."""

        def timed(index: Any) -> Any:
            if self._over.is_set():
                return fetch(index)
            self.begin()
            try:
                return fetch(index)
            finally:
                self.end()

        return timed

    def begin(self) -> None:
        """A batch is begun."""
        now = self._clock.perf_counter()
        if self._seen == FIRST:
            self._since = now
        self._began = now

    def end(self) -> None:
        """It is made."""
        began, self._began = self._began, None
        self._seen += 1
        if began is not None and self._seen > FIRST:
            self._until = self._clock.perf_counter()
            if len(self._each_s) < KEPT_BATCHES:
                self._each_s.append(self._until - began)

    def _run(self) -> None:
        last = begun = self._clock.perf_counter()
        due = FEWEST  # samples with which it is told what is known, then twice as many: a worker may end at any time
        while not self._over.is_set():
            self._clock.sleep(EVERY_S if self._worker else EVERY_HERE_S)
            now = self._clock.perf_counter()
            before = time.thread_time()
            self.take(sys._current_frames(), now - last, now)
            last = now
            if self._saved is not None and self.samples >= due:
                due *= 2
                self._saved(self.work())
            self._cost_s += time.thread_time() - before
            if self.samples >= MOST_SAMPLES or now - begun > MOST_S:
                self._over.set()
        if self._saved is not None:
            self._saved(self.work())

    def take(self, frames: dict[int, Any], elapsed_s: float, now: float) -> None:
        """One sample: every thread's innermost frame, the time since the last one."""
        if self._seen < FIRST:
            return
        if self._worker:
            for thread in threading.enumerate():
                if thread.name == FEEDER and thread.ident is not None and handing_over(frames.get(thread.ident)):
                    self._handing_s += elapsed_s
        began = self._began
        if began is None:
            return
        work = self._naming.of(frames.get(self._thread_id))
        if work is not None:
            self._weights[work] += min(elapsed_s, max(now - began, 1e-6))
            self.samples += 1

    def work(self) -> LoaderWork:
        """What is known by now."""
        each = list(self._each_s)
        weights = dict(self._weights)
        whole = sum(weights.values())
        spent = max(self._until - self._since, 0.0)
        if not each or whole <= 0 or spent <= 0:
            return LoaderWork(worker=self._worker, batches=len(each), samples=self.samples)
        batch_us = sum(each) / len(each) * 1e6
        times = {work: batch_us * weight / whole for work, weight in weights.items()}
        kinds: defaultdict[str, float] = defaultdict(float)
        for work, time_us in times.items():
            kinds[work.kind] += time_us
        if self._handing_s > 0:
            kinds[HAND_OVER] += self._handing_s / len(each) * 1e6
        return LoaderWork(
            worker=self._worker,
            batches=len(each),
            each_us=tuple(seconds * 1e6 for seconds in each),
            samples=self.samples,
            kinds=dict(_largest_first(kinds)),
            lines=tuple(
                WorkLine(source=work.source, what=work.what, kind=work.kind, time_us=time_us)
                for work, time_us in _largest_first(times)[:LINES]
            ),
            waits_frac=max(0.0, 1.0 - sum(each) / spent) if self._worker else 0.0,
            cost_frac=min(1.0, self._cost_s / spent),
        )


def _largest_first(times: Mapping[T, float]) -> list[tuple[T, float]]:
    return sorted(times.items(), key=lambda entry: -entry[1])
