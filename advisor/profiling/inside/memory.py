"""Memory over a stretch of steps, nothing reset: the device's from the caching allocator's own statistics, the host's from its own."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from advisor.core.profile import MemoryStats
from advisor.loop.patches import Patches
from advisor.loop.sources import user_line
from advisor.profiling.inside import growth

# What torch.cuda.empty_cache and torch.accelerator.empty_cache call, however the script has imported them; the first is
# not in CPU builds.
_EMPTY_CACHE = ("_cuda_emptyCache", "_accelerator_emptyCache")


LEAST_STEPS = 3  # for which what comes behind an evaluation tells what a step does
FULL_COLLECTION = 2  # the oldest of the generations of Python's collector
# Growth of the heap below this, bytes a step, may be what advisor keeps of each timed step; of resident memory, in all, what the kernel
# counts late and the allocator keeps.
OWN_BYTES, RESIDENT_NOISE_BYTES = 4096, 4 * 2**20
# Of resident memory that grows, this share must be seen to be held; a heap below that share of it is not the one in use.
HELD_FRAC, NO_HEAP_FRAC = 0.5, 0.05


class MemoryProbe:
    """Counts from its construction on. Reading costs tenths of a millisecond: not inside a timed step, but for a few readings in the window.

    With `patches` it also counts and times the calls that give the allocator's free blocks back to the driver, and the full
    collections of Python's garbage.
    """

    def __init__(self, device: torch.device, patches: Patches | None = None) -> None:
        self._device = device
        self._emptied = Calls()
        self._collected = Calls()
        self._counts = patches is not None
        if patches is not None:
            for name in _EMPTY_CACHE:
                if plain := getattr(torch._C, name, None):
                    patches.replace(torch._C, name, self._emptied.counting(plain))
            gc.callbacks.append(self._collecting)
            patches.undo(self._let_go)
        self._start = self.statistics()
        self._anew = (0, self._start, self._emptied.copy(), self._collected.copy())
        self._series = self._new_series()
        self.note(0)

    def note(self, steps: int, *, held_bytes: float = 0.0) -> None:
        """A reading behind the first `steps` steps, for what grows; `held_bytes` of the device's are the caller's own."""
        device = self.statistics()
        if device:
            self._series["device"].add(steps, device.get("allocated_bytes.all.current", 0) - held_bytes)
        beside = growth.beside_the_heap_bytes()
        for name, nbytes in (
            ("heap", growth.heap_bytes()), ("resident", growth.resident_bytes()), ("beside", beside)
        ):  # fmt: skip
            if nbytes is not None:
                self._series[name].add(steps, nbytes)

    def begin_anew(self, steps: int) -> None:
        """What came before, `steps` steps since the construction, held something else too: an evaluation takes memory of its own."""
        self._anew = (steps, self.statistics(), self._emptied.copy(), self._collected.copy())
        self._series = self._new_series()
        self.note(steps)

    def stats(self, steps: int, *, held_bytes: float = 0.0) -> MemoryStats:
        """What `steps` steps since the construction have done; per-step values are 0 when `steps` is."""
        end, (before, start, emptied, collected) = self.statistics(), self._anew
        if steps - before < LEAST_STEPS:
            before, start, emptied, collected = 0, self._start, Calls(), Calls()
        count = max(steps - before, 1)
        counted = self._counts and steps > 0
        found = MemoryStats(
            peak_allocated_bytes=_peak_rss(),
            total_bytes=_host_memory(),
            host_free_bytes=growth.host_free_bytes(),
            gc_calls=(self._collected.number - collected.number) / count if counted else None,
            gc_us=(self._collected.us - collected.us) / count if counted else 0.0,
            gc_at=self._collected.line,
            empty_cache_calls=(self._emptied.number - emptied.number) / count if counted and end else None,
            empty_cache_us=(self._emptied.us - emptied.us) / count if counted else 0.0,
            empty_cache_at=self._emptied.line,
        )
        found = self._with_growth(found, steps, held_bytes)
        if not end:
            return found

        def grown(key: str) -> int:
            return end.get(key, 0) - start.get(key, 0) if steps else 0

        return replace(
            found,
            peak_allocated_bytes=end.get("allocated_bytes.all.peak", 0),
            peak_reserved_bytes=end.get("reserved_bytes.all.peak", 0),
            total_bytes=torch.cuda.get_device_properties(self._device).total_memory,
            allocations=grown("allocation.all.allocated") / count,
            device_allocations=grown("num_device_alloc") / count,
            retries=end.get("num_alloc_retries", 0) - self._start.get("num_alloc_retries", 0) if steps else 0,
        )

    def _is_held(self, in_pages: float) -> bool:
        """Whether pages that become resident hold something: free lists of glibc's grow too, for a while, behind a heap that does not.
        What does not grow in there must be outside of it; an allocator in glibc's place leaves its heap nearly empty.
        """
        heap, resident, beside = (self._series[name].points for name in ("heap", "resident", "beside"))
        if not heap or not beside or heap[-1][1] < NO_HEAP_FRAC * resident[-1][1]:
            return True
        seen = self._series["heap"].a_step() + self._series["beside"].a_step()
        return seen >= HELD_FRAC * in_pages

    def _with_growth(self, found: MemoryStats, steps: int, held_bytes: float) -> MemoryStats:
        series = self._series
        if steps > 0 and not (series["resident"].points and series["resident"].points[-1][0] == steps):
            self.note(steps, held_bytes=held_bytes)
        device, heap, resident = series["device"], series["heap"], series["resident"]
        host: float | None = None
        if len(resident.points) >= growth.LEAST_READINGS:
            in_heap = heap.a_step() if heap.steady() and heap.a_step() > OWN_BYTES else 0.0
            grown = resident.points[-1][1] - resident.points[0][1]
            in_pages = resident.a_step() if resident.steady() and grown > RESIDENT_NOISE_BYTES else 0.0
            host = max(in_heap, in_pages if self._is_held(in_pages) else 0.0)
        if not device.points:
            return replace(found, growth_bytes=host, growth_steady=bool(host), host_growth_bytes=host)
        return replace(
            found, growth_bytes=device.a_step() if steps else 0.0, growth_steady=device.steady(), host_growth_bytes=host
        )

    @staticmethod
    def _new_series() -> dict[str, growth.MemoryReadings]:
        return {name: growth.MemoryReadings([]) for name in ("device", "heap", "resident", "beside")}

    def _collecting(self, phase: str, info: dict[str, int]) -> None:
        if info.get("generation") != FULL_COLLECTION:
            return
        if phase == "start":
            self._collected.begin()
        else:
            self._collected.end()

    def _let_go(self) -> None:
        if self._collecting in gc.callbacks:
            gc.callbacks.remove(self._collecting)

    def statistics(self) -> dict[str, int]:
        if self._device.type != "cuda" or not torch.cuda.is_initialized():
            return {}
        return dict(torch.cuda.memory_stats(self._device))


@dataclass(slots=True)
class Calls:
    """Calls of something: how many, their host time, and the line of the last."""

    number: int = 0
    us: float = 0.0
    line: str = ""
    _since_ns: int = 0

    def copy(self) -> Calls:
        """As it stands now."""
        return replace(self)

    def begin(self) -> None:
        """A call begins."""
        self.number += 1
        self.line = user_line() or self.line
        self._since_ns = time.perf_counter_ns()

    def end(self) -> None:
        """It is over."""
        if self._since_ns:
            self.us += (time.perf_counter_ns() - self._since_ns) / 1e3
            self._since_ns = 0

    def counting(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """`plain`, each of whose calls is one of these."""

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.begin()
            try:
                return plain(*args, **kwargs)
            finally:
                self.end()

        return counted


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
