"""Fair GPU timing of several contenders: interleaved, CUDA events, inputs rotated past L2, medians with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch

from advisor.core.profile import Spread

Inputs = TypeVar("Inputs")

# Enough rounds for a median that two runs agree on within a per cent on an idle H200, in about 50 ms a contender and shape.
ROUNDS = 25
WARMUP_ROUNDS = 3
LEAST_ROUNDS = 7  # a median with quartiles of a sort, where the time budget ends earlier
PAD_BYTES = (
    4 << 30
)  # about a millisecond of writes; a forward or backward of one operation is launched in a third of that


def rotation(nbytes: int) -> int:
    """How many input sets keep a repeated run from finding its inputs in L2 (four times the L2 in all, 2 to 16 sets)."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(16, -(-4 * l2 // max(nbytes, 1))))


def interleaved(
    contenders: Mapping[str, Callable[[Inputs], object]],
    sets: Sequence[Inputs],
    *,
    rounds: int = ROUNDS,
    budget_s: float = float("inf"),
) -> dict[str, Spread]:
    """Time each contender `rounds` times in milliseconds, one after the other within a round.

    Past `budget_s` seconds it ends with the round, though not before `LEAST_ROUNDS`.

    The GPU is kept busy ahead of each timed call for longer than the host needs to launch it, so that this is device time.
    What the launches cost the host is a second number: `host`.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    pad = torch.empty(PAD_BYTES, dtype=torch.uint8, device="cuda")
    started = time.monotonic()
    for number in range(WARMUP_ROUNDS + rounds):
        if number >= WARMUP_ROUNDS + LEAST_ROUNDS and time.monotonic() - started > budget_s:
            break
        for name, run in contenders.items():
            inputs = sets[number % len(sets)]
            begin, end = _event(), _event()
            pad.zero_()  # the launches below queue up behind it, and it drives everything out of L2
            begin.record()
            run(inputs)
            end.record()
            end.synchronize()
            if number >= WARMUP_ROUNDS:
                times[name].append(begin.elapsed_time(end))
    return {name: spread(values) for name, values in times.items()}


def host(contenders: Mapping[str, Callable[[Inputs], object]], sets: Sequence[Inputs]) -> dict[str, float]:
    """Host microseconds that a call takes until it returns, the median of calls that never wait for the device."""
    found: dict[str, float] = {}
    for name, run in contenders.items():
        times = []
        for number in range(ROUNDS):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run(sets[number % len(sets)])
            times.append((time.perf_counter() - begin) * 1e6)
        found[name] = statistics.median(times)
    return found


def spread(values: Sequence[float]) -> Spread:
    """Median, tenth and ninetieth percentile."""
    deciles = statistics.quantiles(values, n=10)
    return Spread(median=statistics.median(values), p10=deciles[0], p90=deciles[-1], n=len(values))


def copy_gbps() -> float:
    """Device-to-device copy bandwidth, read plus written, of 1 GiB buffers: the byte ceiling of the same run."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda").random_()
    sets = [(source, torch.empty_like(source))]
    found = interleaved({"copy": lambda pair: pair[1].copy_(pair[0])}, sets, rounds=15)
    return 2 * source.numel() / found["copy"].median / 1e6


def matrix_tflops(dtype: torch.dtype) -> float:
    """Rate of a large square matrix product in this dtype, strict fp32 for float32: the ceiling of the same run."""
    size = 8192 if dtype != torch.float32 else 4096
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        found = interleaved({"product": lambda pair: pair[0] @ pair[1]}, [(a, b)], rounds=10)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return float(2 * size**3 / found["product"].median / 1e9)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
