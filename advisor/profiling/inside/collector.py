"""The traced window: a Kineto session with annotations and DRAM counters, read as raw events into a `Trace`.

Raw Kineto events only: `prof.events()` builds Python objects and a tree for each event and takes seconds for tens of
thousands. What a version of torch does not offer on its events is left empty, with a note where a reader would miss it.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._C._autograd import DeviceType, _disable_profiler, _profiler_enabled
from torch._C._profiler import _ExperimentalConfig, _RecordFunctionFast
from torch.autograd import profiler as autograd_profiler

from advisor.core.trace import DeviceTable, OpTable, RuntimeTable, Trace
from advisor.loop import graphs, heap
from advisor.loop.session import Session
from advisor.loop.training import Training
from advisor.profiling.inside.annotate import Annotator
from advisor.profiling.machine.clock import BURST
from advisor.profiling.trace.hostcalls import is_launch
from advisor.profiling.trace.kinds import VIEWS

TRACED_SLOWDOWN = 2.0  # a step that is bound by the host may take twice its time under the profiler
CLOCK = "advisor:clock"  # a range whose host time is known on every clock: ties the trace's clock to the host's
# Above this many events the slow sources (a chrome trace for launch geometry, the event tree for strides) are left out.
# Reading them, with shapes, takes 4 s and 1 GB in the script's own process: a window is shortened to stay below.
DETAIL_LIMIT = 200_000
# Events of a step to each range that annotations open in it: its operators, their backward and what they are made of. 5 to 12
# in a residual network on a CPU with SGD and Adam, with foreach and without. A device adds launches and kernels: allowed for.
EVENTS_PER_RANGE, DEVICE_EVENTS_PER_RANGE = 12, 20

_GRID = re.compile(r'"grid": ?\[(\d+), ?(\d+), ?(\d+)\]')
_BLOCK = re.compile(r'"block": ?\[(\d+), ?(\d+), ?(\d+)\]')
_MOVED = re.compile(r'"bytes": ?(\d+)')
_DEVICE_ACTIVITIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_HOST_ACTIVITIES = frozenset({"cpu_op", "user_annotation"})
_RUNTIME_ACTIVITIES = frozenset({"cuda_runtime", "cuda_driver"})
_RUNTIME_NAME = re.compile(r"^cu(da)?[A-Z]\w+$")
# Kineto reads its log level when it is set up first; above all its levels it prints nothing into the script's stderr.
_KINETO_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "99"
# Kineto takes CUPTI down after a trace only when this is "1"; otherwise each launch goes on costing host time (docs/notes/profiling.md).
_TEARDOWN = "TEARDOWN_CUPTI"
TEARDOWN_LEAST_S, TEARDOWN_MOST_S = 0.02, 0.5  # for which the end of a trace waits for that
_ARGUMENTS_OF = re.compile(r"conv|pool|upsample|_to_copy|^aten::(to|sum|mean|amax|amin|var|std|cat|norm|linalg|new_)")


@contextlib.contextmanager
def quiet_kineto() -> Iterator[None]:
    """Kineto is silent if it is set up in here, unless the user has asked for its log."""
    if _KINETO_LEVEL in os.environ:
        yield
        return
    os.environ[_KINETO_LEVEL] = _SILENT
    try:
        yield
    finally:
        os.environ.pop(_KINETO_LEVEL, None)


def choose_teardown(ours: str, *, wanted: bool) -> str:
    """Kineto takes CUPTI down after the coming trace where that is `wanted`, and not beside captured graphs.

    Taken down and set up again beside captured graphs CUPTI has crashed (pytorch#112507); there few launches are left to cost
    anything. What the user, or torch, has set stays.

    Args:
        ours: what an earlier call returned; empty before the first.

    Returns:
        What is set now, or empty where it is not ours. It has to stay set: Kineto reads it at the next trace's start as well.
    """
    if os.environ.get(_TEARDOWN, "") != ours:
        return ""
    ours = os.environ[_TEARDOWN] = "1" if wanted and not graphs.alive() else "0"
    return ours


_chosen_teardown = ""  # of this process, as chosen for the latest trace


def teardown(*, wanted: bool) -> None:
    """As `choose_teardown`, before each trace of this process."""
    global _chosen_teardown
    _chosen_teardown = choose_teardown(_chosen_teardown, wanted=wanted)


def end_profiler(device: str) -> Any:
    """End the profiler; the process may end at any time afterwards. Returns torch's `_ProfilerResult`."""
    with contextlib.suppress(Exception):  # tells torch's own hooks; not in every version
        autograd_profiler._run_on_profiler_stop()
    threads = _threads()
    results = _disable_profiler()
    if device == "cuda" and os.environ.get(_TEARDOWN) == "1":
        _see_cupti_down(threads)
    return results


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
        self._cuda = _cuda_usable(device)
        self._annotator = Annotator(training.models if training is not None else (), training)
        self._profile: autograd_profiler.profile | None = None
        self._thread: threading.Thread | None = None  # in which it was started, and alone can be stopped
        self._anchors: list[tuple[int, int]] = []  # (CLOCK_REALTIME, perf_counter) at the mark of `start`, in ns
        self._dram: Any = None
        if self._cuda and session.counters:
            # Made here and not in `start`: enabling the counters takes a moment that belongs to no step.
            # The window has one step more than is wanted, the one that its start disturbs.
            self._dram = self._open_counters(device, TRACED_SLOWDOWN * (session.detail_steps + 1) * step_s or 1.0)

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
        _set_bounds(trace, bounds, self._anchors)
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

    def _open_counters(self, device: torch.device, window_s: float) -> Any:
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


def script_profiles() -> bool:
    """Whether a torch profiler of the script's is prepared or running.

    Torch has one session. Preparing another ends it, starting one that was prepared before ours raises, and ending ours would end theirs;
    that theirs is prepared, as a schedule does some steps ahead, torch itself does not tell.
    """
    profiles = heap.living(heap.classes(autograd_profiler.profile))
    return any(getattr(found, "entered", False) and found.kineto_results is None for found in profiles)


def _threads() -> int:
    """How many threads this process has; 0 where /proc does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


def _see_cupti_down(threads: int) -> None:
    """Call CUDA until Kineto has taken CUPTI down, which a thread beyond these `threads` does inside the calls that follow.

    A process that came to its end before would hang there for good, in the C library's exit handlers.
    """
    began = time.monotonic()
    while (waited := time.monotonic() - began) < TEARDOWN_MOST_S:
        torch.cuda.current_stream().query()
        time.sleep(0.001)
        if waited > TEARDOWN_LEAST_S and 0 < _threads() <= threads:
            return


def _cuda_usable(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()


def _experimental_config() -> Any:
    wanted: dict[str, Any] = {"expose_kineto_event_metadata": True}  # launch geometry and copied bytes; torch >= 2.10
    try:
        return _ExperimentalConfig(**wanted)
    except TypeError:
        return _ExperimentalConfig()


def _set_bounds(trace: Trace, given: list[int], anchors: list[tuple[int, int]]) -> None:
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


def read_events(results: Any, device: str, *, notes: list[str] | None = None) -> Trace:
    """A Trace from Kineto's raw events (`_ProfilerResult` of torch), with empty step bounds and no DRAM samples.

    Records whose start or duration is zero where it cannot be are dropped and counted in a note
    (CUPTI of CUDA 12.6 to 13.0 loses time stamps so: pytorch#192021).
    """
    notes = notes if notes is not None else []
    collecting = gc.isenabled()
    gc.disable()  # hundreds of thousands of new objects, none of them garbage: looking through them doubles the time
    try:
        events = results.events()
        reader = _Reader(events)
        for event in events:
            reader.take(event)
    finally:
        if collecting:
            gc.enable()
    detail = len(events) <= DETAIL_LIMIT
    if detail and not reader.has_strides:
        with contextlib.suppress(Exception):
            _strides_from_tree(results, reader.ops)
    if detail and reader.device.name and not any(reader.device.grid):
        _geometry_from_export(results, reader.device)
    if reader.dropped:
        notes.append(f"{reader.dropped} trace records without a time stamp were dropped")
    launches, matched = _coverage(reader.runtime, reader.device)
    if device == "cuda" and not reader.device.name:
        notes.append(
            "the profiler delivered no device records although the step runs on a GPU: another profiler or the "
            "driver holds CUPTI; kernels and idle time are unknown"
        )
    return Trace(
        device=device,
        step_bounds_ns=[],
        ops=reader.ops,
        runtime=reader.runtime,
        kernels=reader.device,
        launches=launches,
        launches_matched=matched,
        notes=notes,
    )


def _coverage(runtime: RuntimeTable, device: DeviceTable) -> tuple[int, int]:
    seen = set(device.correlation)
    launched = [c for name, c in zip(runtime.name, runtime.correlation, strict=True) if is_launch(name)]
    return len(launched), sum(c in seen for c in launched)


class _Reader:
    """Sorts raw events into the three tables. Texts are shared: a million events have a few thousand different ones."""

    def __init__(self, events: list[Any]) -> None:
        kind: Any = type(events[0]) if events else None
        self.ops, self.runtime, self.device = OpTable(), RuntimeTable(), DeviceTable()
        self.dropped = 0
        self.has_strides = offers(kind, "structured_input_strides")
        self._has_metadata = offers(kind, "metadata_json")
        self._shapes: Any = kind and (kind.structured_input_shapes if self.has_strides else kind.shapes)
        self._activity: Any = kind and activity_of(kind)
        self._texts: dict[str, str] = {}
        self._threads: dict[int, int] = {}  # operating system's thread id → torch's

    def take(self, event: Any) -> None:
        activity = self._activity(event)
        if activity in _HOST_ACTIVITIES:
            self._take_host(event, activity)
        elif activity in _DEVICE_ACTIVITIES:
            self._take_device(event)
        elif activity in _RUNTIME_ACTIVITIES:
            self._take_runtime(event)

    def _share(self, text: str) -> str:
        return self._texts.setdefault(text, text)

    def _take_host(self, event: Any, activity: str) -> None:
        start, end = event.start_ns(), event.end_ns()
        if start <= 0 or end < start:
            self.dropped += 1
            return
        name, thread, ops = event.name(), event.start_thread_id(), self.ops
        if name.startswith("profiler::"):
            return  # the opening and closing of `record_function`, not work
        self._threads.setdefault(event.device_resource_id(), thread)
        annotation = ""
        if name.startswith("advisor:"):
            annotation = name[len("advisor:") :]
        elif activity == "user_annotation":
            annotation = f"user:{name}"
        shapes = dtypes = strides = arguments = ""
        if not annotation and "::" in name and name not in VIEWS:
            given = self._shapes(event)
            if given:
                shapes, dtypes = str(given), ",".join(event.dtypes())
                if self.has_strides:
                    strides = str(event.structured_input_strides())
                if _ARGUMENTS_OF.search(name):
                    arguments = _arguments(event)
        share = self._share
        ops.name.append(share(name))
        ops.start_ns.append(start)
        ops.end_ns.append(end)
        ops.thread.append(thread)
        ops.correlation.append(event.correlation_id())
        ops.sequence.append(event.sequence_nr())
        ops.forward_thread.append(event.fwd_thread_id())
        ops.annotation.append(share(annotation))
        ops.shapes.append(share(shapes))
        ops.dtypes.append(share(dtypes))
        ops.strides.append(share(strides))
        ops.flops.append(0)  # modelled later, from the shapes
        ops.arguments.append(share(arguments))

    def _take_runtime(self, event: Any) -> None:
        start, end = event.start_ns(), event.end_ns()
        if start <= 0 or end < start:
            self.dropped += 1
            return
        runtime = self.runtime
        # Torch gives a call that belongs to no operator the thread that stopped the profiler; the system's thread id,
        # where an operator has been seen on that thread, knows better.
        thread = event.start_thread_id()
        if not event.linked_correlation_id():
            thread = self._threads.get(event.device_resource_id(), thread)
        runtime.name.append(self._share(event.name()))
        runtime.start_ns.append(start)
        runtime.end_ns.append(end)
        runtime.thread.append(thread)
        runtime.correlation.append(event.correlation_id())

    def _take_device(self, event: Any) -> None:
        start, end = event.start_ns(), event.end_ns()
        if start <= 0 or end <= start:
            self.dropped += 1
            return
        device = self.device
        grid = block = ""
        nbytes = 0
        if self._has_metadata:
            metadata = event.metadata_json()
            grid, block = _triple(_GRID, metadata), _triple(_BLOCK, metadata)
            moved = _MOVED.search(metadata)
            nbytes = int(moved.group(1)) if moved else 0
        device.name.append(self._share(event.name()))
        device.start_ns.append(start)
        device.end_ns.append(end)
        device.stream.append(event.device_resource_id())
        device.correlation.append(event.correlation_id())
        device.op.append(event.linked_correlation_id())
        device.grid.append(self._share(grid))
        device.block.append(self._share(block))
        device.nbytes.append(nbytes)
        device.device.append(event.device_index())


def _triple(pattern: re.Pattern[str], text: str) -> str:
    found = pattern.search(text)
    return "x".join(found.groups()) if found else ""


def _arguments(event: Any) -> str:
    try:
        return json.dumps(
            [v if isinstance(v, (int, float, bool, list, type(None))) else None for v in event.concrete_inputs()]
        )
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return ""


def offers(kind: Any, name: str) -> bool:
    """True when raw events of this version of torch have the method."""
    return callable(getattr(kind, name, None))


def activity_of(kind: Any) -> Callable[[Any], str]:
    """What tells the activity of raw events of this kind."""
    return _named_activity if offers(kind, "activity_type") else _guessed_activity


def _named_activity(event: Any) -> str:
    return str(event.activity_type())


def _guessed_activity(event: Any) -> str:
    """The activity by device, annotation flag and name (torch before 2.12)."""
    name = event.name()
    if event.device_type() != DeviceType.CPU:
        if event.is_user_annotation():
            return "gpu_user_annotation"
        return "gpu_memcpy" if name.startswith("Memcpy") else "gpu_memset" if name.startswith("Memset") else "kernel"
    if _RUNTIME_NAME.match(name):
        return "cuda_runtime"
    if not event.correlation_id() or name.startswith("["):
        return "overhead"  # CUPTI's own ("Command Buffer Full"); allocations ("[memory]")
    return "user_annotation" if event.is_user_annotation() else "cpu_op"


def _strides_from_tree(results: Any, ops: OpTable) -> None:
    """Fill strides, and the shapes of lists of tensors, from the profiler's event tree (torch before 2.12)."""
    rows = {c: i for i, c in enumerate(ops.correlation) if ops.shapes[i]}
    stack = list(results.experimental_event_tree())
    while stack:
        node = stack.pop()
        stack.extend(node.children)
        index = rows.get(node.correlation_id)
        inputs = getattr(node.extra_fields, "inputs", None) if index is not None else None
        if index is None or inputs is None or node.name != ops.name[index]:
            continue
        ops.shapes[index] = str([_of_tensors(value, "sizes") for value in inputs])
        ops.strides[index] = str([_of_tensors(value, "strides") for value in inputs])


def _of_tensors(value: Any, attribute: str) -> list[Any]:
    if isinstance(value, (list, tuple)):
        return [list(getattr(v, attribute)) for v in value if hasattr(v, attribute)]
    return list(getattr(value, attribute, ()))


def _geometry_from_export(results: Any, device: DeviceTable) -> None:
    """Fill grid, block and copied bytes from a chrome trace (torch before 2.10, whose events do not carry them)."""
    handle, path = tempfile.mkstemp(suffix=".json")
    os.close(handle)
    try:
        results.save(path)
        with open(path, encoding="utf-8", errors="replace") as stream:
            exported = json.load(stream)["traceEvents"]
    except (OSError, ValueError, RuntimeError, LookupError, TypeError):
        return  # launch geometry stays unknown
    finally:
        with contextlib.suppress(OSError):
            os.unlink(path)
    rows: dict[int, list[int]] = {}
    for i, correlation in enumerate(device.correlation):
        rows.setdefault(correlation, []).append(i)
    for event in exported:
        if event.get("cat") not in _DEVICE_ACTIVITIES:
            continue
        fields = event.get("args", {})
        for i in rows.get(fields.get("correlation", -1), ()):
            if device.name[i] == event.get("name"):
                device.grid[i] = "x".join(map(str, fields.get("grid", ())))
                device.block[i] = "x".join(map(str, fields.get("block", ())))
                device.nbytes[i] = int(fields.get("bytes", 0))
