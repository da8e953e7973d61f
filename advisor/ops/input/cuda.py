"""Launches of the kernel that normalises images. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import storage
from advisor.ops.input import spec
from advisor.ops.launches import Launch, launch


@lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, int, int, int], x_nhwc: bool, y_nhwc: bool, dtype: torch.dtype, aligned: bool, device: int
) -> Launch:
    name = storage.name(dtype)
    geometry = spec.geometry(shape, x_nhwc=x_nhwc, y_nhwc=y_nhwc, dtype=name, aligned=aligned)
    defines = spec.defines(channels=shape[1], x_nhwc=x_nhwc, y_nhwc=y_nhwc, dtype=name, width=geometry.width)
    sizes = geometry.groups, geometry.groups_per_plane
    return launch(spec.NORMALISE, defines, device, geometry.blocks, defines["THREADS"], sizes)


def normalise(
    pixels: torch.Tensor, table: torch.Tensor, dtype: torch.dtype, *, x_nhwc: bool, y_nhwc: bool
) -> torch.Tensor:
    """Returns [N, C, H, W] in `dtype`, channels_last with `y_nhwc`.

    Args:
        pixels: [N, C, H, W] uint8, dense, channels_last with `x_nhwc`; may begin anywhere.
        table: [C, 256] fp32, contiguous.
    """
    memory_format = torch.channels_last if y_nhwc else torch.contiguous_format
    y = torch.empty(pixels.shape, dtype=dtype, device=pixels.device, memory_format=memory_format)
    n, c, h, w = pixels.shape
    aligned = pixels.data_ptr() % 16 == 0
    _plan((n, c, h, w), x_nhwc, y_nhwc, dtype, aligned, pixels.device.index or 0).run(pixels, table, y)
    return y
