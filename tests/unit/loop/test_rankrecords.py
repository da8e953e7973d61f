"""What ranks other than the first leave of a profile."""

from __future__ import annotations

from pathlib import Path

import clocks
import pytest
import torch

from advisor.core import storage
from advisor.loop import rankrecords
from advisor.loop.patches import Patches
from advisor.loop.training import StepEvent
from advisor.profiling.inside import own_work


def left(folder: Path, *loader_us: float) -> None:
    for rank, us in enumerate(loader_us):
        record = rankrecords.of(rank, len(loader_us), (1e4, 1e4), [us, us], [us / 2, us / 2])
        storage.save(rankrecords.file_of(folder, rank), record)


def test_the_rank_that_others_wait_for_is_named(tmp_path: Path) -> None:
    left(tmp_path, 100.0, 120.0, 4000.0)
    (told,) = rankrecords.notes(tmp_path, 3, 1e4)
    assert told.startswith("rank 2 spends 4.00 ms of a step in its loader, 2.00 ms of it for batches")


def test_ranks_that_are_alike_and_single_processes_have_nothing_to_tell(tmp_path: Path) -> None:
    left(tmp_path, 100.0, 300.0)
    assert rankrecords.notes(tmp_path, 2, 1e4) == rankrecords.notes(tmp_path, 1, 1e4) == ()


def test_a_rank_that_is_missing_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    left(tmp_path, 100.0, 4000.0)
    told = rankrecords.notes(tmp_path, 4, 1e4)
    assert told[0].startswith("2 ranks of 4 left no record (rank 2, 3)")
    assert told[1].startswith("rank 1 spends")


def test_a_rank_that_computes_longer_or_holds_more_is_named(tmp_path: Path) -> None:
    for rank, (own_us, peak) in enumerate(((3000.0, 100), (3100.0, 101), (5000.0, 130))):
        record = rankrecords.of(rank, 3, (1e4,), [100.0], [0.0], own_us=[own_us, own_us, 9e9], peak_bytes=peak)
        storage.save(rankrecords.file_of(tmp_path, rank), record)
    computes, holds = rankrecords.notes(tmp_path, 3, 1e4)
    assert computes.startswith("rank 2 takes 5.00 ms until its backward begins, where others take 3.10 ms")
    assert "The others wait 1.90 ms of each step (19 %)" in computes
    assert holds.startswith("rank 2 holds 130 B")


def test_own_work_ends_where_the_backward_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = clocks.Clock()
    monkeypatch.setattr(own_work, "clocks", lambda device: (None, round(clock.seconds * 1e9)))

    def boundary(index: int, *, clean: bool = True) -> StepEvent:
        return StepEvent(index=index, host_ns=round(clock.seconds * 1e9), event=None, clean=clean)

    patches, weight = Patches(), torch.ones(1, requires_grad=True)
    work = own_work.OwnWork(torch.device("cpu"), patches, boundary(0))
    try:
        for index, forward_s in enumerate((0.003, 0.004, 7.0), 1):
            clock.seconds += forward_s
            for _ in range(2):  # of two passes the first counts
                (2 * weight).sum().backward()
                clock.seconds += 0.010
            work.boundary(boundary(index, clean=index < 3))
        assert work.times_us() == pytest.approx([3000.0, 4000.0])
    finally:
        patches.restore_all()


@pytest.mark.parametrize(
    ("here", "told"),
    [((), ""), ((0, 1), ""), ((3,), "rank 3 trained here; rank 0"), ((2, 3), "ranks 2 to 3 trained here")],
)
def test_a_host_without_rank_0_says_where_the_report_is(tmp_path: Path, here: tuple[int, ...], told: str) -> None:
    (tmp_path / "rank-notes.json").touch()  # another file by such a name
    for rank in here:
        rankrecords.file_of(tmp_path, rank).touch()
    found = rankrecords.elsewhere(tmp_path)
    assert found.startswith(told)
    assert bool(found) == bool(told)
