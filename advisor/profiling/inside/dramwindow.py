"""DRAM traffic of the traced window: counters and the bursts that tie their clock to the trace's."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from typing import Any

from advisor.core.trace import DramSamples, Trace
from advisor.profiling.machine.clock import BurstSource, align, bursts_of
from advisor.profiling.machine.counters import DramCounters
from advisor.profiling.trace.intervals import union

TRACED_SLOWDOWN = 2.0  # a step that is bound by the host may take twice its time under the profiler


class DramWindow:
    """Opened before the window, because enabling the counters takes a moment; `start` and `stop` take milliseconds.

    Args:
        device_index: CUDA ordinal in this process.
        window_s: about how long the window will last.
        bursts: makes the source of bursts, of the ordinal and the sampling interval; PyTorch's, unless another is given.

    Raises:
        CountersUnavailable: see DramCounters.
    """

    def __init__(
        self, device_index: int, *, window_s: float = 1.0, bursts: Callable[[int, int], Any] = BurstSource
    ) -> None:
        self.notes: list[str] = []
        self._counters = DramCounters(device_index, window_s=window_s)
        self._bursts: Any = None
        self._no_bursts = ""  # why there are none
        self._copies = (0, 0)  # in a burst; bytes of each
        self._window_ns = (0, 0)
        self._samples = DramSamples()
        try:
            self._bursts = bursts(device_index, self._counters.interval_ns)
            self._copies = (self._bursts.copies, self._bursts.copy_bytes)
        except Exception as error:  # memory, above all; CUPTI's clock may be the trace's without bursts
            self._no_bursts = f" ({error})"

    def start(self) -> None:
        """The profiler being on: counting, and the first burst is over.

        Raises:
            CountersUnavailable: CUPTI refused.
        """
        self._window_ns = (time.time_ns(), 0)
        self._counters.start()
        self._burst()

    def stop(self) -> None:
        """The profiler being on still: the last burst is over, the counters and the buffers are free.

        Raises:
            CountersUnavailable: CUPTI refused.
        """
        try:
            self._burst()
            self._samples = self._counters.stop()
            self._window_ns = (self._window_ns[0], time.time_ns())
            if self._counters.note:
                self.notes.append(f"DRAM counters: {self._counters.note}")
        finally:
            self.close()

    def close(self) -> None:
        """Counters and buffers are free. May be called twice; never raises."""
        self._bursts = None
        with contextlib.suppress(Exception):
            self._counters.close()

    def laid_over(self, trace: Trace) -> Trace:
        """The trace with the samples on its clock; without samples, and with a note, when their clock is in doubt."""
        dram, note = align(
            self._samples,
            bursts_of(trace, *self._copies),
            interval_ns=self._counters.interval_ns,
            window_ns=self._window_ns,
            work=union(zip(trace.kernels.start_ns, trace.kernels.end_ns, strict=True)),
        )
        if note:
            trace.notes.append(f"no DRAM bytes per kernel: {note}{self._no_bursts}")
        return dataclasses.replace(trace, dram=dram)

    def _burst(self) -> None:
        if self._bursts is None:
            return
        try:
            self._bursts.fire()
        except Exception as error:
            self._bursts, self._no_bursts = None, f" ({error})"
