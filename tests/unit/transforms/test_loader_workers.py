"""Loader workers: raised when a training loader is iterated, same batches, and back."""

from __future__ import annotations

import functools
import gc
import os
import random
import signal
import time
import weakref

import numpy
import pytest
import torch
from loops import fingerprint, make_loop
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from advisor.core.profile import InputStats
from advisor.transforms import loader, loader_workers
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

    assert "it has 2 workers, and no more than 2 would be tried" in reason(make_loader(num_workers=2))
    assert "IterableDataset" in reason(DataLoader(Stream()))
    assert "no such image" in reason(DataLoader(Broken()))
    assert "on a device" in reason(DataLoader(TensorDataset(torch.zeros(3, device="meta"))))
    spawned = DataLoader(Augmenting(lambda: None), multiprocessing_context=None)
    monkeypatch.setattr(loader_workers, "forks", lambda loader: False)
    assert "cannot be pickled" in reason(spawned)
    monkeypatch.setattr(loader_workers, "forks", lambda loader: True)
    monkeypatch.setattr(loader_workers, "shared_memory_bytes", lambda: 10)
    assert "shared memory" in reason(make_loader())
    loop.training.loaders.clear()
    assert "no DataLoader" in LoaderWorkers().match(loop.training, TWO).reason


def test_effect_reads_the_profiles(loop, profile) -> None:
    from dataclasses import replace

    none, two = (replace(profile(), input=InputStats(workers=n)) for n in (0, 2))
    assert LoaderWorkers().effect(loop.training, none, two).passed
    assert LoaderWorkers().effect(loop.training, two, two).passed is False


@pytest.mark.parametrize(("cores", "left"), [(8, 6), (3, 1), (2, 1)])
def test_on_a_cpu_threads_give_up_the_cores_that_workers_take_until_it_is_undone(
    loop, monkeypatch, cores, left
) -> None:
    threads = [8]
    monkeypatch.setattr(loader_workers.os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    undo = LoaderWorkers().apply(loop.training, TWO)
    assert threads == [8]  # nothing was iterated yet
    batches(make_loader())
    assert threads == [8, left]
    batches(make_loader())
    undo.run()
    assert threads == [8, left, 8]


def test_threads_that_the_script_sets_in_between_stay(loop, monkeypatch) -> None:
    threads = [8]
    monkeypatch.setattr(loader_workers.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    undo = LoaderWorkers().apply(loop.training, TWO)
    batches(make_loader())
    threads.append(3)
    undo.run()
    assert threads == [8, 6, 3]


def test_default_workers_leave_a_core_and_share_a_node(monkeypatch) -> None:
    monkeypatch.setattr(loader_workers.os, "sched_getaffinity", lambda pid: set(range(64)))
    assert loader_workers.workers_wanted({}) == 8
    assert [loader_workers.workers_wanted({}, own) for own in (2, 6, 40)] == [8, 12, 63]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert loader_workers.workers_wanted({}, 6) == 3
    monkeypatch.setattr(loader_workers.os, "sched_getaffinity", lambda pid: {0})
    assert loader_workers.workers_wanted({}) == 1


def test_probe_counts_bytes() -> None:
    item = probe(DataLoader(TensorDataset(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))))
    assert item.bytes == 12 + 8
    assert not item.random


SIZE, COUNT = 3000, 64  # more of them than are read ahead into a file's buffer


class Packed(Dataset):
    """Items lie one behind the other in a file that is opened at the first one, or at once."""

    def __init__(self, path, *, at_once: bool = False) -> None:
        self.path = path
        self.file = open(path, "rb") if at_once else None  # noqa: SIM115 – open on purpose
        if at_once:
            self.file.read(1)  # a buffer's worth

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index):
        if self.file is None:
            self.file = open(self.path, "rb")  # noqa: SIM115 – open on purpose
        self.file.seek(index * SIZE)
        time.sleep(0.0005)
        return torch.tensor([index, *set(self.file.read(SIZE))])


@pytest.fixture
def packed(tmp_path):
    path = tmp_path / "items.bin"
    path.write_bytes(b"".join(bytes([index]) * SIZE for index in range(COUNT)))
    return functools.partial(Packed, path)


def descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def test_a_file_that_is_opened_at_first_use_is_opened_in_each_worker(loop, packed) -> None:
    before, data = descriptors(), packed()
    loader = loop.training.loaders[0] = DataLoader(data, 4)
    match = LoaderWorkers().match(loop.training, TWO)
    assert match.applies
    assert data.file is None
    assert descriptors() == before
    undo = LoaderWorkers().apply(loop.training, TWO)
    seen = torch.cat(list(loader))
    assert loader.num_workers == 2
    assert seen.tolist() == [[index, index] for index in range(COUNT)]
    undo.run()


def test_a_file_that_is_open_already_is_left_to_one_process_and_where_it_stood(loop, packed) -> None:
    data = packed(at_once=True)
    loop.training.loaders[:] = [DataLoader(Subset(data, range(COUNT)))]
    position = os.lseek(data.file.fileno(), 0, os.SEEK_CUR)
    assert "open already" in LoaderWorkers().match(loop.training, TWO).reason
    assert os.lseek(data.file.fileno(), 0, os.SEEK_CUR) == position
    data.file.close()


def test_a_file_that_the_script_opens_between_epochs_takes_the_workers_back(loop, packed, capfd) -> None:
    data = packed()
    loader = loop.training.loaders[0] = DataLoader(data, 4)
    undo = LoaderWorkers().apply(loop.training, TWO)
    list(loader)
    assert loader.num_workers == 2
    assert data[5].tolist() == [5, 5]
    assert [item[0].item() for item in torch.cat(list(loader))] == list(range(COUNT))
    assert loader.num_workers == 0
    assert capfd.readouterr().err.count("Packed goes on as the script has it") == 1
    data.file.close()
    data.file = None
    list(loader)
    assert loader.num_workers == 2
    undo.run()


class Remembering(Dataset):
    """What it has read of each it keeps, in one way or another."""

    def __init__(self, keep, **attributes) -> None:
        self.keep = keep
        vars(self).update(attributes)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index):
        self.keep(self, index)
        return torch.zeros(2)


def put(data, index) -> None:
    data.cache[index] = data.cache.get(index, torch.ones(1)) if isinstance(data.cache, dict) else torch.ones(1)


def put_inner(data, index) -> None:
    data.cache["images"][index] = torch.ones(1)


def count(data, index) -> None:
    data.cache += 1


def draw(data, index) -> None:
    data.cache.random() if isinstance(data.cache, random.Random) else torch.rand(1, generator=data.cache)


class Memoizing(Remembering):
    @functools.lru_cache(maxsize=2)  # noqa: B019 – what is tested
    def cache(self, index):
        return index


def ask(data, index) -> None:
    data.cache(index)


@pytest.mark.parametrize(
    "data",
    [
        Remembering(put, cache={}),
        Remembering(put, cache={0: torch.ones(1)}),
        Remembering(put, cache=[None] * 4),
        Remembering(put_inner, cache={"images": {}}),
        Remembering(count, cache=0),
        Remembering(draw, cache=random.Random(0)),
        Remembering(draw, cache=torch.Generator()),
        Memoizing(ask),
        Subset(Remembering(put, cache={}), [2, 1]),
        ConcatDataset([TensorDataset(torch.zeros(2)), Remembering(put, cache={})]),
    ],
)
def test_what_a_dataset_keeps_is_not_left_to_workers(loop, data) -> None:
    loop.training.loaders[:] = [DataLoader(data)]
    assert "`cache`, which workers would lose" in LoaderWorkers().match(loop.training, TWO).reason


def open_once(data, index) -> None:
    data.file = data.file or open(os.devnull)  # noqa: SIM115 – open on purpose


def open_part(data, index) -> None:
    if index not in data.files:
        data.files[index] = open(os.devnull)  # noqa: SIM115 – open on purpose


@pytest.mark.parametrize(
    "data",
    [
        Remembering(open_once, file=None, opened=False),
        Remembering(open_part, files={}),
        Remembering(lambda data, index: setattr(data, "ready", True), ready=False, names=["a", "b"], mean=float("nan")),
    ],
)
def test_what_is_only_opened_or_made_ready_is_no_reason(loop, data) -> None:
    loop.training.loaders[:] = [DataLoader(data)]
    assert LoaderWorkers().match(loop.training, TWO).applies


def test_an_item_that_comes_to_no_end_or_ends_its_process(loop, monkeypatch, capfd) -> None:
    children: list[int] = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: (children.append(fork()), children[-1])[1])
    for patience_s, end in ((0.3, signal.pause), (loader.PATIENCE_S, lambda: os._exit(3))):
        monkeypatch.setattr(loader, "PATIENCE_S", patience_s)
        loop.training.loaders[:] = [DataLoader(Augmenting(end))]
        assert "came to no end" in LoaderWorkers().match(loop.training, TWO).reason
    loop.training.loaders[:] = [DataLoader(Augmenting(lambda: os.write(1, b"said")))]
    assert LoaderWorkers().match(loop.training, TWO).applies
    assert "said" not in capfd.readouterr().out
    assert len(children) == 3
    for child in children:
        with pytest.raises(ChildProcessError):
            os.waitpid(child, os.WNOHANG)


def test_items_are_read_once_a_loader_and_with_each_set_of_files(monkeypatch, tmp_path) -> None:
    reads = []
    in_a_fork = loader.in_a_fork
    monkeypatch.setattr(loader, "in_a_fork", lambda read: reads.append(read) or in_a_fork(read))
    plain = make_loader()
    assert probe(plain) == probe(plain)
    assert len(reads) == 1
    with open(tmp_path / "log", "w"):
        probe(plain)
    assert len(reads) == 1
    with open(tmp_path / "log"):
        probe(plain)
    assert len(reads) == 2


@pytest.mark.parametrize("variable", ["LOCAL_WORLD_SIZE", "ADVISOR_GPUS"])
def test_ranks_of_one_host_share_its_cores(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    assert loader_workers.workers_wanted({}) == 7
    monkeypatch.setenv(variable, "4")
    assert loader_workers.workers_wanted({}) == 1
