"""What share of each hardware unit's peak a pass uses, counted by the GPU's performance monitors: `advisor bench ops --counters`.

A pass is counted as it is timed, in a row of its own calls behind a pad, with no kernel replayed or held apart from the next
(docs/notes/kernels/how-kernels-are-measured.md#what-holds-a-kernel-counted-in-rows).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from types import TracebackType
from typing import TypeVar

import torch

from advisor.bench import timing
from advisor.core.errors import AdvisorError
from advisor.core.units import percent_text
from advisor.profiling.machine.clock import IDLE_S, QUIET_SAMPLES, SCALE_TOLERANCE
from advisor.profiling.machine.pmsampling import PmSampler, Samples, fitting

Inputs = TypeVar("Inputs")

# A row as long as this has about 150 samples. The device takes a thousand launches ahead of their time: a call has several.
COUNTED_MS = 3.0
MOST_CALLS = 100
LEAST_SAMPLES = 20
CAPACITY = 6000  # 120 ms: a row with the longest pad before it, and idle time at both ends
BUSY_PERCENT = 1.0  # of the SMs' time: less is an idle device
SUFFIX = ".avg.pct_of_peak_sustained_elapsed"  # of what the unit can do in the sample's time, in per cent
BUSY = f"sm__cycles_active{SUFFIX}"


@dataclass(frozen=True, slots=True)
class Unit:
    """What is counted: its name for people, and the metric, or those of which the first that the GPU can count is taken."""

    label: str
    metrics: tuple[str, ...]


# Units that do work: the share of the most that they could do. Metrics that are updated as work runs, not when a warp ends, come first;
# with them all of these fit into the one pass that sampling has, on GH100.
THROUGHPUT = {
    "memory": Unit("memory", ("dram__throughput",)),
    "l2": Unit("L2", ("lts__t_sectors",)),
    "l1": Unit("L1", ("l1tex__data_pipe_lsu_wavefronts",)),  # loads, stores and shared memory
    "issue": Unit("issue", ("sm__inst_executed_realtime", "sm__issue_active")),
    "alu": Unit("ALU", ("sm__inst_executed_pipe_alu_realtime", "sm__pipe_alu_cycles_active")),
    "tensor": Unit("tensor", ("sm__pipe_tensor_cycles_active_realtime", "sm__pipe_tensor_cycles_active")),
    "special": Unit("special", ("sm__inst_executed_pipe_xu_realtime", "sm__inst_executed_pipe_xu")),
}
# What they have to work on: the share of time in which an SM has a warp, and of the warps that it can hold.
OCCUPANCY = {
    "sms": Unit("SMs", ("sm__cycles_active",)),
    "warps": Unit("warps", ("sm__warps_active_realtime", "sm__warps_active")),
}
UNITS = THROUGHPUT | OCCUPANCY
SHOWN = 3  # busiest units in a text


class NotCounted(AdvisorError):
    """A row's samples cannot be told from others, or there are too few; the text says why."""


class UnitCounters:
    """The counters of this process's GPU, which slow nothing down and keep other profilers out until `close`.

    Raises:
        CountersUnavailable: no library, no permission, no such counters, or another profiler holds them.
    """

    def __init__(self, device_index: int = 0) -> None:
        self._sampler = PmSampler(device_index, capacity=CAPACITY)
        try:
            wanted = [tuple(metric + SUFFIX for metric in unit.metrics) for unit in UNITS.values()]
            self._sampler.open(fitting(self._sampler, wanted, beside=BUSY))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """The counters are free for others. May be called twice; never raises."""
        self._sampler.close()

    def __enter__(self) -> UnitCounters:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def shares(self, run: Callable[[Inputs], object], sets: Sequence[Inputs]) -> dict[str, float]:
        """Unit → share of its peak (0 to 1) while `run` is called behind itself over the inputs in `sets`.

        A unit that this GPU does not count beside the others is missing.

        Raises:
            NotCounted: the row could not be found in the samples.
            CountersUnavailable: CUPTI refused.
        """
        pad = timing.make_pad()
        row = timing.TimedRow(run, sets, lasting_ms=COUNTED_MS, most_calls=MOST_CALLS)
        row.call()  # the first call of all may compile
        row.settle(pad)
        percent = self._means(row, pad)
        return {
            name: round(percent[metric + SUFFIX] / 100, 3)
            for name, unit in UNITS.items()
            for metric in unit.metrics
            if metric + SUFFIX in percent
        }

    def _means(self, row: timing.TimedRow[Inputs], pad: torch.Tensor) -> dict[str, float]:
        """Metric → its mean over a row, in per cent."""
        samples, row_ms, hidden = self._sampled(row, pad)
        while not hidden and row.pad_more():
            samples, row_ms, hidden = self._sampled(row, pad)
        if not hidden:
            raise NotCounted("the device waited for the host")
        if self._sampler.overflowed or self._sampler.outgrown:
            raise NotCounted("samples were lost")
        chosen = inside(samples, row_ms * 1e6, self._sampler.interval_ns)
        means = {name: fmean(values[i] for i in chosen) for name, values in samples.values.items()}
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}

    def _sampled(self, row: timing.TimedRow[Inputs], pad: torch.Tensor) -> tuple[Samples, float, bool]:
        """Samples of a row with the pad before it and idle time behind, its milliseconds, and whether it had no gaps."""
        self._sampler.start()
        try:
            time.sleep(IDLE_S)  # until sampling is up: a row may be over by then
            call_ms, _, hidden = row.time(pad)
            time.sleep(IDLE_S)
        finally:
            samples = self._sampler.stop()
        return samples, call_ms * row.calls, hidden


def inside(samples: Samples, row_ns: float, interval_ns: int) -> list[int]:
    """The samples that lie wholly inside a row that took `row_ns` and behind which the device was idle, by index.

    The last sample in which SMs had work ends the row, give or take that sample. The row began `row_ns` before; time before that is
    the pad's. An interval at either end is left out, and at the beginning as much as time stamps may be off in scale.

    Args:
        samples: in units of CUPTI's choice, which may not be nanoseconds: the row's own samples, `interval_ns` long each, tell.
        row_ns: between the events around the row.
        interval_ns: the sampling interval asked for.

    Raises:
        NotCounted: the row's end is not among the samples, or fewer than LEAST_SAMPLES lie inside.
    """
    busy = [i for i, percent in enumerate(samples.values[BUSY]) if percent > BUSY_PERCENT]
    if not busy:
        raise NotCounted(f"none of {len(samples.end)} samples shows an SM at work")
    last = busy[-1]
    if len(samples.end) - 1 - last < QUIET_SAMPLES:
        raise NotCounted("the samples end before the row does")
    own = range(max(0, last - math.ceil(row_ns / interval_ns)), last + 1)
    interval = median(samples.end[i] - samples.start[i] for i in own)
    length = row_ns / interval_ns * interval
    # Whole numbers: a float holds no nanoseconds since 1970.
    end = samples.end[last] - math.ceil(interval)
    begin = samples.end[last] - math.floor(length * (1 - SCALE_TOLERANCE) - interval)
    found = [i for i in own if begin <= samples.start[i] and samples.end[i] <= end]
    if len(found) < LEAST_SAMPLES:
        raise NotCounted(f"{len(found)} samples lie inside a row of {row_ns / 1e3:.0f} µs", expected=f"{LEAST_SAMPLES}")
    return found


def text(shares: Mapping[str, float]) -> str:
    """`L1 88 %, issue 74 %, memory 71 %; SMs 97 %, warps 48 %`: the busiest units, then what they have to work on."""
    busiest = sorted((name for name in THROUGHPUT if name in shares), key=lambda name: -shares[name])[:SHOWN]
    parts = [
        ", ".join(f"{UNITS[name].label} {percent_text(shares[name])}" for name in names)
        for names in (busiest, [name for name in OCCUPANCY if name in shares])
    ]
    return "; ".join(part for part in parts if part)
