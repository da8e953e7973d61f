"""Bursts of copies by CuPy, which tie the clock of the DRAM counters to the trace's: as `machine.clock.BurstSource` makes them by PyTorch."""

from __future__ import annotations

import time
from typing import Any

from advisor.profiling.machine.clock import buffer_bytes, copies_of, idle_s

DEVICE_TO_DEVICE = 3  # cudaMemcpyKind
SLACK_S = 2e-4  # around the copies' launches: CUPTI's clock and the host's are a few microseconds apart


class CupyBursts:
    """Copies on the null stream of the current GPU; buffers from a pool of their own. Its `ranges` are the host's, around each burst's launches,
    in ns of CLOCK_REALTIME.

    Raises:
        MemoryError: too little free memory for buffers that do not fit into the L2 cache.
    """

    def __init__(self, module: Any, device_index: int, interval_ns: int) -> None:
        self._runtime, self._idle_s = module.cuda.runtime, idle_s(interval_ns)
        cache = int(self._runtime.getDeviceProperties(device_index)["l2CacheSize"])
        self.copy_bytes = buffer_bytes(int(self._runtime.memGetInfo()[0]), cache)
        pool = module.cuda.MemoryPool()
        self._buffers = [pool.malloc(self.copy_bytes) for _ in range(2)]
        self.ranges: list[tuple[int, int]] = []
        self.copies = 4
        self._copy()  # the first may load code
        self._runtime.deviceSynchronize()
        begin, end = module.cuda.Event(), module.cuda.Event()
        begin.record()
        self._copy()
        end.record()
        end.synchronize()
        self.copies = copies_of(module.cuda.get_elapsed_time(begin, end) * 1e6 / self.copies, interval_ns)

    def fire(self) -> None:
        """The GPU has been idle, has copied, and is idle again. Takes milliseconds."""
        self._runtime.deviceSynchronize()
        time.sleep(self._idle_s)
        began = time.time_ns()
        time.sleep(SLACK_S)
        self._copy()
        time.sleep(SLACK_S)
        self.ranges.append((began, time.time_ns()))
        self._runtime.deviceSynchronize()
        time.sleep(self._idle_s)

    def _copy(self) -> None:
        source, target = self._buffers
        for _ in range(self.copies):
            self._runtime.memcpyAsync(target.ptr, source.ptr, self.copy_bytes, DEVICE_TO_DEVICE, 0)
