"""Launches of the upsampling kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from advisor.ops import storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.launches import Launch, launch
from advisor.ops.pooling.spec import Pair
from advisor.ops.upsample import spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """How an upsampling maps pixels: output size, factors when those were given, mode."""

    size: Pair
    factors: tuple[float, float] | None
    mode: str
    align_corners: bool


@lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, int, int, int], channels: int, dtype: torch.dtype, resize: Resize, backward: bool, device: int
) -> Launch:
    """The launch for x of `shape` and a concatenation of `channels` channels."""
    n, c, h, w = shape
    name = storage.name(dtype)
    width = storage.vector_width(name)
    rows, columns = spec.axes(h, w, resize.size, resize.factors, align_corners=resize.align_corners)
    source = spec.BACKWARD if backward else spec.FORWARD
    geometry = (
        spec.geometry(c // width, w, h, spec.BACKWARD_ROWS)
        if backward
        else spec.geometry(c // width, resize.size[1], resize.size[0], spec.FORWARD_ROWS)
    )
    defines = spec.defines(
        source,
        name,
        resize.mode,
        align_corners=resize.align_corners,
        columns=spec.taps(columns, resize.mode, align_corners=resize.align_corners),
    )
    scales = (rows.scale, columns.scale, *((rows.inverse, columns.inverse) if backward else ()))
    sizes = geometry.vectors, channels // width, h, w, *resize.size, *scales, geometry.channel_tiles
    grid = geometry.column_tiles * geometry.channel_tiles, geometry.row_tiles, n
    return launch(source, defines, device, grid, geometry.block, sizes, entry=spec.KERNELS[source][0])


@lru_cache(maxsize=4096)
def _copy(pixels: int, c: int, channels: int, dtype: torch.dtype, resize: Resize, device: int) -> Launch:
    """The launch that copies c channels into a slice of `channels`; the variant is the upsampling's, which is compiled anyway."""
    name = storage.name(dtype)
    width = storage.vector_width(name)
    geometry = spec.copy_geometry(c // width, pixels)
    defines = spec.defines(spec.FORWARD, name, resize.mode, align_corners=resize.align_corners)
    sizes = geometry.vectors, channels // width, pixels, geometry.channel_tiles
    grid = geometry.column_tiles * geometry.channel_tiles
    return launch(spec.FORWARD, defines, device, grid, geometry.block, sizes, entry="concat_copy")


def forward(tensors: Sequence[torch.Tensor], position: int, resize: Resize) -> torch.Tensor:
    """Returns the concatenation along C [N, sum C, OH, OW], `tensors[position]` upsampled.

    tensors: channels_last, of one dtype (fp16, bf16 or fp32); all but the one at `position` have the output's size.
    """
    x = tensors[position]
    device = x.device.index or 0
    n, c, h, w = x.shape
    channels = sum(t.shape[1] for t in tensors)
    y = empty_nhwc((n, channels, *resize.size), x)
    at = y.data_ptr()
    for number, tensor in enumerate(tensors):
        if number == position:
            plan = _plan((n, c, h, w), channels, x.dtype, resize, False, device)
        else:
            pixels = n * resize.size[0] * resize.size[1]
            plan = _copy(pixels, tensor.shape[1], channels, x.dtype, resize, device)
        plan.run(tensor, at)
        at += tensor.shape[1] * x.element_size()
    return y


def backward(dy: torch.Tensor, first: int, shape: tuple[int, int, int, int], resize: Resize) -> torch.Tensor:
    """Returns dx of `shape` from channels first .. first + C of dy [N, sum C, OH, OW], channels_last."""
    plan = _plan(shape, dy.shape[1], dy.dtype, resize, True, dy.device.index or 0)
    dx = empty_nhwc(shape, dy)
    plan.run(dy.data_ptr() + first * dy.element_size(), dx)
    return dx
