"""How fast this machine copies and multiplies, and whether something disturbed it meanwhile.

Copies and dense matrix products of random data, medians of several runs. Random data matters: with zeros a GPU draws less
power and clocks higher than in training. Measured beside other work a rate is too low, and a step then seems nearer to its limit than it
is: what was disturbed is measured again, and what stays so is in doubt.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from advisor.core import architectures
from advisor.core.units import percent_text
from advisor.profiling.machine import hostload, nvml

if TYPE_CHECKING:
    import torch

Kinds = Sequence[tuple[str, "torch.dtype", str]]  # dtype class, type, precision of fp32 products or ""
Clock = Callable[[Callable[[], object]], float]  # runs the work and returns the seconds it took

GPU_COPY_BYTES = 1 << 30  # far above any L2
CPU_COPY_BYTES = 256 << 20  # far above any last-level cache
GPU_MATRIX = 8192
CPU_MATRIX = 1024
REPEATS = 7
LEAST_S = 0.02  # per rate: short runs are repeated for this long, so that clocks have settled
BUDGET_S = 0.4  # per rate; a slow device gets fewer repeats
ATTEMPTS = 3  # as load comes and goes
PAUSE_S = 0.5  # before the next attempt
PATIENCE_S = 2.0  # none is begun after that: on a machine that stays busy one is enough
# Of the cores, taken by others: what is left is not the machine. An idle Linux desktop takes 1 to 5 %.
OTHERS_FRAC = 0.15
# By how much the middle half of a rate's runs may differ. Where others compute on the same cores they differ by their time slices.
APART_FRAC = 0.25
BUSY_FRAC = 0.1  # of the time before it was measured, in which a GPU already ran kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """`copy_gbps` counts bytes read and written, `matrix_tflops` is by dtype class. `doubt` says what disturbed them, or ""."""

    copy_gbps: float
    matrix_tflops: dict[str, float]
    doubt: str = ""


@dataclass(slots=True)
class Runs:
    """Times of the runs of each rate, by what the rate is of."""

    seconds: dict[str, list[float]] = field(default_factory=dict)

    def apart(self) -> dict[str, float]:
        """By how much the middle half of each rate's runs differ, a share of their median; of two runs and more."""
        found = {}
        for name, times in self.seconds.items():
            if len(times) > 1:
                low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
                found[name] = (high - low) / max(middle, 1e-9)
        return found


def of_cpu() -> Rates:
    """Rates of this machine's cores, as many as PyTorch uses."""
    import torch

    kinds = [("fp32", torch.float32, ""), ("bf16", torch.bfloat16, ""), ("fp16", torch.float16, "")]
    return _undisturbed(lambda: _cpu(torch.device("cpu"), kinds))


def of_gpu(device: torch.device, arch: int, reader: nvml.GpuReader | None, *, shared: bool) -> Rates:
    """Rates of a GPU. `shared`: another process holds memory on it."""
    import torch

    kinds = [("fp32", torch.float32, "highest")]
    if arch >= architectures.FP16:
        kinds.append(("fp16", torch.float16, "highest"))
    if arch >= architectures.BF16:
        kinds += [("tf32", torch.float32, "high"), ("bf16", torch.bfloat16, "highest")]
    if shared:
        return rates(device, kinds, _events, lambda runs: "another process was on the GPU")
    busy = _busy_before(reader)
    return _undisturbed(lambda: _gpu(device, kinds, reader, busy))


def _busy_before(reader: nvml.GpuReader | None) -> float:
    """The share of the last moment in which the GPU ran something, before any work of ours; the least of a few readings."""
    readings = []
    for attempt in range(ATTEMPTS if reader is not None else 0):
        if attempt:
            time.sleep(PAUSE_S)
        readings.append(reader.read(frozenset({"busy"})).get("busy", 0.0) if reader is not None else 0.0)
        if readings[-1] <= BUSY_FRAC:
            break
    return min(readings, default=0.0)


def _undisturbed(measure: Callable[[], Rates]) -> Rates:
    """The first attempt that nothing disturbed, or the last one."""
    began = time.monotonic()
    for attempt in range(ATTEMPTS):
        if attempt:
            time.sleep(PAUSE_S)
        found = measure()
        if not found.doubt or time.monotonic() - began > PATIENCE_S:
            break
    return found


def _cpu(device: torch.device, kinds: Kinds) -> Rates:
    began = (time.perf_counter(), time.process_time(), hostload.busy_seconds())

    def disturbance(runs: Runs) -> str:
        ended = (time.perf_counter(), time.process_time(), hostload.busy_seconds())
        if began[2] is None or ended[2] is None:
            return disturbed(runs.apart())
        others = (ended[2] - began[2]) - (ended[1] - began[1])
        return disturbed(runs.apart(), others_frac=others / max(ended[0] - began[0], 1e-9) / hostload.cpu_count())

    return rates(device, kinds, wall, disturbance)


def _gpu(device: torch.device, kinds: Kinds, reader: nvml.GpuReader | None, busy_frac: float) -> Rates:
    def disturbance(runs: Runs) -> str:
        reasons = reader.read(frozenset({"clock_reasons"})).get("clock_reasons", 0.0) if reader is not None else 0.0
        return disturbed(runs.apart(), busy_frac=busy_frac, throttled=bool(int(reasons) & nvml.THROTTLED))

    return rates(device, kinds, _events, disturbance)


def disturbed(
    apart: Mapping[str, float], *, others_frac: float = 0.0, busy_frac: float = 0.0, throttled: bool = False
) -> str:
    """What makes rates doubtful, or "": `apart` as of `Runs`, the cores' share that others took, the GPU's work before, its clocks."""
    if others_frac > OTHERS_FRAC:
        return f"other processes took {percent_text(others_frac)} of the cores"
    if busy_frac > BUSY_FRAC:
        return f"the GPU was already busy {percent_text(busy_frac)} of the time"
    if throttled:
        return "the GPU throttled"
    worst = max(apart, key=lambda name: apart[name], default="")
    if worst and apart[worst] > APART_FRAC:
        return f"runs of the same work ({worst}) took times {percent_text(apart[worst])} apart"
    return ""


def rates(
    device: torch.device,
    kinds: Kinds,
    clock: Clock,
    disturbance: Callable[[Runs], str],
) -> Rates:
    import torch

    runs, products = Runs(), {}
    nbytes = CPU_COPY_BYTES
    if device.type == "cuda":
        nbytes = min(GPU_COPY_BYTES, torch.cuda.mem_get_info(device)[0] // 4)
    for name, dtype, precision in kinds:
        if precision:
            torch.set_float32_matmul_precision(precision)
        # A torch may have no products of this type on a CPU; on a GPU an error is of the device.
        with contextlib.suppress(*(() if device.type == "cuda" else (RuntimeError,))):
            products[name], runs.seconds[f"{name} products"] = measure_matrix(dtype, device, clock)
    copy, runs.seconds["copies"] = measure_copy(nbytes, device, clock)
    return Rates(copy_gbps=copy, matrix_tflops=products, doubt=disturbance(runs))


def measure_copy(nbytes: int, device: torch.device, clock: Clock) -> tuple[float, list[float]]:
    """Bytes read plus bytes written per second of a copy within the device's memory, in GB/s, and the runs' seconds."""
    import torch

    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = _seconds(lambda: target.copy_(source), clock)
    return 2 * nbytes / statistics.median(times) / 1e9, times


def measure_matrix(dtype: torch.dtype, device: torch.device, clock: Clock) -> tuple[float, list[float]]:
    """Rate of an n × n × n product: the device's full size, halved until one product fits into the budget; and the runs' seconds."""
    import torch

    size = 512 if device.type == "cuda" else 128
    largest = GPU_MATRIX if device.type == "cuda" else CPU_MATRIX
    while True:
        factors = [torch.randn(size, size, device=device).to(dtype) for _ in range(2)]
        product = functools.partial(torch.mm, *factors)
        once = statistics.median(_seconds(product, clock, budget_s=0.0))
        if size >= largest or once * 8 > BUDGET_S:  # the next size would take eight times as long
            times = _seconds(product, clock)
            return 2 * size**3 / statistics.median(times) / 1e12, times
        size *= 2


def _seconds(work: Callable[[], object], clock: Clock, budget_s: float = BUDGET_S) -> list[float]:
    """Times of `work` after one warm-up: at least REPEATS runs over LEAST_S, but no more once over the budget."""
    work()
    times = [max(clock(work), 1e-9)]
    while sum(times) < budget_s and (len(times) < REPEATS or sum(times) < LEAST_S):
        times.append(max(clock(work), 1e-9))
    return times


def wall(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _events(work: Callable[[], object]) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
