"""What modules are given and return, and what a loader's batches hold: shapes, sizes, tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[int, ...]]:
    """Of the tensors that a call is given by themselves."""
    found = [tuple(value.shape) for value in args if isinstance(value, torch.Tensor)]
    found.extend(tuple(value.shape) for value in kwargs.values() if isinstance(value, torch.Tensor))
    return found


def elements(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Of the tensors that a call is given, in lists, tuples and dicts too, as a detector takes its images."""
    found = 0
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            found += value.numel()
        elif isinstance(value, (list, tuple, dict)):
            found += sum(leaf.numel() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return found


def output_tensors(output: Any) -> list[torch.Tensor]:
    """The tensors in what a model returned, in order: in tuples, lists and dictionaries, and in dataclasses, which are leaves to torch."""
    found: list[torch.Tensor] = []
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += output_tensors([getattr(leaf, field.name, None) for field in dataclasses.fields(leaf)])
    return found


def still_to_come(iterator: Any) -> bool:
    """Whether the next batch is still to be made: by the training thread, or by workers that are behind it.

    One that is there takes time as well: a detector's images and boxes 6 ms, from the workers' memory.
    """
    try:
        waiting = iterator._task_info.get(iterator._rcvd_idx, ())
        return len(waiting) < 2 and bool(iterator._data_queue.empty())
    except (AttributeError, OSError):  # no workers; or they have ended
        return True


def first_shape(batch: Any) -> tuple[int, ...]:
    """The shape of the first images [N, C, H, W] in nested lists, tuples and dicts, else of the first tensor; () when there is none.

    What stands before the images may have another number of rows than there are samples: a detector's boxes. Images of many sizes come as
    a list of them beside their targets: that has as many samples as images.
    """
    first: tuple[int, ...] = ()
    for shape in _batch_shapes(batch):
        if len(shape) >= 4:
            return shape
        first = first or shape
    return first


def _batch_shapes(batch: Any, *, within: bool = False) -> Iterator[tuple[int, ...]]:
    if isinstance(batch, torch.Tensor):
        yield tuple(batch.shape)
    if isinstance(batch, dict):
        batch = tuple(batch.values())
    if isinstance(batch, (list, tuple)):
        if within and batch and all(map(_is_image, batch)):
            yield (len(batch), *batch[0].shape)
            return
        for part in batch[:8]:
            yield from _batch_shapes(part, within=True)


def _is_image(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[0] in (1, 3, 4)


def sent(tensor: torch.Tensor) -> torch.Tensor:
    """What goes to the GPU for a tensor of a batch: itself, or the bytes that stand for it (transforms/images.py)."""
    pixels: torch.Tensor = getattr(tensor, "pixels", tensor)
    return pixels


def autocast_dtype(kind: str) -> torch.dtype | None:
    """What autocast computes in on this kind of device; None where it is off, or not known at all (`meta`)."""
    known = torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if known and torch.is_autocast_enabled(kind) else None


def class_of(module: torch.nn.Module) -> type:
    """A module's class as the script knows it: FSDP2 puts one of its own before it."""
    kind = type(module)
    bases = [base for base in kind.__bases__ if base.__name__ != "FSDPModule"]
    return kind if len(bases) == len(kind.__bases__) else bases[0]


def inner(module: torch.nn.Module) -> torch.nn.Module:
    """The user's own module inside DataParallel, DistributedDataParallel and torch.compile wrappers."""
    while True:
        if isinstance(module, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            wrapped = module.module
        else:
            wrapped = getattr(module, "_orig_mod", None)
        if not isinstance(wrapped, torch.nn.Module):
            return module
        module = wrapped
