"""What a module is called with: the tensors that a CUDA graph reads, and all else, which it has frozen in."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format, enum.Enum)


@dataclass(frozen=True, slots=True)
class Arguments:
    """A call's arguments, taken apart.

    Attributes:
        tensors: in order; what a graph reads anew at each replay.
        frozen: all else: by this and the tensors' shapes, dtypes and strides a graph fits.
    """

    tensors: tuple[torch.Tensor, ...]
    frozen: tuple[Any, ...] = ()
    _others: tuple[Any, ...] = ()  # with None where a tensor stands
    _structure: Any = None

    def filled(self, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The call's arguments with these in place of its tensors."""
        if self._structure is None:
            return tuple(tensors), {}
        given = iter(tensors)
        leaves = [next(given) if other is _TENSOR else other for other in self._others]
        args, kwargs = pytree.tree_unflatten(leaves, self._structure)
        return args, kwargs


class _Tensor:
    """Stands where a tensor stood."""


_TENSOR = _Tensor()


def on_device(tensor: torch.Tensor) -> bool:
    """Whether a graph can read this tensor."""
    return tensor.is_cuda


def taken_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | str:
    """The arguments, or why no graph can be of a call with them."""
    if not kwargs and args and all(type(a) is torch.Tensor for a in args):
        found = Arguments(args)
    else:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        tensors = tuple(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        others = tuple(_TENSOR if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
        for other in others:
            if other is not _TENSOR and not isinstance(other, _PLAIN):
                return f"it is given a {type(other).__name__}, of which no graph can tell whether it is another"
        frozen = (structure, *((type(other), other) for other in others))
        found = Arguments(tensors, frozen, others, structure)
    if not found.tensors:
        return "it is called without a tensor"
    if not all(map(on_device, found.tensors)):
        return "it is given a tensor that lies on the host"
    return found
