"""Looking one batch ahead. The copies are faked on the meta device; test_prefetch_gpu has the real ones."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from loops import fingerprint, make_loop
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from advisor.transforms import loader, prefetch
from advisor.transforms.prefetch import DevicePrefetch

META = torch.device("meta")


class Copies:
    """Starts copies to the meta device and notes them."""

    def __init__(self, device: torch.device) -> None:
        self.started: list[torch.Tensor] = []
        made.append(self)

    def start(self, tensor: torch.Tensor):
        copy = tensor.to(META)
        copies.append(copy)
        return lambda: copy

    def stop(self) -> None:
        pass


PLAIN_NUMPY = torch.Tensor.numpy
made: list[Copies] = []
copies: list[torch.Tensor] = []


@pytest.fixture
def loop(monkeypatch):
    loop = make_loop(steps=1)
    loop.training.device = torch.device("meta", 0)
    monkeypatch.setattr(prefetch, "CudaCopies", Copies)
    copies.clear()
    loop.training.loaders.append(make_loader())
    return loop


def make_loader(n: int = 10, **options) -> DataLoader:
    x = torch.arange(float(n))
    return DataLoader(TensorDataset(x, x + 100), batch_size=2, **options)


def ahead(tensor: torch.Tensor) -> bool:
    return any(tensor is copy for copy in copies)


def seen(iterator, steps: int) -> list[float]:
    return [next(iterator)[0][0].item() for _ in range(steps)]


def test_an_unchanged_batch_is_there_already_and_only_once(loop) -> None:
    transform = DevicePrefetch()
    transform.apply(loop.training, {})
    iterator = iter(loop.training.loaders[0])
    next(iterator)
    x, y = next(iterator)
    assert x.tolist() == [2.0, 3.0]
    assert ahead(x.to("meta"))
    assert not ahead(x.to("meta"))
    assert ahead(y.to(META, non_blocking=True))
    assert transform.effect(loop.training, None, None).passed
    x, y = next(iterator)
    assert x.to(device="meta", dtype=torch.float64).dtype == torch.float64
    assert y.to(torch.float64).device.type == "cpu"
    assert prefetch.counts["ahead"] == 3


def test_older_ways_to_the_gpu_find_the_copy_too(loop) -> None:
    """`imgs.type(Tensor)` with `Tensor = torch.cuda.FloatTensor` (test_prefetch_gpu), and batches copied into a tensor that stays."""
    DevicePrefetch().apply(loop.training, {})
    iterator = iter(loop.training.loaders[0])
    next(iterator)
    x, y = next(iterator)
    there = torch.empty(2, device=META)
    assert ahead(x.type_as(there))
    assert there.copy_(y) is there
    assert prefetch.counts == {"ahead": 2, "on demand": 0}
    x, _ = next(iterator)
    host = torch.empty(2)
    assert host.copy_(x).tolist() == [4.0, 5.0]  # a copy on the host is none
    assert x.type(torch.float64).device.type == "cpu"
    assert ahead(x.to("meta"))


def test_a_changed_or_other_tensor_is_copied_as_ever(loop) -> None:
    DevicePrefetch().apply(loop.training, {})
    iterator = iter(loop.training.loaders[0])
    next(iterator)
    x, y = next(iterator)
    x += 1
    assert not ahead(x.to("meta"))
    assert not ahead(y[:1].to("meta"))
    assert prefetch.counts == {"ahead": 0, "on demand": 1}
    assert DevicePrefetch().effect(loop.training, None, None).passed is False


def test_every_batch_comes_once_over_epochs_breaks_and_undo(loop) -> None:
    loader = loop.training.loaders[0]
    before = fingerprint(loop)
    running = iter(loader)
    assert seen(running, 1) == [0.0]
    undo = DevicePrefetch().apply(loop.training, {})
    assert seen(running, 2) == [2.0, 4.0]  # an iterator that ran before looks ahead too
    assert copies
    assert [batch[0][0].item() for batch in loader] == [0.0, 2.0, 4.0, 6.0, 8.0]
    for batch in loader:
        if batch[0][0] == 4.0:
            break
    assert [batch[0][0].item() for batch in loader] == [0.0, 2.0, 4.0, 6.0, 8.0]
    undo.run()
    assert seen(running, 2) == [6.0, 8.0]  # what was taken ahead is not lost
    with pytest.raises(StopIteration):
        next(running)
    assert "_next_data" not in vars(running)
    assert fingerprint(loop) == before


def test_undo_between_the_last_batch_and_the_end(loop) -> None:
    undo = DevicePrefetch().apply(loop.training, {})
    iterator = iter(loop.training.loaders[0])
    assert seen(iterator, 5)[-1] == 8.0
    undo.run()
    with pytest.raises(StopIteration):
        next(iterator)


def test_persistent_workers_start_each_epoch_anew(loop) -> None:
    loader = make_loader(num_workers=1, persistent_workers=True)
    loop.training.loaders[:] = [loader]
    DevicePrefetch().apply(loop.training, {})
    for batch in loader:
        if batch[0][0] == 2.0:
            break
    assert [batch[0][0].item() for batch in loader] == [0.0, 2.0, 4.0, 6.0, 8.0]
    del loader._iterator


class Failing(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index):
        if index == 4:
            raise OSError("broken image")
        return torch.tensor(float(index))


def test_an_error_of_the_dataset_comes_when_its_batch_is_due(loop) -> None:
    loop.training.loaders[:] = [DataLoader(Failing(), batch_size=2)]
    DevicePrefetch().apply(loop.training, {})
    iterator = iter(loop.training.loaders[0])
    assert next(iterator).tolist() == [0.0, 1.0]
    assert next(iterator).tolist() == [2.0, 3.0]
    with pytest.raises(OSError, match="broken image"):
        next(iterator)


def test_a_copy_that_fails_ends_looking_ahead_and_nothing_else(loop, monkeypatch, capsys) -> None:
    def broken(self, tensor):
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(Copies, "start", broken)
    DevicePrefetch().apply(loop.training, {})
    assert [batch[0][0].item() for batch in loop.training.loaders[0]] == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert capsys.readouterr().err.count("no memory") == 1


def test_a_copy_that_fails_in_its_thread_is_made_as_ever(loop, monkeypatch, capsys) -> None:
    def comes_to_nothing():
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(Copies, "start", lambda self, tensor: comes_to_nothing)
    DevicePrefetch().apply(loop.training, {})
    iterator = iter(loop.training.loaders[0])
    next(iterator)
    x, y = next(iterator)
    assert x.to("meta").shape == y.to("meta").shape == (2,)
    assert [batch[0][0].item() for batch in iterator] == [4.0, 6.0, 8.0]
    assert prefetch.counts["ahead"] == 0
    assert capsys.readouterr().err.count("no memory") == 1


def test_a_dropped_iterator_goes_at_once(loop) -> None:
    DevicePrefetch().apply(loop.training, {})
    gc.disable()
    try:
        iterator = iter(loop.training.loaders[0])
        next(iterator)
        gone = weakref.ref(iterator)
        del iterator
        assert gone() is None
    finally:
        gc.enable()


def test_an_iterator_that_is_through_goes_with_its_loop(loop) -> None:
    DevicePrefetch().apply(loop.training, {})
    gc.disable()
    try:
        iterator = iter(loop.training.loaders[0])
        gone = weakref.ref(iterator)
        assert len(list(iterator)) == 5
        del iterator
        assert gone() is None  # workers of the next epoch would inherit it as garbage
    finally:
        gc.enable()


def test_workers_inherit_no_garbage(loop, monkeypatch) -> None:
    loop.training.loaders[:] = [make_loader(num_workers=1)]
    DevicePrefetch().apply(loop.training, {})
    collected = []
    monkeypatch.setattr(loader.gc, "collect", lambda: collected.append(True))
    iterator = iter(loop.training.loaders[0])
    assert collected
    assert len(list(iterator)) == 5


def test_other_loaders_are_left_alone(loop) -> None:
    DevicePrefetch().apply(loop.training, {})
    other = iter(make_loader())
    next(other)
    assert "_next_data" not in vars(other)
    assert not copies


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Random(Failing):
    def __getitem__(self, index):
        return torch.rand(1)


class OddSampler(torch.utils.data.Sampler):
    def __iter__(self):
        return iter([0])


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.numpy().fill(7),
        lambda x: np.asarray(x).fill(7),
        lambda x: x[1:].detach().numpy().fill(7),
        lambda x: setattr(x, "data", x.data * 2),
        lambda x: x.requires_grad_(),
    ],
)
def test_changes_that_torch_does_not_count_are_seen(loop, change) -> None:
    undo = DevicePrefetch().apply(loop.training, {})
    iterator = iter(loop.training.loaders[0])
    next(iterator)
    x, y = next(iterator)
    change(x)
    moved = x.to("meta")
    assert not ahead(moved)
    assert moved.requires_grad == x.requires_grad
    assert ahead(y.to("meta"))
    undo.run()
    assert torch.Tensor.numpy is PLAIN_NUMPY


def test_a_tensor_that_wants_a_gradient_is_not_copied_ahead(loop) -> None:
    loop.training.loaders[:] = [make_loader(collate_fn=lambda items: [torch.zeros(2, requires_grad=True)])]
    DevicePrefetch().apply(loop.training, {})
    assert all(tensor.to("meta").requires_grad for (tensor,) in loop.training.loaders[0])
    assert not copies


class OddBatches(torch.utils.data.Sampler):
    def __iter__(self):
        return iter([torch.randint(10, (2,)).tolist()])


def mixed(batch):
    weight = torch.rand(())
    return weight * torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch])


class IntoOneBuffer:
    def __init__(self) -> None:
        self.buffer = torch.empty(2)

    def __call__(self, items):
        return torch.stack([x for x, _ in items], out=self.buffer)


class Batches(Dataset):
    """Ready batches, each in memory of its own, or all in one buffer, as they are read from large files."""

    def __init__(self, buffer: torch.Tensor | np.ndarray | None = None) -> None:
        self.x, self.buffer = torch.arange(10.0).view(5, 2), buffer

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        if self.buffer is None:
            return self.x[index], index
        self.buffer[:] = self.x[index] if isinstance(self.buffer, torch.Tensor) else self.x[index].numpy()
        return self.buffer, index


def test_what_it_refuses(loop) -> None:
    def reason(loader) -> str:
        loop.training.device = torch.device("cuda", 0)
        loop.training.loaders[:] = [loader]
        match = DevicePrefetch().match(loop.training, {})
        return match.reason if not match.applies else ""

    assert reason(make_loader()) == ""
    assert reason(DataLoader(Random(), num_workers=1)) == ""
    assert "stream" in reason(DataLoader(Stream()))
    assert "random numbers" in reason(DataLoader(Random()))
    assert "OddSampler" in reason(make_loader(sampler=OddSampler()))
    data = make_loader().dataset
    assert "OddBatches" in reason(DataLoader(data, batch_sampler=OddBatches()))
    batches = torch.utils.data.BatchSampler(OddSampler(), 2, drop_last=False)
    assert "OddSampler" in reason(DataLoader(data, batch_sampler=batches))
    batches = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(data), 2, drop_last=False)
    assert reason(DataLoader(data, batch_sampler=batches)) == ""
    assert "random numbers" in reason(make_loader(collate_fn=mixed))
    assert reason(make_loader(collate_fn=mixed, num_workers=1)) == ""
    assert reason(make_loader(collate_fn=list)) == ""
    assert "same memory" in reason(make_loader(collate_fn=IntoOneBuffer()))
    assert "same memory" in reason(DataLoader(Batches(torch.empty(2)), batch_size=None))
    assert "same memory" in reason(DataLoader(Batches(np.empty(2, np.float32)), batch_size=None))
    assert reason(DataLoader(Batches(), batch_size=None)) == ""
    assert "device already" in reason(DataLoader(TensorDataset(torch.zeros(3, device="meta"))))
    loop.training.device = torch.device("cpu")
    assert "host" in DevicePrefetch().match(loop.training, {}).reason


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        (("cuda:1",), {}, "cuda:1"),
        ((1,), {}, "cuda:1"),
        ((), {"device": torch.device("cpu")}, "cpu"),
        ((torch.zeros(1),), {}, "cpu"),
        ((torch.float16,), {}, None),
        (("nonsense",), {}, None),
        ((None, torch.float16), {}, None),
    ],
)
def test_targets_of_to(args, kwargs, expected) -> None:
    target = prefetch.target_of(args, kwargs)
    assert (str(target) if target else None) == expected
