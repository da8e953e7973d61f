"""What ranks other than the first leave of a profile: what each spends for data in a step, so that the one the others wait for has a name.

All ranks take the same time for a step, because they wait for each other in it: what differs is what each does before. A rank that
has left nothing (it died, or runs on another host whose run folder is not this one) is told, and the others are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from advisor.core import storage
from advisor.core.errors import AdvisorError
from advisor.core.units import counted, time_text

# A rank that spends so much more than the median one, as a share of the step, is named.
MUCH_FRAC = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """One rank's timed steps: means of the time in the loader's `next()`, and of it for batches that were not there yet."""

    rank: int
    ranks: int
    steps: int
    step_us: float
    loader_us: float
    late_us: float


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank leaves its record."""
    return folder / f"rank-{rank:04d}.json"


def of(rank: int, ranks: int, walls_us: tuple[float, ...], loader_us: list[float], late_us: list[float]) -> RankRecord:
    """The record of a rank's clean steps."""
    return RankRecord(
        rank=rank,
        ranks=ranks,
        steps=len(loader_us),
        step_us=fmean(walls_us) if walls_us else 0.0,
        loader_us=fmean(loader_us) if loader_us else 0.0,
        late_us=fmean(late_us) if late_us else 0.0,
    )


def notes(folder: Path, ranks: int, step_us: float) -> tuple[str, ...]:
    """What the records in a run folder say of so many ranks; nothing of one."""
    if ranks < 2:
        return ()
    found: dict[int, RankRecord] = {}
    for rank in range(ranks):
        try:
            found[rank] = storage.load(file_of(folder, rank), RankRecord)
        except AdvisorError:
            continue
    if not found:
        return ()
    told = []
    if missing := [rank for rank in range(ranks) if rank not in found]:
        names = ", ".join(map(str, missing[:8]))
        told.append(
            f"{counted(len(missing), 'rank')} of {ranks} left no record (rank {names}): the report is about the others"
        )
    waits = sorted(record.loader_us for record in found.values())
    middle = waits[(len(waits) - 1) // 2]
    slowest = max(found.values(), key=lambda record: record.loader_us)
    if step_us > 0 and slowest.loader_us - middle > MUCH_FRAC * step_us:
        told.append(
            f"rank {slowest.rank} spends {time_text(slowest.loader_us)} of a step in its loader, {time_text(slowest.late_us)} of it for "
            f"batches that were not there yet, where others spend {time_text(middle)}: they wait for it when gradients are reduced"
        )
    return tuple(told)
