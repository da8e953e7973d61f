"""Each rank's share of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset, get_worker_info

from advisor.distributed import shards
from advisor.distributed.refused import Refused
from advisor.loop.patches import Patches


@pytest.mark.parametrize(("size", "ranks"), [(8, 2), (8, 3), (7, 3), (3, 3)])
def test_parts_are_the_batch_in_its_order_and_even(size: int, ranks: int) -> None:
    parts = [shards.part(list(range(size)), rank, ranks) for rank in range(ranks)]
    assert [index for each in parts for index in each] == list(range(size))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def _loaded(rank: int, ranks: int, **options: Any) -> tuple[list[list[int]], list[float], int]:
    patches, loaders = Patches(), shards.Loaders(rank, ranks)
    torch.manual_seed(3)
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=6, **options)
    batches, shares = [], []
    try:
        loaders.install(patches)
        for (batch,) in loader:
            batches.append(batch.tolist())
            shares.append(loaders.share)
        return batches, shares, len(loader)
    finally:
        patches.restore_all()


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("workers", [0, 1])
def test_ranks_load_what_one_process_would_in_its_order(workers: int) -> None:
    torch.manual_seed(3)
    whole = [b.tolist() for (b,) in DataLoader(TensorDataset(torch.arange(20)), batch_size=6, shuffle=True)]
    found = [_loaded(rank, 2, shuffle=True, num_workers=workers) for rank in range(2)]
    assert [a + b for a, b in zip(found[0][0], found[1][0], strict=True)] == whole
    assert found[0][2] == len(whole)
    assert found[0][1] == [0.5, 0.5, 0.5, 0.5]


@pytest.mark.usefixtures("process_group")
def test_an_uneven_batch_is_told_by_its_share() -> None:
    assert _loaded(0, 4, drop_last=True)[1] == [1 / 6, 1 / 6, 1 / 6]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("rank", [0, 2])
def test_all_ranks_have_a_last_batch_of_too_few(rank: int) -> None:
    batches, shares, _ = _loaded(rank, 3)
    assert (batches[-1], shares[-1]) == ([18, 19], 1 / 3)


@pytest.mark.usefixtures("process_group")
def test_a_loader_of_an_evaluation_is_whole() -> None:
    with torch.no_grad():
        assert _loaded(1, 2)[0] == [list(range(6)), list(range(6, 12)), list(range(12, 18)), [18, 19]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(9)


SET = TensorDataset(torch.arange(9))


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("loader", "why"),
    [
        (DataLoader(Stream(), batch_size=1), "a batch of 1"),
        (DataLoader(Stream(), batch_size=None), "batch_size=None"),
        (DataLoader(SET, batch_size=None), "batch_size=None"),
        (DataLoader(SET, batch_size=4, sampler=DistributedSampler(SET, 2, 0)), "DistributedSampler"),
        (DataLoader(SET, batch_size=1), "a batch of 1"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_its_line(
    loader: DataLoader[Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    patches = Patches()
    shards.Loaders(0, 2).install(patches)
    try:
        with pytest.raises(Refused):
            next(iter(loader))
    finally:
        patches.restore_all()
    told = capsys.readouterr().err
    assert why in told
    assert "test_shards.py:" in told


class Shuffled(IterableDataset[int]):
    """Numbers in a drawn order; of two workers each has its half."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        order = torch.randperm(21).tolist()
        yield from order if info is None else order[info.id :: info.num_workers]


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_is_divided_batch_by_batch(workers: int) -> None:
    """Also its uneven last batches; and an evaluation sees all of it."""
    options: dict[str, Any] = {"batch_size": 4, "num_workers": workers}
    torch.manual_seed(3)
    whole = [b.tolist() for b in DataLoader(Shuffled(), **options)]
    found = []
    for rank in range(2):
        patches, loaders = Patches(), shards.Loaders(rank, 2)
        loader = DataLoader(Shuffled(), **options)
        loaders.install(patches)
        torch.manual_seed(3)
        try:
            shares: list[float] = []
            parts = []
            for batch in loader:
                parts.append(batch.tolist())
                shares.append(loaders.share)
            assert loaders.divided
            assert shares == [len(part) / len(b) if len(b) > 1 else 0.5 for part, b in zip(parts, whole, strict=True)]
            with torch.no_grad():
                assert {len(b) for b in loader} == {len(b) for b in whole}
            assert not loaders.divided
        finally:
            patches.restore_all()
        found.append(parts)
    assert [a + b if a != b else a for a, b in zip(*found, strict=True)] == whole


@pytest.mark.usefixtures("process_group")
def test_items_draw_from_the_ranks_own_generators_and_leave_the_common_ones() -> None:
    torch.manual_seed(1)
    before, drawn = torch.get_rng_state(), []
    for rank in range(2):
        own = shards.Generators(rank)
        for _ in range(2):
            with own.in_place():
                drawn.append(float(torch.rand(())))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(set(drawn)) == 4


def test_checksums_tell_another_order_and_another_split() -> None:
    one, other = (TensorDataset(torch.arange(8)) for _ in range(2))
    parts = [
        torch.utils.data.random_split(data, [4, 4], torch.Generator().manual_seed(seed))[0]
        for data, seed in ((one, 0), (one, 0), (other, 1))
    ]
    sums = []
    for data in parts:
        batches = shards.Batches(DataLoader(data, batch_size=2), lambda indices: indices)
        list(batches)
        sums.append(batches.checksum)
    assert sums[0] == sums[1] != sums[2]
