"""Device memory over a stretch of steps, from the caching allocator's own statistics; nothing is reset."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from advisor.core.profile import MemoryStats
from advisor.profiling.patches import Patches

# What torch.cuda.empty_cache and torch.accelerator.empty_cache call, however the script has imported them; the first is
# not in CPU builds.
_EMPTY_CACHE = ("_cuda_emptyCache", "_accelerator_emptyCache")


LEAST_STEPS = 3  # for which what comes behind an evaluation tells what a step does


class MemoryProbe:
    """Counts from its construction on. Reading costs tenths of a millisecond: not inside a timed step.

    With `patches` it also counts the calls that give the allocator's free blocks back to the driver.
    """

    def __init__(self, device: torch.device, patches: Patches | None = None) -> None:
        self._device = device
        self._emptied: int | None = None
        if patches is not None:
            self._emptied = 0
            for name in _EMPTY_CACHE:
                if plain := getattr(torch._C, name, None):
                    patches.replace(torch._C, name, self._counting(plain))
        self._start = self._read()
        self._anew = (0, self._start, 0)  # steps by then, statistics, calls of empty_cache

    def begin_anew(self, steps: int) -> None:
        """What came before, `steps` steps since the construction, held something else too: an evaluation takes memory of its own."""
        self._anew = (steps, self._read(), self._emptied or 0)

    def stats(self, steps: int) -> MemoryStats:
        """What `steps` steps since the construction have done; per-step values are 0 when `steps` is."""
        end, (before, start, emptied) = self._read(), self._anew
        if steps - before < LEAST_STEPS:
            before, start, emptied = 0, self._start, 0
        count = max(steps - before, 1)
        if not end:
            return MemoryStats(peak_allocated_bytes=_peak_rss(), total_bytes=_host_memory())

        def grown(key: str) -> int:
            return end.get(key, 0) - start.get(key, 0) if steps else 0

        return MemoryStats(
            peak_allocated_bytes=end.get("allocated_bytes.all.peak", 0),
            peak_reserved_bytes=end.get("reserved_bytes.all.peak", 0),
            total_bytes=torch.cuda.get_device_properties(self._device).total_memory,
            allocations=grown("allocation.all.allocated") / count,
            device_allocations=grown("num_device_alloc") / count,
            growth_bytes=grown("allocated_bytes.all.current") / count,
            retries=end.get("num_alloc_retries", 0) - self._start.get("num_alloc_retries", 0) if steps else 0,
            empty_cache_calls=(self._emptied - emptied) / count if self._emptied is not None and steps else None,
        )

    def _counting(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def empty_cache(*args: Any, **kwargs: Any) -> Any:
            self._emptied = (self._emptied or 0) + 1
            return plain(*args, **kwargs)

        return empty_cache

    def _read(self) -> dict[str, int]:
        if self._device.type != "cuda" or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return {}
        return dict(torch.cuda.memory_stats(self._device))


def _peak_rss() -> int:
    try:
        import resource
    except ImportError:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024


def _host_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 0
