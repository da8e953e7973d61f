"""Whether something grows from step to step, and by how much: from a few readings, in a row, of how much there is."""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.profiling.machine import hostload

# Python's own allocator serves objects of up to so many bytes, in memory that is not glibc's (Objects/obmalloc.c).
SMALL_OBJECT_BYTES = 512
# Readings fewer than these tell a trend from nothing else.
LEAST_READINGS = 5
# A stretch between two readings that grows by less than this share of the mean is no steady growth; one of them may (a list that doubles its
# room, an epoch's end).
STEADY_FRAC, UNSTEADY_STRETCHES = 0.25, 1


@dataclass(slots=True)
class MemoryReadings:
    """Pairs of a step's number and bytes, in order."""

    points: list[tuple[int, float]]

    def add(self, step: int, nbytes: float) -> None:
        """What there is behind this step."""
        self.points.append((step, nbytes))

    def a_step(self) -> float:
        """Mean growth in bytes a step; 0.0 where there are no two readings."""
        if len(self.points) < 2 or self.points[-1][0] <= self.points[0][0]:
            return 0.0
        (first, least), (last, most) = self.points[0], self.points[-1]
        return (most - least) / (last - first)

    def steady(self) -> bool:
        """It grows all the way, at about one rate: the next steps will add as much."""
        mean = self.a_step()
        if len(self.points) < LEAST_READINGS or mean <= 0:
            return False
        rates = [(b - a) / (j - i) for (i, a), (j, b) in zip(self.points, self.points[1:], strict=False) if j > i]
        slow = sum(rate < STEADY_FRAC * mean for rate in rates)
        return slow <= UNSTEADY_STRETCHES and len(rates) - slow >= LEAST_READINGS - 1


class _MallInfo(ctypes.Structure):
    """glibc's `struct mallinfo2` (mallinfo(3))."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )  # fmt: skip


@functools.cache
def _mallinfo() -> Any:
    try:
        found = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):  # no glibc, or one before 2.33
        return None
    found.restype = _MallInfo
    return found


def heap_bytes() -> float | None:
    """What the process has asked glibc for and not given back, exact; None without glibc. Takes some 20 us."""
    ask = _mallinfo()
    if ask is None:
        return None
    found = ask()
    return float(found.uordblks + found.hblkhd)


def resident_bytes() -> float | None:
    """Resident memory of this process; None where the system does not tell. Newer kernels count it in batches: some MiB on many cores."""
    try:
        pages = int((hostload.PROC / "self" / "statm").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return float(pages * hostload.page_bytes())


def beside_the_heap_bytes() -> float | None:
    """What may have grown that glibc's heap does not count: shared pages (batches from a loader's workers), and Python's small objects,
    each taken for as large as they can be. None where the system does not tell.
    """
    try:
        shared = int((hostload.PROC / "self" / "statm").read_bytes().split()[2])
    except (OSError, IndexError, ValueError):
        return None
    return float(shared * hostload.page_bytes() + sys.getallocatedblocks() * SMALL_OBJECT_BYTES)


def host_free_bytes() -> int:
    """What this process may still take of the host's memory, by its control group too; 0 where it cannot be told."""
    free = [hostload.available_bytes()]
    try:
        most, now = ((Path("/sys/fs/cgroup") / name).read_text().strip() for name in ("memory.max", "memory.current"))
        free.append(max(0, int(most) - int(now)) if most != "max" else 0)
    except (OSError, ValueError):
        pass  # no control group v2 limit
    return min((nbytes for nbytes in free if nbytes), default=0)
