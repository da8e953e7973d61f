"""The traced window: a Kineto session with annotations and DRAM counters, read as raw events into a `Trace`.

Raw Kineto events only: `prof.events()` builds Python objects and a tree for each event and takes seconds for tens of
thousands. What a version of torch does not offer on its events is left empty, with a note where a reader would miss it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _ExperimentalConfig, _RecordFunctionFast
from torch.autograd import profiler as autograd_profiler

from advisor.core.trace import Trace
from advisor.loop.session import Session
from advisor.loop.training import Training
from advisor.profiling.inside.annotate import Annotator
from advisor.profiling.inside.dramwindow import TRACED_SLOWDOWN
from advisor.profiling.inside.kinetosession import end_profiler, quiet_kineto, script_profiles, teardown
from advisor.profiling.inside.rawevents import read_events
from advisor.profiling.machine.clock import BURST

CLOCK = "advisor:clock"  # a range whose host time is known on every clock: ties the trace's clock to the host's
# Events of a step to each range that annotations open in it: its operators, their backward and what they are made of. 5 to 12
# in a residual network on a CPU with SGD and Adam, with foreach and without. A device adds launches and kernels: allowed for.
EVENTS_PER_RANGE, DEVICE_EVENTS_PER_RANGE = 12, 20


class TraceCollector:
    """Traces from `start` to `stop`. Neither ever raises for want of a GPU, of counters, or of a free profiler.

    Args:
        device: where the training step runs.
        session: `counters` says whether DRAM counters are wanted.
        training: its roots give the modules their paths; None leaves modules named by their class.
        step_s: usual time of a step with no profiler on, from which the counters' interval follows; 0 if unknown.
        compiled: whether the step runs compiled code; None where nobody knows.
        lasting: the process trains on after the trace, and is to pay nothing for it then.
    """

    def __init__(
        self,
        device: torch.device,
        session: Session,
        training: Training | None = None,
        *,
        step_s: float = 0.0,
        compiled: bool | None = None,
        lasting: bool = True,
    ) -> None:
        self.notes: list[str] = []
        self._compiled, self._lasting = compiled, lasting
        self._cuda = cuda_usable(device)
        self._annotator = Annotator(training.models if training is not None else (), training)
        self._profile: autograd_profiler.profile | None = None
        self._thread: threading.Thread | None = None  # in which it was started, and alone can be stopped
        self._anchors: list[tuple[int, int]] = []  # (CLOCK_REALTIME, perf_counter) at the mark of `start`, in ns
        self._dram: Any = None
        if self._cuda and session.counters:
            # Made here and not in `start`: enabling the counters takes a moment that belongs to no step.
            # The window has one step more than is wanted, the one that its start disturbs.
            self._dram = self.open_counters(device, TRACED_SLOWDOWN * (session.detail_steps + 1) * step_s or 1.0)

    def start(self) -> None:
        """Tracing is on, the device's queue is empty, and `notes` says what could not be had."""
        if _profiler_enabled() or script_profiles():
            self.notes.append("no trace: the script's own torch profiler is running")
            return
        try:
            profile = autograd_profiler.profile(
                use_device="cuda" if self._cuda else None,
                record_shapes=True,
                use_kineto=True,
                experimental_config=_experimental_config(),
            )
            if self._cuda:
                torch.cuda.synchronize()  # kernels launched earlier have no launch record and would look like gaps
                # The counters are CUPTI's too, and would go down with it.
                teardown(wanted=self._lasting and self._dram is None)
            with quiet_kineto():
                profile._prepare_trace()
            profile._start_trace()
        except Exception as error:
            self.notes.append(f"no trace: the profiler did not start ({type(error).__name__}: {error})")
            return
        self._profile, self._thread = profile, threading.current_thread()
        if self._dram is not None:
            try:
                self._dram.start()
            except Exception as error:
                self._give_up_counters(error)
        self._annotator.start(compiled=self._compiled)
        with _RecordFunctionFast(CLOCK):
            self._anchors.append((time.time_ns(), time.perf_counter_ns()))

    def expected_events(self) -> int:
        """About how many events the window holds by now, rather too many than too few; 0 where nothing is annotated."""
        if self._profile is None:
            return 0
        return self._annotator.opened * (DEVICE_EVENTS_PER_RANGE if self._cuda else EVENTS_PER_RANGE)

    def settle(self) -> None:
        """A step has ended inside the window."""
        self._annotator.settle()

    def stop(self, step_bounds_ns: Iterable[int] = ()) -> Trace:
        """End the window and return what was seen in it.

        Args:
            step_bounds_ns: the n+1 boundaries of the n traced steps on a host clock (`time.time_ns` or
                `time.perf_counter_ns`). `annotate.step_marker` marks found in the trace take their place, being on the
                trace's own clock.

        Returns:
            A Trace with step bounds on its own clock; empty tables and a note when there was no profiler.
        """
        bounds = sorted(step_bounds_ns)
        self._annotator.stop()
        if self._annotator.failure:
            self.notes.append(self._annotator.failure)
        device = "cuda" if self._cuda else "cpu"
        if self._profile is not None:
            self._profile.entered = False  # else it would count as one of the script's
            if not _profiler_enabled() or script_profiles():
                self._profile = None
                moved = threading.current_thread() is not self._thread
                why = "now trains in another thread" if moved else "has started its own torch profiler"
                self.notes.append(f"no trace: the script {why}")
        if self._profile is None:
            if self._dram is not None:
                self._dram.close()
            return Trace(device=device, step_bounds_ns=bounds, notes=self.notes)
        if self._cuda:
            torch.cuda.synchronize()  # records of kernels that have not finished would be missing
        if self._dram is not None:
            try:
                self._dram.stop()
            except Exception as error:
                self._give_up_counters(error)
        self._profile = None
        try:
            trace = read_events(end_profiler(device), device, notes=self.notes)
        except Exception as error:
            self.notes.append(f"no trace: the profiler's events could not be read ({type(error).__name__}: {error})")
            return Trace(device=device, step_bounds_ns=bounds, notes=self.notes)
        set_bounds(trace, bounds, self._anchors)
        trace.roles.update(self._annotator.roles)
        if self._dram is not None:
            trace.notes.extend(self._dram.notes)
            try:
                trace = self._dram.laid_over(trace)
            except Exception as error:
                self._give_up_counters(error)
        if not self._annotator.lines:
            trace.notes.append("source lines not annotated: the script runs compiled code, which guards against it")
        return trace

    def open_counters(self, device: torch.device, window_s: float) -> Any:
        try:
            from advisor.profiling.inside.dramwindow import DramWindow

            index = device.index if device.index is not None else torch.cuda.current_device()
            return DramWindow(index, window_s=window_s)
        except Exception as error:
            self._give_up_counters(error)
            return None

    def _give_up_counters(self, error: Exception) -> None:
        self.notes.append(f"DRAM counters unavailable: {error}")
        window, self._dram = self._dram, None
        if window is not None:
            window.close()


def cuda_usable(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def _experimental_config() -> Any:
    wanted: dict[str, Any] = {"expose_kineto_event_metadata": True}  # launch geometry and copied bytes; torch >= 2.10
    try:
        return _ExperimentalConfig(**wanted)
    except TypeError:
        return _ExperimentalConfig()


def set_bounds(trace: Trace, given: list[int], anchors: list[tuple[int, int]]) -> None:
    """Step bounds from the marks in the trace; else from host times, moved to the trace's clock; else the whole window.

    No bound lies before tracing was on: a first boundary at which tracing was started would count the start-up as step.
    """
    ops, bounds = trace.ops, trace.step_bounds_ns
    if not ops.start_ns:
        return
    marks = sorted(t for t, text in zip(ops.start_ns, ops.annotation, strict=True) if text.startswith("step:"))
    clock = next((i for i, name in enumerate(ops.name) if name == CLOCK), None)
    ready = ops.end_ns[clock] if clock is not None else ops.start_ns[0]
    if len(marks) >= 2:
        bounds[:] = marks
    elif len(given) >= 2 and clock is not None and anchors:
        # Of the host's clocks, the one that the given times are near to is the one they were taken from.
        offsets = (ops.start_ns[clock] - anchor for anchor in anchors[0])
        offset = min(offsets, key=lambda o: abs(given[0] + o - ops.start_ns[clock]))
        bounds[:] = [max(b + offset, ready) for b in given]
    if len(bounds) < 2 or bounds[-1] <= bounds[0]:
        bursts = (t for t, name in zip(ops.start_ns, ops.name, strict=True) if name == BURST and t > ready)
        bounds[:] = [ready, min(bursts, default=max(ops.end_ns))]
        trace.notes.append("step bounds unknown: the whole traced window counts as one step")
