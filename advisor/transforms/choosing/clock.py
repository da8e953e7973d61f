"""Times of several ways by turns, each in a thread of its own for cuDNN's plans.

PyTorch keeps the plan of a convolution's first call for the life of the thread, under a key that cudnn.benchmark is no part of
(aten/src/ATen/native/cudnn/Conv_v8.cpp). So what is searched for and what goes by heuristics are each timed in a thread of their own.

On a GPU the time is the device's own. A row's launches queue up behind a kernel that does nothing for as long as the host needs for them:
short products would all take the host's time else, and what a search finds would not show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

ROUNDS, ROW = 4, 3  # rows of calls a way, by turns; calls a row
CYCLES_A_US = 2000  # of an SM, at its fastest: a slower clock waits longer
FIRST_HOST_US = 150.0  # for a row, before it is known
HEADROOM, MOST_TRIES = 2.0, 4  # of the host's time for a row; rows until the device had work all the while
Work = Callable[[], Any]


class Clock:
    """Times work on a device. Its threads are there until `close`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._threads: dict[bool | None, ThreadPoolExecutor] = {}

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def run(self, search: bool | None, work: Work) -> Any:
        """What `work` returns, made in the thread of such ways, on the stream of the caller."""
        if self.device.type != "cuda":
            return work()
        if search not in self._threads:
            self._threads[search] = ThreadPoolExecutor(1, thread_name_prefix="advisor-convolutions")
        stream = torch.cuda.current_stream(self.device)

        def there() -> Any:
            with torch.cuda.stream(stream), torch.no_grad():
                return work()

        return self._threads[search].submit(there).result()

    def row_us(self, search: bool | None, work: Work) -> float:
        """Microseconds of one call, of a row of them."""
        return float(self.run(search, lambda: self._row(work)))

    def _row(self, work: Work) -> float:
        if self.device.type == "cuda":
            return device_us(work, ROW)
        start = time.perf_counter()
        for _ in range(ROW):
            work()
        return (time.perf_counter() - start) / ROW * 1e6

    def close(self) -> None:
        """End the threads."""
        for pool in self._threads.values():
            pool.shutdown()
        self._threads.clear()


def device_us(work: Work, calls: int) -> float:
    """Microseconds of device time a call, of a row of so many on the current stream."""
    ahead_us = HEADROOM * FIRST_HOST_US
    for _ in range(MOST_TRIES):
        took_us, host_us, hidden = _padded(work, calls, ahead_us)
        if hidden:
            break
        ahead_us = HEADROOM * max(host_us, ahead_us)
    return took_us / calls


def _padded(work: Work, calls: int, ahead_us: float) -> tuple[float, float, bool]:
    """Microseconds of a row on the device and on the host, and whether the device began it only after the host was done."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(ahead_us * CYCLES_A_US))
    started = time.perf_counter()
    begin.record()
    for _ in range(calls):
        work()
    hidden = not begin.query()
    end.record()
    host_us = (time.perf_counter() - started) * 1e6
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3, host_us, hidden


def by_turns(clock: Clock, work: Mapping[str, tuple[bool | None, Work]], until: float) -> dict[str, tuple[float, ...]]:
    """Way → its times; rounds end where the time is over, each way's times as many as the others'."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(ROUNDS):
        for name, (search, call) in work.items():
            found[name].append(clock.row_us(search, call))
        if clock.now() >= until:
            break
    return {name: tuple(times) for name, times in found.items()}
