"""Launches of kernels that read [N, C, H, W] channels_last with a value a channel: one flat pass, or one by tiles of channels with a sum each.

`spec` is a family's module with FORWARD, BACKWARD, FLAT_THREADS, FLAT_UNROLL, THREADS, defines() and geometry(). Families keep what is
made here for each shape: making it takes longer than the kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from advisor.ops import channel_tiles, nvrtc, storage
from advisor.ops.launches import Launch, launch


def flat(spec: Any, shape: torch.Size, dtype: torch.dtype, device: int, **variant: bool) -> Launch:
    """Of `spec.FORWARD`, over all values in the order of memory; `variant` goes to `spec.defines`."""
    name = storage.name(dtype)
    vectors, total = shape[1] // storage.vector_width(name), shape.numel() // storage.vector_width(name)
    blocks = channel_tiles.flat_blocks(total, threads=spec.FLAT_THREADS, unroll=spec.FLAT_UNROLL)
    defines = spec.defines(spec.FORWARD, name, **variant)
    return launch(spec.FORWARD, defines, device, blocks, spec.FLAT_THREADS, (total, vectors))


def summed(spec: Any, shape: torch.Size, dtype: torch.dtype, device: int) -> Launch:
    """Of `spec.BACKWARD`, which leaves a sum a channel by way of `partials`."""
    name, channels = storage.name(dtype), shape[1]
    rows = shape.numel() // channels
    found = spec.geometry(rows, channels, name, nvrtc.sm_count(device))
    grid, sizes = (found.row_blocks, found.tiles), (rows, found.vectors, found.tile)
    partials = found.row_blocks * 2 * channels
    return launch(spec.BACKWARD, spec.defines(spec.BACKWARD, name), device, grid, spec.THREADS, sizes).leaving(partials)
