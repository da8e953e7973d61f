"""Launches of the PReLU kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import channel_tiles, nvrtc, storage
from advisor.ops.prelu import spec


@dataclass(frozen=True, slots=True)
class _Launch:
    """Everything about a launch that depends on shape, dtype and variant only, ready to pass."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    sizes: tuple[Any, ...]
    partials: int = 0  # fp32 values


@lru_cache(maxsize=4096)
def _forward(shape: torch.Size, dtype: torch.dtype, device: int) -> _Launch:
    name = storage.name(dtype)
    vectors, total = shape[1] // storage.vector_width(name), shape.numel() // storage.vector_width(name)
    defines = spec.defines(spec.FORWARD, name)
    blocks = channel_tiles.flat_blocks(total, threads=spec.FLAT_THREADS, unroll=spec.FLAT_UNROLL)
    return _Launch(
        kernel=nvrtc.function(spec.FORWARD, *spec.KERNELS[spec.FORWARD], tuple(defines.items()), device),
        grid=(blocks, 1, 1),
        block=(spec.FLAT_THREADS, 1, 1),
        sizes=(np.uint32(total), np.uint32(vectors)),
    )


@lru_cache(maxsize=4096)
def _backward(shape: torch.Size, dtype: torch.dtype, device: int) -> _Launch:
    name, channels = storage.name(dtype), shape[1]
    rows = shape.numel() // channels
    found = spec.geometry(rows, channels, name, nvrtc.sm_count(device))
    defines = spec.defines(spec.BACKWARD, name)
    return _Launch(
        kernel=nvrtc.function(spec.BACKWARD, *spec.KERNELS[spec.BACKWARD], tuple(defines.items()), device),
        grid=(found.row_blocks, found.tiles, 1),
        block=(spec.THREADS, 1, 1),
        sizes=(np.int64(rows), np.int32(found.vectors), np.int32(found.tile)),
        partials=found.row_blocks * 2 * channels,
    )


def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns y, like x [N, C, H, W] channels_last; weight: [C] fp32."""
    device = x.device.index or 0
    plan = _forward(x.shape, x.dtype, device)
    y = torch.empty_like(x)
    addresses = (x.data_ptr(), weight.data_ptr(), y.data_ptr())
    plan.kernel(plan.grid, plan.block, (*addresses, *plan.sizes), 0, nvrtc.stream(device))
    return y


def backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns dx, like x, and dweight [C] fp32. dy, x: [N, C, H, W] channels_last, of one dtype; weight: [C] fp32."""
    device = dy.device.index or 0
    plan = _backward(dy.shape, dy.dtype, device)
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    partial = dweight.new_empty(plan.partials)
    sums = (partial.data_ptr(), nvrtc.tickets(dy.device), dweight.data_ptr())
    addresses = (dy.data_ptr(), x.data_ptr(), weight.data_ptr(), dx.data_ptr())
    plan.kernel(plan.grid, plan.block, (*addresses, *sums, *plan.sizes), 0, nvrtc.stream(device))
    return dx, dweight
