"""Launches of the kernel that casts many tensors. Dtypes and places have been checked by the caller (api)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.casts import spec

# As the kernel's Table.
_TABLE = np.dtype(
    [
        ("from", np.uint64, spec.TENSORS),
        ("to", np.uint64, spec.TENSORS),
        ("begin", np.int32, spec.TENSORS),
        ("elements", np.int32, spec.TENSORS),
    ]
)


@dataclass(frozen=True, slots=True)
class _Launch:
    """One launch over tensors `first` to `last`, its table complete but for the addresses."""

    kernel: Any
    blocks: int
    first: int
    last: int
    table: np.ndarray[Any, Any]


@lru_cache(maxsize=256)
def _plan(elements: tuple[int, ...], half: str, widens: bool, device: int) -> tuple[_Launch, ...]:
    defines = tuple(spec.defines(half=half, widens=widens).items())
    kernel = nvrtc.function(spec.CAST, "cast_tensors", defines, device)
    found = []
    for first, last in spec.launches(elements):
        *begin, blocks = spec.first_blocks(elements[first:last])
        table = np.zeros(1, dtype=_TABLE)
        table["begin"] = spec.BEHIND
        table["begin"][0, : last - first] = begin
        table["elements"][0, : last - first] = elements[first:last]
        found.append(_Launch(kernel, blocks, first, last, table))
    return tuple(found)


def cast(dtype: torch.dtype, sources: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copies of the sources in `dtype`, with their strides.

    Args:
        sources: none of them empty, of one dtype on one CUDA device; each dense, beginning at a multiple of 16 bytes. Their dtype and
            `dtype` are fp32 and fp16 or bf16, or the other way round.
    """
    copies = tuple([torch.empty_like(source, dtype=dtype) for source in sources])
    device = sources[0].device.index or 0
    widens = dtype == torch.float32
    half = storage.name(sources[0].dtype if widens else dtype)
    addresses = [source.data_ptr() for source in sources]
    places = [copy.data_ptr() for copy in copies]
    for launch in _plan(tuple([source.numel() for source in sources]), half, widens, device):
        table = launch.table.copy()  # a launch under way on another thread has its own
        count = launch.last - launch.first
        table["from"][0, :count] = addresses[launch.first : launch.last]
        table["to"][0, :count] = places[launch.first : launch.last]
        launch.kernel((launch.blocks, 1, 1), (spec.THREADS, 1, 1), (table,), 0, nvrtc.stream(device))
    return copies
