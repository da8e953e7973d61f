"""What ranks other than the first leave of a profile: what each spends for data in a step, so that the one the others wait for has a name.

All ranks take the same time for a step, because they wait for each other in it: what differs is what each does before. A rank that
has left nothing (it died, or runs on another host whose run folder is not this one) is told, and the others are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, median_low

from advisor.core import storage
from advisor.core.errors import AdvisorError
from advisor.core.units import bytes_text, counted, percent_text, time_text

# A rank that spends so much more than the median one, as a share of the step, is named.
MUCH_FRAC = 0.05
MORE_MEMORY_FRAC = 0.1  # above the median rank's, that is told


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """One rank's timed steps: means of the time in the loader's `next()`, of it for batches that were not there yet, and of all that it does
    before its backward pass begins (profiling/inside/own_work.py). `peak_bytes`: of its device's allocator.
    """

    rank: int
    ranks: int
    steps: int
    step_us: float
    loader_us: float
    late_us: float
    own_us: float = 0.0
    peak_bytes: int = 0


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank leaves its record."""
    return folder / f"rank-{rank:04d}.json"


def of(
    rank: int,
    ranks: int,
    walls_us: Sequence[float],
    loader_us: Sequence[float],
    late_us: Sequence[float],
    *,
    own_us: Sequence[float] = (),
    peak_bytes: int = 0,
) -> RankRecord:
    """The record of a rank's clean steps."""
    return RankRecord(
        rank=rank,
        ranks=ranks,
        steps=len(loader_us),
        step_us=fmean(walls_us) if walls_us else 0.0,
        loader_us=fmean(loader_us) if loader_us else 0.0,
        late_us=fmean(late_us) if late_us else 0.0,
        own_us=median(own_us) if own_us else 0.0,
        peak_bytes=peak_bytes,
    )


def elsewhere(folder: Path) -> str:
    """Why there is no report here, where ranks have left records and the first, whose steps are traced, is not among them; else nothing."""
    here = sorted(int(path.stem.removeprefix("rank-")) for path in folder.glob("rank-[0-9]*.json"))
    if not here or not here[0]:
        return ""
    which = f"rank {here[0]}" if len(here) == 1 else f"ranks {here[0]} to {here[-1]}"
    return f"{which} trained here; rank 0, whose steps are traced, trains on another host, and the advisor there has the report"


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
    told += _slowest(list(found.values()), step_us)
    most = max(found.values(), key=lambda record: record.peak_bytes)
    usual = median_low(record.peak_bytes for record in found.values())
    if most.peak_bytes > (1 + MORE_MEMORY_FRAC) * usual > 0:
        told.append(
            f"rank {most.rank} holds {bytes_text(most.peak_bytes)} at its peak, where others hold {bytes_text(usual)}"
        )
    return tuple(told)


def _slowest(found: Sequence[RankRecord], step_us: float) -> list[str]:
    """The rank that the others wait for, and why: its data, else what it computes."""
    if step_us <= 0:
        return []
    middle = median_low(record.loader_us for record in found)
    slowest = max(found, key=lambda record: record.loader_us)
    if slowest.loader_us - middle > MUCH_FRAC * step_us:
        return [
            f"rank {slowest.rank} spends {time_text(slowest.loader_us)} of a step in its loader, {time_text(slowest.late_us)} of it for "
            f"batches that were not there yet, where others spend {time_text(middle)}: they wait for it when gradients are reduced"
        ]
    usual = median_low(record.own_us for record in found)
    longest = max(found, key=lambda record: record.own_us)
    if not usual or longest.own_us - usual <= MUCH_FRAC * step_us:
        return []
    return [
        f"rank {longest.rank} takes {time_text(longest.own_us)} until its backward begins, where others take {time_text(usual)}, and "
        f"no longer for its data: a slower or shared processor, or more to compute. The others wait {time_text(longest.own_us - usual)} "
        f"of each step ({percent_text((longest.own_us - usual) / step_us)})"
    ]
