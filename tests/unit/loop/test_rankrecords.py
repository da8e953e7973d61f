"""What ranks other than the first leave of a profile."""

from __future__ import annotations

from pathlib import Path

from advisor.core import storage
from advisor.loop import rankrecords


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
