"""The traced window of a CuPy loop: each call of the surface with its line, arrays and dtypes, and what the device did, as a `Trace`."""

from __future__ import annotations

import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from advisor.core.errors import first_line
from advisor.core.trace import DeviceTable, OpTable, RuntimeTable, Trace
from advisor.cupy_loops.bursts import CupyBursts
from advisor.cupy_loops.clock import synchronize
from advisor.cupy_loops.facts import requests
from advisor.loop.patches import Patches
from advisor.loop.sources import Lines
from advisor.profiling.inside.cupy_surface import Surface
from advisor.profiling.inside.dramwindow import DramWindow
from advisor.profiling.machine.activity import Activity, ActivityUnavailable
from advisor.profiling.machine.clock import BURST
from advisor.profiling.trace.cupy_names import DTYPES, PREFIX, torch_name
from advisor.profiling.trace.hostcalls import is_launch


class Window:
    """From `start` to `stop`. Raises for nothing: `notes` says what could not be had."""

    def __init__(
        self,
        module: Any,
        activity: Callable[[], Any] = Activity,
        counters: Callable[..., Any] | None = DramWindow,
        window_s: float = 1.0,
    ) -> None:
        self.module, self.notes = module, []
        self._patches = Patches()
        self._lines = Lines()
        self._calls: list[tuple[str, int, int, str, str, str]] = []  # name, start, end, line, shapes, dtypes
        self._activity: Any = None
        self.memory = requests(module)  # counts what is asked of the memory pool; None where it cannot
        if hasattr(module, "cuda"):
            try:
                self._activity = activity()
            except ActivityUnavailable as error:
                self.notes.append(f"no records of the device: {error.found}")
        self._bursts: list[CupyBursts] = []
        self._dram: Any = None
        if self._activity is not None and counters is not None:
            try:
                index = int(module.cuda.runtime.getDevice())
                self._dram = counters(index, window_s=window_s, bursts=functools.partial(self._burst_source, module))
            except Exception as error:
                self._give_up_counters(error)

    def _burst_source(self, module: Any, index: int, interval_ns: int) -> CupyBursts:
        self._bursts.append(CupyBursts(module, index, interval_ns))
        return self._bursts[-1]

    def _give_up_counters(self, error: Exception) -> None:
        self.notes.append(f"DRAM counters unavailable: {first_line(error)}")
        window, self._dram = self._dram, None
        if window is not None:
            window.close()

    def start(self) -> None:
        """Calls and the device's work are recorded from here on."""
        synchronize(self.module)
        if self._activity is not None:
            try:
                self._activity.start()
            except ActivityUnavailable as error:
                self._activity = None
                self.notes.append(f"no records of the device: {error.found}")
        if self._dram is not None:
            try:
                self._dram.start()
            except Exception as error:
                self._give_up_counters(error)
        Surface(self.module, self._seen, self._patches).patch()
        if self.memory is not None:
            self.memory.__enter__()
            self._patches.undo(lambda: self.memory.__exit__(None, None, None))

    @property
    def events(self) -> int:
        """How many calls were seen so far."""
        return len(self._calls)

    def stop(self, bounds_ns: Sequence[int]) -> Trace:
        """The window is over.

        Args:
            bounds_ns: the n+1 boundaries of the n traced steps, by `time.perf_counter_ns`.
        """
        if self._patches.fault is not None:
            self.notes.append(f"the calls of the window were not all seen: {self._patches.fault}")
        self._patches.restore_all()
        synchronize(self.module)
        if self._dram is not None:
            try:
                self._dram.stop()
            except Exception as error:
                self._give_up_counters(error)
        # Both clocks at one moment: the bounds go to that of the calls.
        offset = time.time_ns() - time.perf_counter_ns()
        runtime, kernels = RuntimeTable(), DeviceTable()
        if self._activity is not None:
            try:
                runtime, kernels = self._activity.stop()
            except ActivityUnavailable as error:
                self.notes.append(f"no records of the device: {error.found}")
        thread = threading.get_ident() & 0xFFFFFFFF  # as CUPTI tells threads
        ops = _table(self._calls, thread)
        for span in (span for source in self._bursts for span in source.ranges):
            _row(ops, BURST, span, thread, 0, "", "", "")
        launches = [link for name, link in zip(runtime.name, runtime.correlation, strict=True) if is_launch(name)]
        known = set(kernels.correlation)
        trace = Trace(
            device="cuda" if hasattr(self.module, "cuda") else "cpu",
            step_bounds_ns=[bound + offset for bound in bounds_ns],
            ops=ops,
            runtime=runtime,
            kernels=kernels,
            launches=len(launches),
            launches_matched=sum(link in known for link in launches),
            notes=[*self.notes, *(self._dram.notes if self._dram is not None else ())],
        )
        if self._dram is None:
            return trace
        try:
            return self._dram.laid_over(trace)  # type: ignore[no-any-return]  # a Trace, by `counters`
        except Exception as error:
            trace.notes.append(f"DRAM counters unavailable: {first_line(error)}")
            return trace

    def _seen(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        line = self._lines.users(sys._getframe(2))
        shapes, dtypes = described(self.module, name, args)
        began = time.time_ns()
        try:
            return plain(*args, **kwargs)
        finally:
            self._calls.append((name, began, time.time_ns(), line, shapes, dtypes))


def described(module: Any, name: str, args: Sequence[Any]) -> tuple[str, str]:
    """Shapes (JSON text) and dtypes of a call's arguments, as a profiler of torch's writes them. A product's are those of its matrices."""
    array = module.ndarray
    shapes: list[Any] = []
    kinds: list[str] = []
    for value in args:
        if isinstance(value, array):
            shapes.append(list(value.shape))
            kinds.append(DTYPES.get(str(value.dtype), str(value.dtype)))
        elif isinstance(value, (list, tuple)) and value and isinstance(value[0], array):
            shapes.append([list(item.shape) for item in value if isinstance(item, array)])
            kinds.append("TensorList")
        else:
            shapes.append([])
            kinds.append("Scalar" if isinstance(value, (bool, int, float)) else "")
    if torch_name(PREFIX + name) == "aten::mm" and name != "einsum" and len(shapes) > 1 and shapes[0] and shapes[1]:
        shapes[:2] = _matrices(name, shapes[0], shapes[1], args[2] if len(args) > 2 else 2)
    return json.dumps(shapes), ",".join(kinds)


def _matrices(name: str, left: list[int], right: list[int], axes: Any) -> list[list[int]]:
    """The two matrices that a product multiplies: m x k and k x n."""
    summed = _summed(name, left, right, axes)
    m, n, k = 1, 1, 1
    for i, size in enumerate(left):
        if i % len(left) in summed[0]:
            k *= size
        else:
            m *= size
    for i, size in enumerate(right):
        n *= 1 if i in summed[1] else size
    return [[m, k], [k, n]]


def _summed(name: str, left: list[int], right: list[int], axes: Any) -> tuple[set[int], set[int]]:
    if name == "outer":
        return set(), set()
    if name != "tensordot":
        return {len(left) - 1}, {max(0, len(right) - 2)}
    if isinstance(axes, int):
        return set(range(len(left) - axes, len(left))), set(range(axes))
    first, second = ((a,) if isinstance(a, int) else tuple(a) for a in axes)
    return {a % len(left) for a in first}, {b % len(right) for b in second}


def _table(calls: Sequence[tuple[str, int, int, str, str, str]], thread: int) -> OpTable:
    """An annotation of the line around each call, which is the operator."""
    ops = OpTable()
    for i, (name, start, end, line, shapes, dtypes) in enumerate(calls):
        if line:
            _row(ops, "advisor:line:" + line, (start, end), thread, 0, "line:" + line, "", "")
        _row(ops, PREFIX + name, (start, end), thread, i + 1, "", shapes, dtypes)
    return ops


def _row(
    ops: OpTable, name: str, span: tuple[int, int], thread: int, link: int, mark: str, shapes: str, dtypes: str
) -> None:
    ops.name.append(name)
    start, end = span
    ops.start_ns.append(start)
    ops.end_ns.append(end)
    ops.thread.append(thread)
    ops.correlation.append(link)
    ops.sequence.append(-1)
    ops.forward_thread.append(0)
    ops.annotation.append(mark)
    ops.shapes.append(shapes)
    ops.dtypes.append(dtypes)
    ops.strides.append("")
    ops.flops.append(0)
    ops.arguments.append("")
