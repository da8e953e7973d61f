"""The device's own time in some steps: for how long any kernel ran, by Kineto, with nothing recorded of the host's operators.

Where the host's launches bound a step its time wanders with the host, by tens of per cent beside loader workers; what the kernels
take does not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled as profiler_enabled
from torch.autograd import profiler as autograd_profiler

from advisor.profiling.inside import kinetosession, rawevents
from advisor.profiling.trace.intervals import total, union

SYNCHRONISE = "cudaDeviceSynchronize"


class KernelTime:
    """`start` at a boundary, `boundary` at each one behind it, then `stop`; all in the thread that trains.

    Args:
        lasting: the process trains on afterwards, and is to pay nothing for it then.

    `why` says why nothing was seen, once that is so.
    """

    def __init__(self, device: torch.device, *, lasting: bool) -> None:
        self._device, self._lasting = device, lasting
        self._profile: autograd_profiler.profile | None = None
        self._thread: threading.Thread | None = None
        self._bounds_ns: list[int] = []
        self.why = ""

    def start(self) -> bool:
        """Whether anything is recorded from here on: not without a GPU, or beside a profiler of the script's own."""
        if self._device.type != "cuda" or profiler_enabled() or kinetosession.script_profiles():
            self.why = "another profiler runs" if self._device.type == "cuda" else "no GPU"
            return False
        try:
            profile = autograd_profiler.profile(use_cpu=False, use_device="cuda", use_kineto=True)
            torch.cuda.synchronize(self._device)
            kinetosession.teardown(wanted=self._lasting)
            with kinetosession.quiet_kineto():
                profile._prepare_trace()
            profile._start_trace()
        except Exception as error:
            self.why = f"the profiler did not start ({type(error).__name__}: {error})"
            return False
        self._profile, self._thread = profile, threading.current_thread()
        self._bounds_ns = [time.time_ns()]
        return True

    def boundary(self) -> None:
        """A step has ended. Waits for the device, so that its kernels lie before the next one's."""
        torch.cuda.synchronize(self._device)
        self._bounds_ns.append(time.time_ns())

    def stop(self) -> tuple[float, ...]:
        """Of each step, µs in which a kernel ran; empty where the profiler has seen none."""
        if self._profile is None:
            return ()
        self._profile.entered, self._profile = False, None
        if not profiler_enabled() or threading.current_thread() is not self._thread:
            self.why = "the profiler was ended by another, or the script now trains in another thread"
            return ()
        torch.cuda.synchronize(self._device)
        ended_ns = time.time_ns()
        events = kinetosession.end_profiler(self._device.type).events()
        index = self._device.index if self._device.index is not None else torch.cuda.current_device()
        spans, synchronised = _spans(events, index)
        # The trace's clock is the host's, or nearly: the last call that waited for the device has ended just now.
        offset = synchronised - ended_ns if synchronised else 0
        found = tuple(covered_us(spans, first + offset, last + offset) for first, last in pairwise(self._bounds_ns))
        if found and min(found) > 0:
            return found
        span = f"{spans[0][0]} to {spans[-1][1]}" if spans else "none"
        self.why = (
            f"{len(events)} records, {len(spans)} of kernels ({span}), none in some of the steps "
            f"({self._bounds_ns[0]} to {ended_ns}, the last wait ended at {synchronised})"
        )
        return ()


def _spans(events: Iterable[Any], index: int) -> tuple[list[tuple[int, int]], int]:
    """Start and end of each kernel on the device `index`, in order; and the end of the last call that waited for the device, 0 where none
    was seen. All in ns.
    """
    activity, spans, synchronised = None, [], 0
    for event in events:
        activity = activity or rawevents.activity_of(type(event))
        kind = activity(event)
        if kind == "kernel" and event.device_index() == index and event.end_ns() > event.start_ns() > 0:
            spans.append((event.start_ns(), event.end_ns()))
        elif kind == "cuda_runtime" and event.name() == SYNCHRONISE:
            synchronised = max(synchronised, event.end_ns())
    return sorted(spans), synchronised


def covered_us(spans: Sequence[tuple[int, int]], first: int, last: int) -> float:
    """For how long any of the spans that begin in the stretch from `first` to `last` ran, to their ends, µs; all in ns."""
    return total(union(span for span in spans if first <= span[0] < last)) / 1e3
