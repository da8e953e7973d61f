"""Loader workers: raised when a training loader is iterated, same batches, and back."""

from __future__ import annotations

import gc
import random
import weakref

import numpy
import pytest
import torch
from loops import fingerprint, make_loop
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from advisor.core.profile import InputStats
from advisor.transforms import loader_workers
from advisor.transforms.loader import probe
from advisor.transforms.loader_workers import LoaderWorkers

TWO = {"workers": "2"}


def make_loader(**options) -> DataLoader:
    generator = torch.Generator().manual_seed(7)
    return DataLoader(TensorDataset(torch.arange(12.0)), batch_size=3, shuffle=True, generator=generator, **options)


def batches(loader: DataLoader) -> list[list[float]]:
    return [batch[0].tolist() for batch in loader]


@pytest.fixture
def loop():
    loop = make_loop(steps=1)
    loop.training.loaders.append(make_loader())
    return loop


def test_same_batches_in_the_same_order_then_back(loop) -> None:
    transform, loader = LoaderWorkers(), loop.training.loaders[0]
    expected = batches(make_loader())
    match = transform.match(loop.training, TWO)
    assert match.applies
    assert match.reason == ""
    before, plain = fingerprint(loop), dict(vars(loader))
    undo = transform.apply(loop.training, TWO)
    assert transform.effect(loop.training, None, None).passed is False
    with torch.no_grad():
        iter(loader)
    assert loader.num_workers == 0  # evaluation is left alone
    assert batches(loader) != []
    assert loader.num_workers == 2
    assert not loader.persistent_workers
    assert transform.effect(loop.training, None, None).passed
    fresh = make_loader()
    assert batches(fresh) == expected
    assert fresh.num_workers == 2
    undo.run()
    assert {k: v for k, v in vars(loader).items() if k != "_iterator"} == {
        k: v for k, v in plain.items() if k != "_iterator"
    }
    assert fresh.num_workers == 0
    assert fingerprint(loop) == before


@pytest.mark.parametrize("persistent", ["false", "true"])
def test_a_loader_that_the_script_drops_goes_with_its_data_and_workers(loop, persistent) -> None:
    undo = LoaderWorkers().apply(loop.training, TWO | {"persistent": persistent})
    loader = make_loader()
    data, iterator = weakref.ref(loader.dataset), weakref.ref(iter(loader))
    assert loader.num_workers == 2
    del loader
    gc.collect()
    assert data() is None
    assert iterator() is None
    undo.run()


class Augmenting(Dataset):
    def __init__(self, draw) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index):
        self.draw()
        return torch.zeros(2)


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(1), lambda: numpy.random.rand()])
def test_random_augmentation_is_told_and_generators_are_kept(loop, draw) -> None:
    loop.training.loaders[:] = [DataLoader(Augmenting(draw))]
    state = (random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].copy(), numpy.random.get_state()[2])
    match = LoaderWorkers().match(loop.training, TWO)
    assert match.applies
    assert "random augmentation" in match.reason
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])
    assert (numpy.random.get_state()[1] == state[2]).all()
    assert numpy.random.get_state()[2] == state[3]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Broken(Dataset):
    def __getitem__(self, index):
        raise OSError("no such image")


def test_what_it_refuses(loop, monkeypatch) -> None:
    def reason(loader) -> str:
        loop.training.loaders[:] = [loader]
        return LoaderWorkers().match(loop.training, TWO).reason

    assert "has 2 workers" in reason(make_loader(num_workers=2))
    assert "IterableDataset" in reason(DataLoader(Stream()))
    assert "no such image" in reason(DataLoader(Broken()))
    assert "on a device" in reason(DataLoader(TensorDataset(torch.zeros(3, device="meta"))))
    spawned = DataLoader(Augmenting(lambda: None), multiprocessing_context=None)
    monkeypatch.setattr(loader_workers, "_forks", lambda loader: False)
    assert "cannot be pickled" in reason(spawned)
    monkeypatch.setattr(loader_workers, "_forks", lambda loader: True)
    monkeypatch.setattr(loader_workers, "_shared_memory_bytes", lambda: 10)
    assert "shared memory" in reason(make_loader())
    loop.training.loaders.clear()
    assert "no DataLoader" in LoaderWorkers().match(loop.training, TWO).reason


def test_effect_reads_the_profiles(loop, profile) -> None:
    from dataclasses import replace

    none, two = (replace(profile(), input=InputStats(workers=n)) for n in (0, 2))
    assert LoaderWorkers().effect(loop.training, none, two).passed
    assert LoaderWorkers().effect(loop.training, two, two).passed is False


def test_default_workers_leave_a_core_and_share_a_node(monkeypatch) -> None:
    monkeypatch.setattr(loader_workers.os, "sched_getaffinity", lambda pid: set(range(64)))
    assert loader_workers._wanted({}) == 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert loader_workers._wanted({}) == 3
    monkeypatch.setattr(loader_workers.os, "sched_getaffinity", lambda pid: {0})
    assert loader_workers._wanted({}) == 1


def test_probe_counts_bytes() -> None:
    item = probe(DataLoader(TensorDataset(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))))
    assert item.bytes == 12 + 8
    assert not item.random
