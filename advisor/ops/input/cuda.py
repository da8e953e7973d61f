"""Launches of the kernel that normalises images. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.input import spec


@dataclass(frozen=True, slots=True)
class _Launch:
    """Everything about a launch that depends on shape, dtype and variant only, ready to pass."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[Any, ...]


@lru_cache(maxsize=1024)
def _plan(
    shape: tuple[int, int, int, int], x_nhwc: bool, y_nhwc: bool, dtype: torch.dtype, aligned: bool, device: int
) -> _Launch:
    name = storage.name(dtype)
    geometry = spec.geometry(shape, x_nhwc=x_nhwc, y_nhwc=y_nhwc, dtype=name, aligned=aligned)
    defines = spec.defines(channels=shape[1], x_nhwc=x_nhwc, y_nhwc=y_nhwc, dtype=name, width=geometry.width)
    return _Launch(
        nvrtc.function(spec.NORMALISE, "normalise_images", tuple(defines.items()), device),
        (geometry.blocks, 1, 1),
        (defines["THREADS"], 1, 1),
        (np.int32(geometry.groups), np.int32(geometry.groups_per_plane)),
    )


def normalise(
    pixels: torch.Tensor, table: torch.Tensor, dtype: torch.dtype, *, x_nhwc: bool, y_nhwc: bool
) -> torch.Tensor:
    """Returns [N, C, H, W] in `dtype`, channels_last with `y_nhwc`.

    Args:
        pixels: [N, C, H, W] uint8, dense, channels_last with `x_nhwc`; may begin anywhere.
        table: [C, 256] fp32, contiguous.
    """
    device = pixels.device.index or 0
    memory_format = torch.channels_last if y_nhwc else torch.contiguous_format
    y = torch.empty(pixels.shape, dtype=dtype, device=pixels.device, memory_format=memory_format)
    n, c, h, w = pixels.shape
    plan = _plan((n, c, h, w), x_nhwc, y_nhwc, dtype, pixels.data_ptr() % 16 == 0, device)
    arguments = (pixels.data_ptr(), table.data_ptr(), y.data_ptr(), *plan.arguments)
    plan.kernel(plan.grid, plan.block, arguments, 0, nvrtc.stream(device))
    return y
