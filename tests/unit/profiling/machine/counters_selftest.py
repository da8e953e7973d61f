"""Proof of the DRAM counters on the GPU at hand: known traffic against counted traffic, clocks, and what counting costs.

A program, which test_counters.py runs in a process of its own: `python counters_selftest.py [CUDA ordinal]`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable

from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.trace import DramSamples
from advisor.loop.session import Session
from advisor.profiling.beside.sampler import Sampler, summarise
from advisor.profiling.inside.collector import TraceCollector
from advisor.profiling.machine.clock import BURST, share_inside
from advisor.profiling.machine.counters import DramCounters

COPY_BYTES = 4 << 30
LONG_WINDOW_S = 2.0
TOLERANCE = 0.05  # counted against expected bytes; refresh and page tables stay well below
ALIGNED = 0.95  # share of the copy's traffic that must fall inside Kineto's interval for it
BESIDE_NS = 3_000_000  # of the idle time beside the copy, less than the distance to the window's bursts


def run(device_index: int) -> int:
    """Print each comparison; returns 0 when bytes and clocks agree, 5 without counters, 4 when they disagree."""
    import torch

    if not torch.cuda.is_available():
        print("no CUDA GPU")
        return int(ExitCode.GPU_REQUIRED)
    torch.cuda.set_device(device_index)
    free, _ = torch.cuda.mem_get_info()
    size = min(COPY_BYTES, free // 4)
    source = torch.ones(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    began = time.perf_counter()
    try:
        counters = DramCounters(device_index)
    except AdvisorError as error:
        print(f"unavailable: {error}")
        return int(ExitCode.GPU_REQUIRED)
    library = counters.library
    print(f"libcupti {library.version} at {library.path}; enabled in {time.perf_counter() - began:.2f} s")
    beside = Sampler(gpu=str(getattr(torch.cuda.get_device_properties(device_index), "uuid", "")) or None)
    beside.start()  # NVML's GPM reads performance monitors too: both must work at the same time
    with counters:
        agree = _known_copy(counters, lambda: target.copy_(source), size)
        _cost(counters)
    agree &= _aligned_with_kineto(device_index, lambda: target.copy_(source), size)
    agree &= _long_window(device_index, lambda: target.copy_(source), size)
    closed_ns = time.time_ns()
    _hammer(lambda: target.copy_(source))
    recording = beside.stop()
    for when, window in (("while counting", (0, closed_ns)), ("copying, not counting", (closed_ns, time.time_ns()))):
        seen = summarise(recording, *window)
        for name in ("dram_active_frac", "sm_active_frac", "gpu_busy_nvml_frac", "power_w", "clock_frac", "gpu_shared"):
            value = seen[name].value
            print(f"NVML {when}: {name} {'missing' if value is None else f'{value:.3f}'} ({seen[name].reason})")
    print("PASS" if agree else "FAIL")
    return int(ExitCode.OK if agree else ExitCode.INCONCLUSIVE)


def _hammer(copy: Callable[[], object]) -> None:
    """A second of copies, for the sampler to see."""
    import torch

    until = time.perf_counter() + 1.0
    while time.perf_counter() < until:
        copy()
        torch.cuda.synchronize()


def _long_window(device_index: int, copy: Callable[[], object], size: int) -> bool:
    """Two seconds of copies at the shortest interval: the hardware buffer must hold them."""
    import torch

    copies = 8
    free_before = torch.cuda.mem_get_info()[0]
    with DramCounters(device_index, window_s=LONG_WINDOW_S) as counters:
        taken = free_before - torch.cuda.mem_get_info()[0]
        _, seconds = _window(counters, lambda: [copy() for _ in range(copies)])
        copies = max(1, int(copies * LONG_WINDOW_S / seconds))
        began = time.perf_counter()
        samples, seconds = _window(counters, lambda: [copy() for _ in range(copies)])
        reading = time.perf_counter() - began - seconds
    share = _total(samples) / (2 * size * copies)
    good = abs(share - 1) < TOLERANCE
    print(
        f"long window: {len(samples.start_ns)} samples at {counters.interval_ns} ns over {seconds:.2f} s, x{share:.4f} of the "
        f"expected bytes, read in {reading:.2f} s, {taken >> 20} MiB of device memory {'ok' if good else 'WRONG'} {counters.note}"
    )
    return good


def _total(samples: DramSamples) -> float:
    return sum(samples.read_bytes) + sum(samples.write_bytes)


def _window(counters: DramCounters, work: Callable[[], object]) -> tuple[DramSamples, float]:
    """Samples over `work` with a little idle time on both sides, and the seconds it took."""
    import torch

    torch.cuda.synchronize()
    counters.start()
    began = time.perf_counter()
    time.sleep(0.005)
    work()
    torch.cuda.synchronize()
    time.sleep(0.005)
    seconds = time.perf_counter() - began
    return counters.stop(), seconds


def _known_copy(counters: DramCounters, copy: Callable[[], object], size: int) -> bool:
    agree = True
    for attempt in range(3):
        samples, seconds = _window(counters, copy)
        read, write = sum(samples.read_bytes) / size, sum(samples.write_bytes) / size
        good = abs(read - 1) < TOLERANCE and abs(write - 1) < TOLERANCE
        agree &= good
        print(
            f"copy {attempt}: {size / 2**30:.2f} GiB expected each way, read x{read:.4f}, written x{write:.4f}, "
            f"{len(samples.start_ns)} samples in {seconds * 1e3:.1f} ms {'ok' if good else 'WRONG'} {counters.note}"
        )
    return agree


def _aligned_with_kineto(device_index: int, copy: Callable[[], object], size: int) -> bool:
    """A copy in a traced window: its bytes must lie in its record's time, by the clock that the window's bursts give."""
    import torch

    collector = TraceCollector(
        torch.device("cuda", device_index), Session(mode="profile", run_dir="", script="", detail_steps=1)
    )
    collector.start()
    time.sleep(0.005)
    begun = time.time_ns()
    copy()
    torch.cuda.synchronize()
    ended = time.time_ns()
    time.sleep(0.005)
    trace = collector.stop([begun, ended])
    for note in trace.notes:
        print(f"clocks: {note}")
    bursts = [t for name, t in zip(trace.ops.name, trace.ops.start_ns, strict=True) if name == BURST]
    records = list(zip(trace.kernels.start_ns, trace.kernels.end_ns, strict=True))
    print(f"clocks: {len(bursts)} bursts, {len(records)} device records, {len(trace.dram.start_ns)} samples placed")
    if not records or not trace.dram.start_ns:
        return False
    begin, end = max(records, key=lambda record: record[1] - record[0])
    samples = _between(trace.dram, begin - BESIDE_NS, end + BESIDE_NS)
    step = samples.end_ns[0] - samples.start_ns[0] if samples.start_ns else 0
    share = share_inside(samples, [(begin, end)], slack_ns=step)
    busy = [
        t for t, read in zip(samples.start_ns, samples.read_bytes, strict=True) if read > max(samples.read_bytes) / 2
    ]
    counted = _total(samples) / (2 * size)
    good = share > ALIGNED and abs(counted - 1) < TOLERANCE
    print(
        f"clocks: x{counted:.4f} of the copy's bytes, {share:.4f} of them inside Kineto's interval ({(end - begin) / 1e3:.0f} us) "
        f"± {step / 1e3:.1f} us; first busy sample {(busy[0] - begin) / 1e3 if busy else math.nan:+.1f} us from its start "
        f"{'ok' if good else 'WRONG'}"
    )
    return good


def _between(samples: DramSamples, begin: int, end: int) -> DramSamples:
    kept = [i for i, t in enumerate(samples.start_ns) if begin <= t < end]
    columns = {f.name: [getattr(samples, f.name)[i] for i in kept] for f in dataclasses.fields(samples)}
    return DramSamples(**columns)


def _cost(counters: DramCounters) -> None:
    """Median step of a small convolutional net with sampling off and on, alternating."""
    import torch

    net = torch.nn.Sequential(
        *(
            layer
            for _ in range(8)
            for layer in (torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU())
        )
    ).cuda()
    images = torch.randn(64, 64, 56, 56, device="cuda")

    def step() -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        net(images).sum().backward()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    for _ in range(10):
        step()
    off, on, decode = [], [], []
    for _ in range(5):
        off += [step() for _ in range(10)]
        counters.start()
        on += [step() for _ in range(10)]
        began = time.perf_counter()
        samples = counters.stop()
        decode.append((time.perf_counter() - began) / max(len(samples.start_ns), 1))
    ratio = statistics.median(on) / statistics.median(off)
    print(
        f"cost: step {statistics.median(off):.3f} ms off, {statistics.median(on):.3f} ms on (x{ratio:.4f}, n={len(on)}); "
        f"reading {statistics.median(decode) * 1e6:.1f} us a sample"
    )


if __name__ == "__main__":
    sys.exit(run(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
