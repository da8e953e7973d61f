"""Batches travel as uint8 and are normalised on the GPU, where a data set ends its transforms with ToTensor and Normalize.

Workers keep an image's bytes in place of the fp32 values; a quarter goes between processes, through pinned memory and to the GPU,
where one kernel makes of it what the transforms would have made, on the stream that copies (a side stream, with `prefetch`). What
the script gets has the shape, dtype and values that it had, and turns into a plain host tensor as soon as anything but a move to the
GPU is done with it. Values are bit-equal: they are looked up in a table that the script's own transforms have filled.

Transforms before these, random crops and flips among them, stay where they are and draw what they drew.

The data set is changed while workers start, in their copies of it alone; so only workers that are forked come into question.
Loses where batches are needed on the host in any case.
"""

from __future__ import annotations

import functools
import multiprocessing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from advisor.core.profile import StepProfile
from advisor.core.units import bytes_text
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.profiling.inside.normalising import CHANNELS, Tail, tails
from advisor.transforms import images
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.images import NormalisedImages, Table
from advisor.transforms.loader import is_stream, leave_workers_no_garbage
from advisor.transforms.patch import all_or_nothing, replace_attribute


class Uint8Batches(Transform):
    """Copy batches to the GPU as uint8 and normalise them there."""

    id = "uint8_batches"

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if training.device.type != "cuda":
            return Match(applies=False, reason="batches stay on the host")
        sites, unmatched = [], []
        for index, loader in enumerate(training.loaders):
            name = f"{type(loader.dataset).__name__}, loader {index + 1}"
            why_not = _why_not(loader)
            if why_not:
                unmatched.append(f"{name}: {why_not}")
            else:
                sites += [f"{name}: {tail.name}" for tail in _found(loader)]
        reason = "" if sites else "; ".join(unmatched) or "no DataLoader was iterated in training"
        return Match(applies=bool(sites), reason=reason, sites=tuple(sites), unmatched=tuple(unmatched))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        """May be applied before the script has built its loaders: takes effect where one starts its workers."""
        plain = DataLoader._get_iterator
        started: WeakSet[DataLoader[Any]] = WeakSet()
        images.moved.clear()

        @functools.wraps(plain)
        def get_iterator(self: DataLoader[Any]) -> Any:
            if not active or not torch.is_grad_enabled() or not on_gpu(training) or _why_not(self):
                return plain(self)
            leave_workers_no_garbage(self)
            with _bytes_kept(self):
                iterator = plain(self)
            started.add(self)
            return iterator

        active = [True]

        def stop() -> None:
            active.clear()
            for loader in started:
                loader._iterator = None  # persistent workers; an epoch that is running goes on with the iterator it has

        with all_or_nothing() as undo:
            undo.push(stop)
            replace_attribute(undo, DataLoader, "_get_iterator", get_iterator)
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        count = images.moved["uint8"]
        numbers = {"moved_as_uint8": float(count)}
        if before is not None and after is not None:
            sizes = [_sent(profile) for profile in (before, after)]
            numbers |= {"bytes_before": sizes[0], "bytes_after": sizes[1]}
            return Check(
                passed=sizes[1] < sizes[0],
                detail=f"{bytes_text(sizes[0])} a step to the device before, {bytes_text(sizes[1])} after",
                numbers=numbers,
            )
        if not count:
            return Check(passed=False, detail="no batch was moved to the GPU as uint8", numbers=numbers)
        return Check(passed=True, detail=f"{count} batches were moved to the GPU as uint8", numbers=numbers)


def _sent(profile: StepProfile) -> float:
    return sum(copy.bytes for copy in profile.copies if copy.kind == "h2d")


def on_gpu(training: Training) -> bool:
    """Before the first step the training's device is not known; a model is on its GPU by then."""
    return training.device.type == "cuda" or bool(torch.cuda.is_initialized())


def _found(loader: DataLoader[Any]) -> list[Tail]:
    """Tails whose values can be told for RGB or grey images."""
    return [tail for tail in tails(loader.dataset) if any(tail.table(channels) is not None for channels in CHANNELS)]


def _why_not(loader: DataLoader[Any]) -> str:
    if is_stream(loader):
        return "an IterableDataset makes its batches itself"
    if not loader.num_workers:
        return "it has no workers to take the work from"
    if loader.batch_size is None and loader.batch_sampler is None:
        return "it does not batch"
    if loader.collate_fn is not default_collate:
        return "a collate_fn of its own may change images"
    context: Any = loader.multiprocessing_context or multiprocessing
    if context.get_start_method() != "fork":
        return "its workers are not forked"
    if not _found(loader):
        return "no Compose of its data set ends in ToTensor and Normalize, or their like"
    return ""


class KeepBytes:
    """Stands in a pipeline for its last steps: an image of 8 bits a channel is kept, anything else goes through the steps."""

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self.table = functools.cache(self._table)

    def _table(self, channels: int) -> Table | None:
        values = self.tail.table(channels)
        return None if values is None else Table(values)

    def __call__(self, *inputs: Any) -> Any:
        if len(inputs) == 1:
            pixels = self.tail.pixels(inputs[0])
            table = None if pixels is None else self.table(pixels.shape[0])
            if pixels is not None and table is not None:
                return NormalisedImages(pixels, table)
        return self.tail.run(*inputs)


def collate_images(batch: Any) -> Any:
    """As `torch.utils.data.default_collate`, but images that are kept as bytes are batched as bytes."""
    ways: Any = {**default_collate_fn_map, NormalisedImages: _stack, torch.Tensor: _stack}
    return collate(batch, collate_fn_map=ways)


def _stack(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
    first = batch[0]
    stacked: torch.Tensor
    if not all(
        isinstance(item, NormalisedImages)
        and item.untouched
        and item.shape == first.shape
        and item.table == first.table
        for item in batch
    ):
        plain = [item.become_plain() if isinstance(item, NormalisedImages) else item for item in batch]
        stacked = collate_tensor_fn(plain, collate_fn_map=collate_fn_map)
        return stacked
    pixels = [item.pixels for item in batch]
    by_pixel = [image.permute(1, 2, 0) for image in pixels]
    if all(image.is_contiguous() for image in by_pixel):
        return NormalisedImages(collate_tensor_fn(by_pixel).permute(0, 3, 1, 2), first.table)
    return NormalisedImages(collate_tensor_fn([image.contiguous() for image in pixels]), first.table)


@contextmanager
def _bytes_kept(loader: DataLoader[Any]) -> Iterator[None]:
    """Inside, the data set's pipelines keep bytes and the loader batches them; workers that are forked inside go on doing so."""
    found, own_collate = _found(loader), loader.collate_fn
    plain = [tail.pipeline.transforms for tail in found]
    try:
        for tail, steps in zip(found, plain, strict=True):
            tail.pipeline.transforms = [*steps[: tail.first], KeepBytes(tail)]
        loader.collate_fn = collate_images
        yield
    finally:
        loader.collate_fn = own_collate
        for tail, steps in zip(found, plain, strict=True):
            tail.pipeline.transforms = steps
