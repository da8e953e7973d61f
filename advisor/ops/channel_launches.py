"""Launches of kernels that read [N, C, H, W] channels_last with a value a channel: one flat pass, or one by tiles of channels with a sum each.

`spec` is a family's module with FORWARD, BACKWARD, KERNELS, FLAT_THREADS, FLAT_UNROLL, THREADS, defines() and geometry(). Families keep
what is made here for each shape: making it takes longer than the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from advisor.ops import channel_tiles, nvrtc, storage


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything about a launch that depends on shape, dtype and variant only, ready to pass."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    sizes: tuple[Any, ...]
    partials: int = 0  # fp32 values


def flat(spec: Any, shape: torch.Size, dtype: torch.dtype, device: int, **variant: bool) -> Launch:
    """Of `spec.FORWARD`, over all values in the order of memory; `variant` goes to `spec.defines`."""
    name = storage.name(dtype)
    vectors, total = shape[1] // storage.vector_width(name), shape.numel() // storage.vector_width(name)
    defines = spec.defines(spec.FORWARD, name, **variant)
    blocks = channel_tiles.flat_blocks(total, threads=spec.FLAT_THREADS, unroll=spec.FLAT_UNROLL)
    return Launch(
        kernel=nvrtc.function(spec.FORWARD, *spec.KERNELS[spec.FORWARD], tuple(defines.items()), device),
        grid=(blocks, 1, 1),
        block=(spec.FLAT_THREADS, 1, 1),
        sizes=(np.uint32(total), np.uint32(vectors)),
    )


def summed(spec: Any, shape: torch.Size, dtype: torch.dtype, device: int) -> Launch:
    """Of `spec.BACKWARD`, which leaves a sum a channel by way of `partials`."""
    name, channels = storage.name(dtype), shape[1]
    rows = shape.numel() // channels
    found = spec.geometry(rows, channels, name, nvrtc.sm_count(device))
    defines = spec.defines(spec.BACKWARD, name)
    return Launch(
        kernel=nvrtc.function(spec.BACKWARD, *spec.KERNELS[spec.BACKWARD], tuple(defines.items()), device),
        grid=(found.row_blocks, found.tiles, 1),
        block=(spec.THREADS, 1, 1),
        sizes=(np.int64(rows), np.int32(found.vectors), np.int32(found.tile)),
        partials=found.row_blocks * 2 * channels,
    )
