"""Kineto's raw events, read into the tables of a Trace."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import tempfile
from collections.abc import Callable
from typing import Any

from torch._C._autograd import DeviceType

from advisor.core.trace import DeviceTable, OpTable, RuntimeTable, Trace
from advisor.profiling.trace.hostcalls import is_launch
from advisor.profiling.trace.kinds import VIEWS

# Above this many events the slow sources (a chrome trace for launch geometry, the event tree for strides) are left out.
# Reading them, with shapes, takes 4 s and 1 GB in the script's own process: a window is shortened to stay below.
DETAIL_LIMIT = 200_000


_GRID = re.compile(r'"grid": ?\[(\d+), ?(\d+), ?(\d+)\]')


_BLOCK = re.compile(r'"block": ?\[(\d+), ?(\d+), ?(\d+)\]')


_MOVED = re.compile(r'"bytes": ?(\d+)')


_DEVICE_ACTIVITIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})


_HOST_ACTIVITIES = frozenset({"cpu_op", "user_annotation"})


_RUNTIME_ACTIVITIES = frozenset({"cuda_runtime", "cuda_driver"})


_RUNTIME_NAME = re.compile(r"^cu(da)?[A-Z]\w+$")


_ARGUMENTS_OF = re.compile(r"conv|pool|upsample|_to_copy|^aten::(to|sum|mean|amax|amin|var|std|cat|norm|linalg|new_)")


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
