"""DRAM counter samples on the trace's clock.

CUPTI stamps samples with Kineto's clock in some versions and with a clock of the GPU in others (libcupti 13.0 on an H200:
2.1 units a nanosecond, from an origin of its own). So the window begins and ends with a burst of copies that Kineto has
records of and that the samples show as traffic with idle time around it. Two such points fix scale and offset; all else
that is known of the bursts and of the window must then agree, or the samples are not used.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.core.trace import DramSamples, Trace
from advisor.core.units import percent_text
from advisor.profiling.trace.intervals import Interval, clip, total, union

BURST = "advisor:burst"  # the host's range around each burst's launches
QUIET_SAMPLES = 3  # idle samples that set a burst apart
# Idle time around a burst: samples enough to be seen, and time enough for sampling to come up and for its last records to be out.
IDLE_SAMPLES, IDLE_S = 10, 0.005
BURST_SAMPLES = 8  # a burst's length, in sampling intervals: most of its samples lie wholly inside it
BUFFER_BYTES = 128 << 20
MAX_COPIES = 256
LEAST_FREE_BYTES = 2 << 30  # less free memory than this, and the buffers are kept small

QUIET_FRAC = 0.05  # of a burst's rate: less is idle (page tables, a copy from the host)
MINOR_FRAC = 0.05  # of a burst's bytes: less is no traffic of the training or of a burst
# Counted against copied bytes. The L2 cache may hold a part of a small buffer; another process may add to it.
READ_FRAC = (0.5, 1.25)
SCALE_TOLERANCE = 0.02  # mean of the sampling interval, mapped, against the one asked for
RESIDUAL_SAMPLES = 2.0  # a burst's edges, mapped, against Kineto's, in sampling intervals
EVEN_FRAC = 0.9  # of the samples must be usually long: a GPU clock that changes has no one scale
EVEN_TOLERANCE = 0.1  # of a sample's length
WORK_FRAC = 0.8  # of the bytes must lie beside device records of this process
SAME_CLOCK_NS = 1_000_000  # between samples and window; a clock of another origin is off by more than seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """Copies one after the other, with nothing else running: Kineto's times, and the bytes they read from memory."""

    start_ns: int
    end_ns: int
    read_bytes: int


def buffer_bytes(free: int, cache: int) -> int:
    """How large the buffers of a burst are, on a GPU with so much free memory and such a cache.

    Raises:
        MemoryError: too little free memory for buffers that do not fit into the L2 cache.
    """
    size = max(BUFFER_BYTES, 2 * cache)
    if free < LEAST_FREE_BYTES:
        size = min(size, free // 8)
    if size < max(cache, BUFFER_BYTES // 8):
        raise MemoryError(f"{free >> 20} MiB of GPU memory are free")
    return size


def copies_of(copy_ns: float, interval_ns: int) -> int:
    """How many copies a burst has, each of which takes so long."""
    return min(max(math.ceil(BURST_SAMPLES * interval_ns / max(copy_ns, 1.0)), 1), MAX_COPIES)


def idle_s(interval_ns: int) -> float:
    """How long the GPU is idle before and behind a burst."""
    return max(IDLE_SAMPLES * interval_ns / 1e9, IDLE_S)


class BurstSource:
    """Makes bursts on the current stream of one GPU. The buffers are allocated, and the copies timed, here.

    Args:
        device_index: CUDA ordinal.
        interval_ns: sampling interval; the bursts are several of them long.

    Raises:
        MemoryError: too little free memory for buffers that do not fit into the L2 cache.
    """

    def __init__(self, device_index: int, interval_ns: int) -> None:
        import torch

        self._idle_s = idle_s(interval_ns)
        self._device = torch.device("cuda", device_index)
        free, _ = torch.cuda.mem_get_info(self._device)
        cache = int(getattr(torch.cuda.get_device_properties(self._device), "L2_cache_size", 0))
        size = buffer_bytes(free, cache)
        self._source = torch.zeros(size, dtype=torch.uint8, device=self._device)
        self._target = torch.empty_like(self._source)
        self.copies = 4  # in a burst; first as many as outlast the host's part in timing them
        self._copy()  # the first copy may load code
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._copy()
            end.record()
            end.synchronize()
        self.copies = copies_of(begin.elapsed_time(end) * 1e6 / self.copies, interval_ns)

    @property
    def copy_bytes(self) -> int:
        """Bytes that one copy reads."""
        return int(self._source.numel())

    def fire(self) -> None:
        """The GPU has been idle, has copied, and is idle again. Takes milliseconds."""
        import torch
        from torch._C._profiler import _RecordFunctionFast

        torch.cuda.synchronize(self._device)
        time.sleep(self._idle_s)
        with _RecordFunctionFast(BURST):
            self._copy()
        torch.cuda.synchronize(self._device)
        time.sleep(self._idle_s)

    def _copy(self) -> None:
        for _ in range(self.copies):
            self._target.copy_(self._source)


def bursts_of(trace: Trace, copies: int, copy_bytes: int) -> list[Burst]:
    """The bursts in a trace, in order: the device records launched inside each range named BURST, where all are there."""
    ops, runtime, device = trace.ops, trace.runtime, trace.kernels
    ranges = sorted((a, b) for name, a, b in zip(ops.name, ops.start_ns, ops.end_ns, strict=True) if name == BURST)
    found = []
    for a, b in ranges:
        calls = {c for t, c in zip(runtime.start_ns, runtime.correlation, strict=True) if c and a <= t <= b}
        records = [i for i, c in enumerate(device.correlation) if c in calls]
        if len(records) == copies:  # CUPTI may lose some
            found.append(
                Burst(
                    start_ns=min(device.start_ns[i] for i in records),
                    end_ns=max(device.end_ns[i] for i in records),
                    read_bytes=copies * copy_bytes,
                )
            )
    return found


def align(
    samples: DramSamples,
    bursts: Sequence[Burst],
    *,
    interval_ns: int,
    window_ns: Interval,
    work: Sequence[Interval] = (),
) -> tuple[DramSamples, str]:
    """The samples on the clock of `bursts`, and "" or what a reader must know of them.

    Args:
        samples: on any clock, ordered by time.
        bursts: those at the window's two ends, on Kineto's clock. Fewer serve only samples that are on it already.
        interval_ns: the sampling interval asked for.
        window_ns: from before the first to after the last sample, on Kineto's clock.
        work: intervals in which the GPU worked, bursts included: what was mapped must lie there. Empty if unknown.

    Returns:
        Samples that are known to be aligned, or none: bytes are never laid over kernels by a clock that is in doubt.
    """
    if not samples.start_ns:
        return samples, ""
    try:
        aligned = _aligned(samples, bursts, interval_ns, window_ns, work)
    except _InDoubtError as error:
        return DramSamples(), f"counter clock could not be aligned: {error}"
    return aligned, ""


class _InDoubtError(Exception):
    """Why samples cannot be placed."""


@dataclass(frozen=True, slots=True)
class _Pulse:
    """A burst as the samples show it, in their units since the first sample."""

    centre: float
    length: float


@dataclass(frozen=True, slots=True)
class _Line:
    """Sample time → Kineto's. Differences are taken as whole numbers first: a float holds no nanoseconds since 1970."""

    zero: int  # units; the first sample
    reference: float  # units since `zero`
    at_ns: int  # Kineto's time of `reference`
    scale: float = 1.0  # ns per unit

    def __call__(self, since_zero: float) -> int:
        return self.at_ns + round((since_zero - self.reference) * self.scale)

    def residual_ns(self, pulse: _Pulse, burst: Burst) -> int:
        """The larger distance between the burst's edges here and there."""
        half = pulse.length / 2
        return max(abs(self(pulse.centre - half) - burst.start_ns), abs(self(pulse.centre + half) - burst.end_ns))


def _aligned(
    samples: DramSamples, bursts: Sequence[Burst], interval_ns: int, window_ns: Interval, work: Sequence[Interval]
) -> DramSamples:
    zero = samples.start_ns[0]
    same_clock = window_ns[0] - SAME_CLOCK_NS <= zero and samples.end_ns[-1] <= window_ns[1] + SAME_CLOCK_NS
    try:
        if len(bursts) < 2:
            raise _InDoubtError(f"{len(bursts)} of its 2 bursts of copies are in the trace")
        first, last = bursts[0], bursts[-1]
        begin, end = _pulses(samples, first, last, interval_ns)
        known = ((begin, first), (end, last))
        if same_clock and _worst_ns(_Line(zero, 0.0, zero), known) <= RESIDUAL_SAMPLES * interval_ns:
            return samples
        scale = (_centre(last) - _centre(first)) / (end.centre - begin.centre)
        line = _Line(zero, begin.centre, _centre(first), scale)
        _check_lengths(samples, scale, interval_ns)
        worst = _worst_ns(line, known)
        if worst > RESIDUAL_SAMPLES * interval_ns:
            raise _InDoubtError(f"the edge of a burst is {worst / 1e3:.1f} µs from where the profiler saw it")
        mapped = DramSamples(
            start_ns=[line(t - zero) for t in samples.start_ns],
            end_ns=[line(t - zero) for t in samples.end_ns],
            read_bytes=samples.read_bytes,
            write_bytes=samples.write_bytes,
        )
        if work:
            inside = share_inside(mapped, work, slack_ns=interval_ns)
            if inside < WORK_FRAC:
                raise _InDoubtError(f"only {percent_text(inside)} of the traffic lies beside work of this process")
        return mapped
    except _InDoubtError:
        if same_clock:
            return samples
        raise


def _centre(burst: Burst) -> int:
    return (burst.start_ns + burst.end_ns) // 2


def _worst_ns(line: _Line, known: Sequence[tuple[_Pulse, Burst]]) -> int:
    return max(line.residual_ns(pulse, burst) for pulse, burst in known)


def _check_lengths(samples: DramSamples, scale: float, interval_ns: int) -> None:
    lengths = [b - a for a, b in zip(samples.start_ns, samples.end_ns, strict=True)]
    usual = statistics.median(lengths)
    if abs(usual * scale / interval_ns - 1) > SCALE_TOLERANCE:
        raise _InDoubtError(f"by its bursts a sample takes {usual * scale:.0f} ns; expected {interval_ns} ns")
    even = sum(abs(length / usual - 1) <= EVEN_TOLERANCE for length in lengths) / len(lengths)
    if even < EVEN_FRAC:
        raise _InDoubtError(f"only {percent_text(even)} of the samples are equally long")


def _pulses(samples: DramSamples, first: Burst, last: Burst, interval_ns: int) -> tuple[_Pulse, _Pulse]:
    """The first and the last run of traffic, which must be the bursts."""
    rate = min(burst.read_bytes / (burst.end_ns - burst.start_ns) for burst in (first, last))
    runs = [
        (a, b)
        for a, b in _runs(samples, quiet_bytes=QUIET_FRAC * rate * interval_ns)
        if sum(samples.read_bytes[a : b + 1]) > MINOR_FRAC * min(first.read_bytes, last.read_bytes)
    ]
    if len(runs) < 2:
        raise _InDoubtError(f"the samples hold {len(runs)} runs of traffic; expected at least its 2 bursts")
    if len(samples.start_ns) - 1 - runs[-1][1] < QUIET_SAMPLES:
        raise _InDoubtError("the samples end in the middle of traffic")
    return _pulse(samples, runs[0], first), _pulse(samples, runs[-1], last)


def _runs(samples: DramSamples, quiet_bytes: float) -> list[tuple[int, int]]:
    """First and last sample of each run of traffic; runs are at least QUIET_SAMPLES quiet samples apart."""
    runs: list[tuple[int, int]] = []
    for i, (read, written) in enumerate(zip(samples.read_bytes, samples.write_bytes, strict=True)):
        if read + written <= quiet_bytes:
            continue
        if runs and i - runs[-1][1] <= QUIET_SAMPLES:
            runs[-1] = (runs[-1][0], i)
        else:
            runs.append((i, i))
    return runs


def _pulse(samples: DramSamples, run: tuple[int, int], burst: Burst) -> _Pulse:
    """Centre and length of a run by its reads, which the cache does not delay as it does writes.

    A copy reads at an even rate, so the middle half of its bytes takes the middle half of its time. That half lies in
    samples that the copy fills, and is known better than the edges.
    """
    reads = samples.read_bytes[run[0] : run[1] + 1]
    read = sum(reads)
    if not READ_FRAC[0] * burst.read_bytes <= read <= READ_FRAC[1] * burst.read_bytes:
        raise _InDoubtError(
            f"the run of traffic at the window's end has {read / 2**20:.0f} MiB of reads; its burst has "
            f"{burst.read_bytes / 2**20:.0f} MiB"
        )
    quarter, three = (_time_of(samples, run[0], part * read) for part in (0.25, 0.75))
    return _Pulse((quarter + three) / 2, 2 * (three - quarter))


def _time_of(samples: DramSamples, index: int, wanted: float) -> float:
    """When `wanted` bytes have been read since the beginning of sample `index`, in units since the first sample."""
    while wanted > samples.read_bytes[index]:
        wanted -= samples.read_bytes[index]
        index += 1
    start, end = samples.start_ns[index], samples.end_ns[index]
    return start - samples.start_ns[0] + (end - start) * wanted / samples.read_bytes[index]


def share_inside(samples: DramSamples, intervals: Sequence[Interval], *, slack_ns: int = 0) -> float:
    """Share of the samples' bytes inside `intervals`, each made longer by `slack_ns` at both ends; 0 without traffic.

    A sample's bytes count as spread evenly over its time.
    """
    covered = union((a - slack_ns, b + slack_ns) for a, b in intervals)
    inside = everything = 0.0
    for start, end, read, written in zip(
        samples.start_ns, samples.end_ns, samples.read_bytes, samples.write_bytes, strict=True
    ):
        everything += read + written
        inside += (read + written) * total(clip(covered, start, end)) / (end - start)
    return inside / everything if everything else 0.0
