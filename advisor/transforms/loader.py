"""What a DataLoader's items tell about it, looked at without leaving a trace."""

from __future__ import annotations

import copy
import gc
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from advisor.transforms.patch import tensors_in


@dataclass(frozen=True, slots=True)
class Item:
    """One item of a dataset: its bytes, whether it is on a device already, whether reading it draws random numbers, and whether
    batches of it share memory."""

    bytes: int
    on_device: bool
    random: bool
    reused: bool = False


def probe(loader: DataLoader[Any], *, collated: bool = False) -> Item:
    """Read item 0 once. The host's random-number generators are as before afterwards.

    Args:
        collated: make two batches of it too, where the script does that by itself (mixing images, drawing a size, filling a buffer).

    Raises:
        Whatever the dataset, or the script's `collate_fn`, raises.
    """
    batches: list[Any] = []
    with _generators_kept() as moved:
        first = loader.dataset[0]
        tensors = tensors_in(first)
        if collated and loader.batch_sampler is not None and loader.collate_fn is not default_collate:
            batches = [loader.collate_fn(copy.deepcopy([first, first])) for _ in range(2)]
    return Item(
        bytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        on_device=any(tensor.device.type != "cpu" for tensor in tensors),
        random=any(moved),
        reused=bool(batches) and not _memory(batches[0]).isdisjoint(_memory(batches[1])),
    )


def _memory(batch: Any) -> set[int]:
    return {
        tensor.untyped_storage().data_ptr()
        for tensor in tensors_in(batch)
        if tensor.layout is torch.strided and tensor.numel() and tensor.device.type == "cpu"
    }


def is_stream(loader: DataLoader[Any]) -> bool:
    """Whether the dataset has no items by index."""
    return isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__getitem__")


def leave_workers_no_garbage(loader: DataLoader[Any]) -> None:
    """Before a loader starts its workers: collect what they would inherit.

    A forked worker whose collector frees a pinned batch with a copy on its way asks CUDA about it and is aborted.
    """
    if loader.num_workers:
        gc.collect()


@contextmanager
def _generators_kept() -> Iterator[list[bool]]:
    """Python's, NumPy's and torch's host generators are as before afterwards; the list then says whether they had moved."""
    numpy: Any = sys.modules.get("numpy")
    python, torch_host = random.getstate(), torch.get_rng_state()
    legacy: Any = numpy.random.get_state() if numpy else None
    moved: list[bool] = []
    try:
        yield moved
    finally:
        moved.append(random.getstate() != python or not torch.equal(torch.get_rng_state(), torch_host))
        random.setstate(python)
        torch.set_rng_state(torch_host)
        if numpy:
            now = numpy.random.get_state()
            moved.append(now[2:] != legacy[2:] or bool((now[1] != legacy[1]).any()))
            numpy.random.set_state(legacy)
