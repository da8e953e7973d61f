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


@lru_cache(maxsize=8)
def _kernel(source: torch.dtype, copy: torch.dtype, device: int) -> Any:
    widens = copy == torch.float32
    defines = spec.defines(half=storage.name(source if widens else copy), widens=widens)
    return nvrtc.function(spec.CAST, "cast_tensors", tuple(defines.items()), device)


def load(dtype: torch.dtype, source: torch.Tensor) -> None:
    """Have the kernel that casts tensors like `source` to `dtype` ready. CUDA loads none while a graph is captured."""
    _kernel(source.dtype, dtype, source.device.index or 0)


@lru_cache(maxsize=256)
def _plan(elements: tuple[int, ...], kernel: Any) -> tuple[_Launch, ...]:
    found = []
    for first, last in spec.launches(elements):
        *begin, blocks = spec.first_blocks(elements[first:last])
        table = np.zeros(1, dtype=_TABLE)
        table["begin"] = spec.BEHIND
        table["begin"][0, : last - first] = begin
        table["elements"][0, : last - first] = elements[first:last]
        found.append(_Launch(kernel, blocks, first, last, table))
    return tuple(found)


def cast(copies: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Write each source's values into its copy.

    Args:
        sources: none of them empty, of one dtype on one CUDA device, fewer than 2^31 values each; dense, beginning at a multiple of 16 bytes.
        copies: what `empty_like` makes of them in another dtype. One of the dtypes is fp32, the other fp16 or bf16.
    """
    device = sources[0].device.index or 0
    kernel = _kernel(sources[0].dtype, copies[0].dtype, device)
    places = np.array([[*map(torch.Tensor.data_ptr, sources)], [*map(torch.Tensor.data_ptr, copies)]], dtype=np.uint64)
    for launch in _plan(tuple(map(torch.Tensor.numel, sources)), kernel):
        table = launch.table.copy()  # a launch under way on another thread has its own
        count = launch.last - launch.first
        table["from"][0, :count] = places[0, launch.first : launch.last]
        table["to"][0, :count] = places[1, launch.first : launch.last]
        launch.kernel((launch.blocks, 1, 1), (spec.THREADS, 1, 1), (table,), 0, nvrtc.stream(device))
