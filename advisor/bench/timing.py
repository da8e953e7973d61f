"""Fair GPU timing of several contenders: interleaved, CUDA events, inputs rotated past L2, medians with their spread.

A contender is timed in a row of its own calls, as a training runs one kernel behind the other: the device never waits for the host
between them, and a call in front of the row leaves the L2 cache as each of them does. One call between two events, behind memory that
something else has written, takes 2 to 9 us more of the H200 (docs/notes/kernels/how-kernels-are-measured.md#rows-of-calls).
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from advisor.core.profile import Spread

Inputs = TypeVar("Inputs")

# Enough rounds for a median that two runs agree on within a per cent on an idle H200, in about 50 ms a contender and shape.
ROUNDS = 25
WARMUP_ROUNDS = 3
HOST_ROUNDS = 20  # of a row of calls each; a host's times are further apart than a device's
LEAST_ROUNDS = 7  # a median with quartiles of a sort, where the time budget ends earlier
# Calls between two events: as many as take this long together, so that the events' own microseconds do not count.
ROW_MS = 0.3
MOST_CALLS = 8
PAD_BYTES = 4 << 30  # about a millisecond of writes
# Of the host's time for a row of calls, when first measured: the device is kept busy for as much as that ahead of the row.
HEADROOM = 2.0
MOST_PADS = 32
MOST_SETS = 64


def rotation(nbytes: int) -> int:
    """How many input sets keep a repeated run from finding its inputs in L2 (four times the L2 in all, 2 to 64 sets)."""
    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, min(MOST_SETS, -(-4 * l2 // max(nbytes, 1))))


def make_pad() -> torch.Tensor:
    """What is written to keep the device busy ahead of a row."""
    return torch.empty(PAD_BYTES, dtype=torch.uint8, device="cuda")


@dataclass(slots=True)
class TimedRow(Generic[Inputs]):
    """One contender's calls, and what it takes to time them.

    Attributes:
        lasting_ms: of device time that the calls together are to take.
        most_calls: in a row, however short they are.
        calls: in a row, between the two events.
        pads: of PAD_BYTES, ahead of the row.
        begun: calls until now.
    """

    run: Callable[[Inputs], object]
    sets: Sequence[Inputs]
    lasting_ms: float = ROW_MS
    most_calls: int = MOST_CALLS
    calls: int = 1
    pads: int = 1
    begun: int = 0

    def call(self) -> None:
        """One call, on the next set of inputs."""
        self.run(self.sets[self.begun % len(self.sets)])
        self.begun += 1

    def time(self, pad: torch.Tensor) -> tuple[float, float, bool]:
        """Milliseconds of device and of host time a call, and whether the device had work all the while."""
        begin, end = event(), event()
        for _ in range(self.pads):
            pad.zero_()  # the launches below queue up behind it
        started = time.perf_counter()
        self.call()
        begin.record()
        for _ in range(self.calls):
            self.call()
        hidden = not begin.query()
        end.record()
        host_ms = (time.perf_counter() - started) * 1e3
        end.synchronize()
        return begin.elapsed_time(end) / self.calls, host_ms / (self.calls + 1), hidden

    def settle(self, pad: torch.Tensor) -> None:
        """Choose the row's length and its pads, by calls that have been made before."""
        _, host_ms, _ = self.time(pad)
        self._hide(host_ms)
        device_ms, host_ms, _ = self.time(pad)
        self.calls = max(1, min(self.most_calls, math.ceil(self.lasting_ms / max(device_ms, 1e-6))))
        self._hide(host_ms)

    def pad_more(self) -> bool:
        """Twice the pads, for a row whose host was slower than they are; False where there are as many as may be."""
        if self.pads >= MOST_PADS:
            return False
        self.pads *= 2
        return True

    def _hide(self, host_ms: float) -> None:
        self.pads = max(1, min(MOST_PADS, math.ceil(HEADROOM * host_ms * (self.calls + 1))))


def interleaved(
    contenders: Mapping[str, Callable[[Inputs], object]],
    sets: Sequence[Inputs],
    *,
    rounds: int = ROUNDS,
    budget_s: float = float("inf"),
) -> dict[str, Spread]:
    """Time each contender `rounds` times in milliseconds a call, one contender after the other within a round.

    Past `budget_s` seconds it ends with the round, though not before `LEAST_ROUNDS`.

    The GPU is kept busy ahead of each timed row for longer than the host needs to launch it, so that this is device time; a row for
    which that was not so is timed again behind a longer pad. What the launches cost the host is a second number: `host`.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    rows = {name: TimedRow(run, sets) for name, run in contenders.items()}
    pad = make_pad()
    started = time.monotonic()
    for number in range(WARMUP_ROUNDS + rounds):
        if number >= WARMUP_ROUNDS + LEAST_ROUNDS and time.monotonic() - started > budget_s:
            break
        for name, row in rows.items():
            if number == 1:  # the first call of all has compiled
                row.settle(pad)
            device_ms, _, hidden = row.time(pad)
            while not hidden and number and row.pad_more():
                device_ms, _, hidden = row.time(pad)
            if number >= WARMUP_ROUNDS:
                times[name].append(device_ms)
    return {name: spread(values) for name, values in times.items()}


def host(
    contenders: Mapping[str, Callable[[], object]],
    *,
    calls: int = 1,
    warmup: int = 0,
    rounds: int = HOST_ROUNDS,
    before: Callable[[], object] = lambda: None,
) -> dict[str, Spread]:
    """Host microseconds a call until the last of `calls` has returned, which each run makes in a row; runs by turns, which never wait for the device.

    `before` each run, untimed. The first `warmup` rounds do not count.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(warmup + rounds):
        for name, run in contenders.items():
            before()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            taken = time.perf_counter() - begin
            if number >= warmup:
                times[name].append(taken / calls * 1e6)
    return {name: spread(values) for name, values in times.items()}


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


def event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
