"""Loaders whose workers keep bytes: the same batches bit for bit, the same random draws, and everything back."""

from __future__ import annotations

import multiprocessing

import numpy as np
import pytest
import torch
from loops import fingerprint, make_loop
from pipelines import (
    MEAN,
    STD,
    Compose,
    Images,
    Normalize,
    RandomErasing,
    RandomHorizontalFlip,
    ToDtype,
    ToTensor,
    package,
)
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset

from advisor.core.profile import CopyRow
from advisor.ops.input import reference
from advisor.transforms import images, uint8_batches
from advisor.transforms.images import NormalisedImages, Table
from advisor.transforms.prefetch import DevicePrefetch
from advisor.transforms.uint8_batches import Uint8Batches, collate_images


@pytest.fixture
def loop(monkeypatch):
    loop = make_loop(steps=1)
    loop.training.device = torch.device("cuda")
    return loop


def pipeline() -> Compose:
    return Compose([RandomHorizontalFlip(), ToTensor(), Normalize()])


def make_loader(dataset=None, **options) -> DataLoader:
    settings = {"batch_size": 5, "shuffle": True, "num_workers": 2} | options
    return DataLoader(Images(pipeline()) if dataset is None else dataset, **settings)


def drawn(loader: DataLoader) -> list:
    torch.manual_seed(3)
    return list(loader)


def assert_same(ours: list, plain: list, *, kept: bool = True) -> None:
    assert len(ours) == len(plain)
    for (x, number), (want, want_number) in zip(ours, plain, strict=True):
        assert torch.equal(number, want_number)
        assert isinstance(x, NormalisedImages) is kept
        assert (x.shape, x.dtype, x.stride()) == (want.shape, want.dtype, want.stride())
        assert torch.equal(x.plain() if kept else x, want)


def test_the_same_batches_as_bytes_then_back(loop) -> None:
    loader = make_loader()
    loop.training.loaders.append(loader)
    steps = loader.dataset.transform.transforms
    plain = drawn(loader)
    before, settings = fingerprint(loop), dict(vars(loader))
    match = Uint8Batches().match(loop.training, {})
    assert match.applies
    assert match.sites == ("Images, loader 1: ToTensor + Normalize",)
    undo = Uint8Batches().apply(loop.training, {})
    assert_same(drawn(loader), plain)
    assert loader.dataset.transform.transforms is steps  # the process's own is only changed while workers start
    assert len(steps) == 3
    assert vars(loader) == settings
    with torch.no_grad():
        assert_same(drawn(loader), plain, kept=False)  # evaluation is left alone
    undo.run()
    assert_same(drawn(loader), plain, kept=False)
    assert vars(loader) == settings
    assert fingerprint(loop) == before


@pytest.mark.parametrize(
    "dataset",
    [
        Images(Compose([ToDtype(), Normalize()]), "tensor"),
        Images(Compose([ToTensor(), Normalize((0.5,), (0.3,))]), "grey"),
        ConcatDataset([Images(pipeline()), Images(pipeline())]),
    ],
    ids=["planes", "grey", "two data sets"],
)
def test_other_kinds_of_images(loop, dataset) -> None:
    plain = drawn(make_loader(dataset))
    Uint8Batches().apply(loop.training, {})
    assert_same(drawn(make_loader(dataset)), plain)


class Adding(Images):
    """Goes on computing with every third image."""

    def __getitem__(self, index):
        image, number = super().__getitem__(index)
        return image + 1 if number % 3 == 0 else image, number


class Floats(Images):
    """Its odd images are no bytes."""

    def __getitem__(self, index):
        image, number = super().__getitem__(index)
        return self.transform(np.full((6, 8, 3), 0.5, np.float32)) if number % 2 else image, number


@pytest.mark.parametrize(
    "dataset",
    [Adding(pipeline()), Floats(pipeline()), ConcatDataset([Images(pipeline()), Images(Compose([ToTensor()]))])],
    ids=["computes", "other images", "two tables"],
)
def test_mixed_batches_are_as_they_were(loop, dataset) -> None:
    plain = drawn(make_loader(dataset, shuffle=False, batch_size=24))
    Uint8Batches().apply(loop.training, {})
    assert_same(drawn(make_loader(dataset, shuffle=False, batch_size=24)), plain, kept=False)


def test_an_error_of_unequal_images_is_the_same() -> None:
    pixels, table = torch.zeros(3, 4, 4, dtype=torch.uint8), Table(torch.zeros(3, 256))
    with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size"):
        collate_images([NormalisedImages(pixels, table), NormalisedImages(pixels[:, 1:], table)])


def test_persistent_workers_keep_bytes_over_epochs_and_start_anew_after_undo(loop) -> None:
    loader = make_loader(persistent_workers=True)
    undo = Uint8Batches().apply(loop.training, {})
    for _ in range(2):
        assert isinstance(drawn(loader)[0][0], NormalisedImages)
    undo.run()
    assert type(drawn(loader)[0][0]) is torch.Tensor
    loader._iterator._shutdown_workers()


def test_what_it_refuses(loop, monkeypatch) -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(())

    def reason(loader) -> str:
        loop.training.loaders[:] = [loader]
        match = Uint8Batches().match(loop.training, {})
        assert not match.applies
        return match.reason

    assert "IterableDataset" in reason(DataLoader(Stream(), num_workers=1))
    assert "no workers" in reason(make_loader(num_workers=0))
    assert "does not batch" in reason(make_loader(batch_size=None, shuffle=False))
    assert "collate_fn" in reason(make_loader(collate_fn=lambda batch: batch))
    assert "not forked" in reason(make_loader(multiprocessing_context=multiprocessing.get_context("spawn")))
    assert "no Compose" in reason(make_loader(Images(Compose([ToTensor(), Normalize(), RandomErasing()]))))
    assert "no Compose" in reason(make_loader(Images(ToTensor())))
    loop.training.device = torch.device("cpu")
    assert "on the host" in reason(make_loader())
    loop.training.loaders.clear()
    loop.training.device = torch.device("cuda")
    assert "no DataLoader" in Uint8Batches().match(loop.training, {}).reason


def test_before_the_first_step_a_model_on_a_gpu_says_where_it_trains(loop, monkeypatch) -> None:
    loop.training.device = torch.device("cpu")
    Uint8Batches().apply(loop.training, {})
    assert type(drawn(make_loader())[0][0]) is torch.Tensor
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert isinstance(drawn(make_loader())[0][0], NormalisedImages)


def test_the_pipeline_is_put_back_when_workers_do_not_start(loop, monkeypatch) -> None:
    def broken(self):
        raise OSError("no more processes")

    monkeypatch.setattr(DataLoader, "_get_iterator", broken)
    Uint8Batches().apply(loop.training, {})
    loader = make_loader()
    steps = loader.dataset.transform.transforms
    with pytest.raises(OSError, match="no more processes"):
        iter(loader)
    assert loader.dataset.transform.transforms is steps
    assert loader.collate_fn is torch.utils.data.default_collate


def test_prefetch_sends_the_bytes_ahead(loop, monkeypatch) -> None:
    """On the meta device, as in test_prefetch."""
    from advisor.transforms import prefetch

    class Copies:
        def __init__(self, device) -> None:
            pass

        def start(self, tensor):
            copy = tensor.to("meta")
            return lambda: copy

        def stop(self) -> None:
            pass

    monkeypatch.setattr(prefetch, "CudaCopies", Copies)
    Uint8Batches().apply(loop.training, {})
    loop.training.device = torch.device("meta", 0)
    monkeypatch.setattr(uint8_batches, "on_gpu", lambda training: True)
    loader = make_loader(pin_memory=False)
    loop.training.loaders.append(loader)
    images.moved.clear()
    DevicePrefetch().apply(loop.training, {})
    iterator = iter(loader)
    next(iterator)
    x, _ = next(iterator)
    sent = images.moved["uint8"]
    assert x.to("meta").device.type == "meta"
    assert images.moved["uint8"] == sent
    assert prefetch.counts == {"ahead": 1, "on demand": 0}
    x, _ = next(iterator)
    x.mul_(2)
    x.to("meta")
    assert prefetch.counts == {"ahead": 1, "on demand": 1}


def test_effect_counts_moves_or_reads_the_copies(loop, profile) -> None:
    from dataclasses import replace

    transform = Uint8Batches()
    transform.apply(loop.training, {})
    assert transform.effect(loop.training, None, None).passed is False
    images.moved["uint8"] = 3
    assert transform.effect(loop.training, None, None).passed

    def sent(nbytes: float):
        return replace(profile(), copies=(CopyRow(kind="h2d", bytes=nbytes, time_us=1.0, calls=1.0),))

    assert transform.effect(loop.training, sent(8e6), sent(2e6)).passed
    assert transform.effect(loop.training, sent(8e6), sent(8e6)).passed is False


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_torchvisions_own_transforms_on_pil_images(loop, version) -> None:
    transforms = package("torchvision.transforms" + (".v2" if version == "v2" else ""))
    image = pytest.importorskip("PIL.Image")
    random = [transforms.RandomCrop(4), transforms.RandomHorizontalFlip()]
    if version == "v1":
        steps = [image.fromarray, *random, transforms.ToTensor()]
    else:
        steps = [image.fromarray, transforms.ToImage(), *random, transforms.ToDtype(torch.float32, scale=True)]
    dataset = Images(transforms.Compose([*steps, transforms.Normalize(MEAN, STD)]))
    plain = drawn(make_loader(dataset))
    Uint8Batches().apply(loop.training, {})
    ours = drawn(make_loader(dataset))
    assert_same(ours, plain)
    # What the GPU makes of it, by the operation's definition.
    x = ours[0][0]
    assert torch.equal(reference.normalise(x.pixels, x.table.values), plain[0][0])
