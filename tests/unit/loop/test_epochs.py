"""Starts of epochs: planted times in, their cost out; and real loops, in which they are counted."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from advisor.loop import stop
from advisor.loop.attach import Attached, attach_training
from advisor.loop.epochs import EpochCost, Epochs
from advisor.loop.session import Session
from advisor.profiling.inside.inputfacts import input_stats

MS = 1_000_000


def loader(samples: int = 8, **options: object) -> DataLoader[object]:
    return DataLoader(TensorDataset(torch.randn(samples, 3)), batch_size=2, **options)


class Iterated:
    """Stands for an iterator of a loader."""


def epoch(
    epochs: Epochs, of: DataLoader[object], *, made: int, first: int, batches: int, ended: int | None = 1
) -> None:
    """One epoch with these times, in ms; with `ended` None the script leaves it early."""
    iterator = Iterated()
    epochs.made(iterator, of, made * MS)
    for batch in range(batches):
        epochs.drawn(iterator, of, (first if batch == 0 else 2) * MS)
    if ended is not None:
        epochs.ended(iterator, ended * MS)


def test_a_start_costs_what_a_batch_as_any_other_does_not() -> None:
    epochs, data = Epochs(), loader()
    epoch(epochs, data, made=900, first=800, batches=4)  # the first of all, with what is set up once
    for made in (100, 120, 110):
        epoch(epochs, data, made=made, first=52, batches=4, ended=30)
    found = epochs.cost(usual_us=2_000.0)
    assert found == EpochCost(starts=4, make_us=140_000.0, first_us=50_000.0, batches=4.0, loaders=1)


def test_of_a_single_start_the_loader_tells_how_long_its_epoch_is() -> None:
    epochs, data = Epochs(), loader(samples=100)
    epoch(epochs, data, made=100, first=52, batches=7, ended=None)
    assert epochs.cost(2_000.0) == EpochCost(starts=1, make_us=100_000.0, first_us=50_000.0, batches=50.0, loaders=1)


def test_a_stream_is_not_asked_for_its_length() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(8))

        def __len__(self) -> int:
            raise AssertionError("torch warns once it has been asked")

    epochs = Epochs()
    stream: DataLoader[object] = DataLoader(Stream())
    epoch(epochs, stream, made=1, first=2, batches=3, ended=None)
    assert epochs.cost(0.0).batches == 0.0


def test_epochs_that_the_script_leaves_early_are_as_long_as_it_makes_them() -> None:
    epochs, data = Epochs(), loader(samples=100)
    for _ in range(3):
        epoch(epochs, data, made=10, first=12, batches=6, ended=None)
    assert epochs.cost(2_000.0).batches == 6.0


def test_images_to_show_drawn_from_another_loader_are_no_epoch() -> None:
    """CycleGAN: `next(iter(val_dataloader))` amid an epoch, before the model is told to evaluate."""
    epochs, data, shown = Epochs(), loader(samples=80), loader(samples=16)
    iterator = Iterated()
    epochs.made(iterator, data, 100 * MS)
    for batch in range(30):
        epochs.drawn(iterator, data, (52 if batch == 0 else 2) * MS)
        if batch % 10 == 0:
            epoch(epochs, shown, made=900, first=800, batches=1, ended=None)
    assert epochs.cost(2_000.0) == EpochCost(starts=1, make_us=100_000.0, first_us=50_000.0, batches=40.0, loaders=1)


def test_a_short_loader_that_starts_anew_beside_a_longer_one_counts() -> None:
    epochs, unlabelled, labelled = Epochs(), loader(samples=80), loader(samples=4)
    iterator = Iterated()
    epochs.made(iterator, unlabelled, 100 * MS)
    for step in range(12):
        epochs.drawn(iterator, unlabelled, 2 * MS)
        if step % 2 == 0:
            epoch(epochs, labelled, made=40, first=12, batches=2, ended=10)
    found = epochs.cost(2_000.0)
    assert (found.starts, found.loaders, found.make_us) == (7, 2, 50_000.0)


def test_an_iterator_of_an_evaluation_is_no_start() -> None:
    epochs, data, other = Epochs(), loader(), loader()
    epoch(epochs, data, made=10, first=12, batches=4)
    epochs.made(Iterated(), other, 500 * MS)
    assert epochs.cost(2_000.0).loaders == 1
    assert epochs.begun == 1


def test_two_loaders_side_by_side_do_not_end_each_other() -> None:
    epochs, one, two = Epochs(), loader(), loader()
    iterators = Iterated(), Iterated()
    for iterator, of in zip(iterators, (one, two), strict=True):
        epochs.made(iterator, of, MS)
    for _ in range(4):
        for iterator, of in zip(iterators, (one, two), strict=True):
            epochs.drawn(iterator, of, MS)
    assert not epochs.left(one)
    assert not epochs.left(two)


@pytest.fixture
def attached(tmp_path: Path) -> Iterator[Attached]:
    gc.collect()  # optimizers of earlier tests are waited for as long as they live
    attach_training(Session(mode="search", run_dir=str(tmp_path), script="x"))
    yield Attached
    assert Attached.watcher is not None
    Attached.watcher.detach()
    Attached.training = Attached.watcher = Attached.discovery = None
    stop.forget()


class Training:
    """A model that is trained on what loops give it."""

    def __init__(self) -> None:
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.steps = 0

    def step(self, batch: list[torch.Tensor]) -> None:
        self.model(batch[0]).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1


def for_loop(training: Training) -> None:
    data = loader()
    for _ in range(3):
        for batch in data:
            training.step(batch)


def made_each_epoch(training: Training) -> None:
    data = TensorDataset(torch.randn(8, 3))
    for _ in range(3):
        for batch in DataLoader(data, batch_size=2):
            training.step(batch)


def one_for_all_steps(training: Training) -> None:
    batches = itertools.chain.from_iterable(itertools.repeat(loader(), 3))
    while training.steps < 12:
        training.step(next(batches))


def one_for_each_step(training: Training) -> None:
    data = loader()
    for _ in range(12):
        training.step(next(iter(data)))


def phases(training: Training) -> None:
    """PyTorch's tutorial of transfer learning, and what was made of it: batches of both phases are drawn alike."""
    loaders = {"train": loader(), "val": loader(samples=4)}
    for _ in range(3):
        for phase in ("train", "val"):
            training.model.train(phase == "train")
            for batch in loaders[phase]:
                with torch.set_grad_enabled(phase == "train"):
                    output = training.model(batch[0])
                if phase == "train":
                    output.square().sum().backward()
                    training.optimizer.step()
                    training.optimizer.zero_grad()


@pytest.mark.parametrize(
    ("loop", "loaders", "starts", "batches"),
    [
        (for_loop, 1, 3, 4.0),
        (phases, 1, 3, 4.0),
        (made_each_epoch, 3, 3, 4.0),
        (one_for_all_steps, 1, 3, 4.0),
        (one_for_each_step, 1, 12, 1.0),
    ],
)
def test_starts_are_counted_however_the_loop_is_written(attached, loop, loaders, starts, batches) -> None:
    loop(Training())
    found = input_stats(attached.training, attached.discovery)
    assert (found.loaders, found.iterators, found.epoch_batches) == (loaders, starts, batches)
    assert found.epoch_make_us > 0
    assert found.epochs_in_loop
    assert len(attached.training.loaders) == 1  # those that were made anew are not held, nor are their workers


def test_an_iterator_a_step_counts_among_the_steps_time_in_the_loader(attached, monkeypatch) -> None:
    monkeypatch.setattr(Epochs, "drawn", lambda self, iterator, loader, ns: 7 * MS)
    seen: list[int] = []
    attached.training.on_step.append(lambda step: seen.append(attached.watcher.interval.loader_ns))
    one_for_each_step(Training())
    assert min(seen[1:]) > 7 * MS
