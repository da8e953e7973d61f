"""The traced window: a few steps under the profiler, behind the one that its start has disturbed."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from advisor.core.trace import Trace
from advisor.loop.interval import OWN
from advisor.loop.records import TRACE_FILE, Window, save_trace
from advisor.loop.session import Session
from advisor.loop.timing import window
from advisor.loop.training import StepEvent, Training

TRACED_S = 30.0  # of long steps, in a search whose time is short
MAX_RESTARTS = 3  # of the window, when an epoch ends inside it


class TracedSteps:
    """From `start` to `stop`. `notes`: gets why there is no trace, or a shorter one."""

    def __init__(self, training: Training, session: Session, notes: list[str]) -> None:
        self.training, self.session, self.notes = training, session, notes
        self.wanted = session.detail_steps  # fewer where they are too many events
        self.bounds: list[StepEvent] = []
        self.window: Window | None = None
        self._collector: Any = None
        self._restarts = 0

    @property
    def full(self) -> bool:
        """As many steps as are wanted."""
        return len(self.bounds) > self.wanted

    def start(self, step_s: float, *, compiled: bool | None, in_step: bool) -> None:
        """Start the profiler. `step_s`: what a step takes without; `in_step`: several ranks have to trace as many steps."""
        try:
            from advisor.profiling.inside.collector import TraceCollector
            from advisor.profiling.inside.dramwindow import TRACED_SLOWDOWN

            window_s = TRACED_SLOWDOWN * (1 + self.wanted) * step_s
            if self.session.pace < 1.0 and not in_step and window_s > self.session.pace * TRACED_S:
                self.wanted = 1
                self.notes.append("the search is short and the steps are long, so one step was traced")
            self._collector = TraceCollector(
                self.training.device,
                self.session,
                self.training,
                step_s=step_s,
                compiled=compiled,
                lasting=self.session.keep_running,
            )
            self._collector.start()
        except Exception as error:
            self._collector = None
            self.notes.append(f"no trace: {type(error).__name__}: {error}")

    def boundary(self, step: StepEvent, *, in_step: bool) -> None:
        """One step more, or the window opens here."""
        # The first boundary ends the step that the profiler's start has disturbed; it only opens the window.
        disturbed = not step.clean and step.reason != OWN and not in_step
        if self._collector is not None:
            self._collector.settle()
        if not self.bounds and not in_step:
            self._fit()
        if not self.bounds or (disturbed and self._restarts < MAX_RESTARTS):
            self._restarts += bool(self.bounds)
            self.bounds = [step]
            self.window = window(step)
        else:
            self.bounds.append(step)
            self.window = window(step, self.window)

    def _fit(self) -> None:
        """Shorten the window where its first step, which the profiler's start has disturbed, shows that it grows too large.

        Not under torchrun, where all ranks end at one boundary and only one of them traces.
        """
        if self._collector is None:
            return
        from advisor.profiling.inside.rawevents import DETAIL_LIMIT

        a_step = self._collector.expected_events()
        fits = max(1, DETAIL_LIMIT // a_step - 1) if a_step else self.wanted
        if fits < self.wanted:
            self.wanted = fits
            self.notes.append(
                f"a step is about {a_step:,} events of the profiler: only {self.wanted} of the wanted "
                f"{self.session.detail_steps} steps traced"
            )

    @property
    def running(self) -> bool:
        """The profiler is on."""
        return self._collector is not None

    def stop(self) -> None:
        """Stop the profiler, if it is on, and save what it has seen."""
        collector, self._collector = self._collector, None
        if collector is None:
            return
        try:
            trace: Trace = collector.stop([bound.host_ns for bound in self.bounds])
            if len(self.bounds) > 1:  # else what was traced, an evaluation or a part of a step, would be told as one
                save_trace(self.session.folder / TRACE_FILE, trace)
        except Exception as error:
            self.notes.append(f"no trace: {type(error).__name__}: {error}")

    def abandon(self) -> None:
        """Stop the profiler without a result."""
        collector, self._collector = self._collector, None
        if collector is not None:
            with suppress(Exception):
                collector.stop()
