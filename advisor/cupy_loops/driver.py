"""The profile mode in a CuPy loop: warm-up, steps timed with one kind of call watched, a traced window, then the end of the script.

It writes the same files as the profile mode of a PyTorch loop, so that all that reads a run folder reads these.
"""

from __future__ import annotations

import atexit
import itertools
import os
import statistics
import time
from collections import Counter
from dataclasses import replace
from typing import Any

from advisor.core import storage
from advisor.core.errors import first_line
from advisor.core.profile import MemoryStats
from advisor.core.stderr import say
from advisor.cupy_loops.clock import on_device
from advisor.cupy_loops.facts import PoolReadings, model_facts
from advisor.cupy_loops.standing import Standing
from advisor.cupy_loops.watch import Watcher
from advisor.cupy_loops.window import Window as TraceWindow
from advisor.loop.records import FACTS_FILE, STEPS_FILE, TRACE_FILE, FactsRecord, StepsRecord, Window, save_trace
from advisor.loop.session import Session, tell
from advisor.loop.stop import stop
from advisor.loop.timing import StepTimes, spread, step_times, window
from advisor.loop.training import StepEvent
from advisor.profiling.inside.dramwindow import TRACED_SLOWDOWN, DramWindow

WARMUP_S, TIMED_S = 20.0, 60.0
MIN_WARMUP, MIN_TIMED = 3, 3
KEPT_WARMUP = 256
READINGS = 6  # of the memory pool, over the timed steps
CALLS_LIMIT = 100_000  # of the traced window
TELL_EVERY_S = 0.25


class CupyProfile:
    """A listener of a `Watcher`. `phase` goes warm-up, timed, traced, done."""

    def __init__(self, module: Any, session: Session, watcher: Watcher, standing: Standing) -> None:
        self.module, self.session, self.watcher, self.standing = module, session, watcher, standing
        self.phase = "warm-up"
        self._process = os.getpid()
        self._warm: list[StepEvent] = []
        self._timed: list[StepEvent] = []
        self._bounds: list[StepEvent] = []
        self._timed_window: Window | None = None
        self._traced_window: Window | None = None
        self._times: StepTimes | None = None
        self._pool = PoolReadings(module)
        self._memory = MemoryStats()
        self._dtypes: Counter[str] = Counter()
        self._window: TraceWindow | None = None
        self._detail = session.detail_steps
        self._notes: list[str] = []
        self._told_ns = 0
        watcher.on_call.append(self._saw)
        watcher.on_step.append(self.on_step)
        watcher.patches.on_fault.append(self._on_fault)
        atexit.register(self.at_exit)
        self._tell(0, session.warmup)

    def on_step(self, step: StepEvent) -> None:
        """One boundary.

        Raises:
            StopTraining: when everything is measured and the script is not to run on.
        """
        if self.phase == "warm-up":
            self._warm_up(step)
        elif self.phase == "timed":
            self._time(step)
        elif self.phase == "traced":
            self._trace(step)

    def let_go(self) -> None:
        """Another driver has this process: nothing is written, nothing is left."""
        self.phase = "done"
        self.standing.undo()
        self.watcher.detach()

    def _saw(self, name: str, line: str, result: Any) -> None:
        if isinstance(result, self.module.ndarray) and result.dtype.kind == "f":
            self._dtypes[str(result.dtype)] += 1

    def _warm_up(self, step: StepEvent) -> None:
        if len(self._warm) < KEPT_WARMUP:
            self._warm.append(step)
        wanted = max(self.session.warmup, MIN_WARMUP)
        slow = (
            len(self._warm) > MIN_WARMUP and step.host_ns - self._warm[0].host_ns > self.session.pace * WARMUP_S * 1e9
        )
        if len(self._warm) >= wanted or slow or self._over():
            self.phase = "timed"
            self._timed, self._timed_window = [step], window(step)
            self._pool.read()
            self._save_steps()
        self._tell(len(self._warm), wanted)

    def _time(self, step: StepEvent) -> None:
        self._timed.append(step)
        count, wanted = len(self._timed) - 1, max(self.session.steps, 1)
        if count % max(1, wanted // READINGS) == 0:
            self._pool.read()
        seconds = (step.host_ns - self._timed[0].host_ns) / 1e9
        if count >= wanted or (count >= MIN_TIMED and seconds > self.session.pace * TIMED_S) or self._over():
            self._timed_window = window(step, self._timed_window)
            self._measure()
            self._begin_trace()
            return
        self._tell(count, wanted)

    def _begin_trace(self) -> None:
        self.phase = "traced"
        self._save_steps()
        if self._detail < 1:
            self._finish()
            return
        # One step more than is wanted: the one that the window's start disturbs.
        wall_us = self._times.wall_us if self._times is not None else ()
        window_s = TRACED_SLOWDOWN * (self._detail + 1) * statistics.median(wall_us or [1e6]) / 1e6
        counters = DramWindow if self.session.counters else None
        self._window = TraceWindow(self.module, counters=counters, window_s=window_s)
        self._window.start()
        self._tell(0, self._detail, always=True)

    def _trace(self, step: StepEvent) -> None:
        if not self._bounds:  # the step in which tracing began is none
            self._bounds, self._traced_window = [step], window(step)
            calls = self._window.events if self._window is not None else 0
            self._detail = max(1, min(self._detail, CALLS_LIMIT // max(calls, 1)))
            return
        self._bounds.append(step)
        self._traced_window = window(step, self._traced_window)
        if len(self._bounds) > self._detail or self._over():
            self._finish()
        else:
            self._tell(len(self._bounds) - 1, self._detail, always=True)

    def _finish(self) -> None:
        self._take_trace()
        self.phase = "done"
        self._save()
        tell(self.session, "measured", steps=len(self._timed) - 1)
        if self.session.keep_running:
            self.watcher.detach()
            self._warm, self._timed, self._bounds = [], [], []
            return
        stop(self.session, "measured")

    def _take_trace(self) -> None:
        traced, self._window = self._window, None
        if traced is None:
            return
        tell(self.session, "phase", phase="reading the trace", done=0, total=0)
        try:
            trace = traced.stop([bound.host_ns for bound in self._bounds])
            if len(self._bounds) > 1:
                self._note_requests(traced.memory, len(self._bounds) - 1)
                save_trace(self.session.folder / TRACE_FILE, trace)
        except Exception as error:
            self._notes.append(f"no trace: {first_line(error)}")

    def _note_requests(self, counted: Any, steps: int) -> None:
        if counted is not None:  # those of the step in which the window began are among them
            self._memory = replace(
                self._memory, allocations=counted.asked / steps, device_allocations=counted.from_driver / steps
            )

    def at_exit(self) -> None:
        """Write what there is, when the script ends before all is measured."""
        if os.getpid() != self._process or self.phase == "done":
            return
        try:
            if not self.watcher.steps and (self.session.folder / STEPS_FILE).exists():
                return
            self._measure()
            self._take_trace()
            self._save()
            tell(self.session, "ended", phase=self.phase, steps=self.watcher.steps)
        except Exception as error:
            say(f"could not write what was measured: {first_line(error)}")

    def _on_fault(self, error: BaseException) -> None:
        self._notes.append(f"advisor switched itself off: {first_line(error)}")
        if self.phase != "done":
            self.at_exit()
            self.phase = "done"
        if not self.session.keep_running:
            stop(self.session, "advisor switched itself off")

    def _measure(self) -> None:
        self._times = step_times(self._boundaries)
        self._memory = self._pool.stats()

    @property
    def _provisional(self) -> bool:
        return len(self._timed) < 2

    @property
    def _boundaries(self) -> list[StepEvent]:
        return self._warm if self._provisional else self._timed

    def _save(self) -> None:
        facts = FactsRecord(model=model_facts(self.module, self._dtypes), memory=self._memory)
        storage.save(self.session.folder / FACTS_FILE, facts)
        self._save_steps()

    def _save_steps(self) -> None:
        times = self._times or step_times([replace(step, event=None) for step in self._boundaries])
        notes = list(self._notes)
        if self._provisional and self.watcher.steps:
            notes.append(f"the script ended after {self.watcher.steps} steps: these times include its warm-up")
        record = StepsRecord(
            kind=self.watcher.kind,
            device="cuda" if on_device(self.module) else "cpu",
            step_us=spread(times.step_us),
            wall_us=spread(times.wall_us),
            steps_seen=self.watcher.steps,
            warmup=len(self._warm),
            excluded=times.excluded,
            every_us=times.every_us,
            held=times.held,
            timed=self._timed_window,
            traced=self._traced_window,
            traced_wall_us=tuple((b.host_ns - a.host_ns) / 1e3 for a, b in itertools.pairwise(self._bounds)),
            phase=self.phase,
            complete=self.phase == "done" and self.watcher.patches.fault is None,
            provisional=self._provisional,
            notes=tuple(notes),
        )
        storage.save(self.session.folder / STEPS_FILE, record)

    def _over(self) -> bool:
        return 0 < self.session.deadline_unix_s < time.time()

    def _tell(self, done: int, total: int, *, always: bool = False) -> None:
        now = time.perf_counter_ns()
        if always or now - self._told_ns > TELL_EVERY_S * 1e9:
            self._told_ns = now
            tell(self.session, "phase", phase=self.phase, done=done, total=total)
