"""Launches of the padding kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.launches import Launch, launch
from advisor.ops.padding import spec
from advisor.ops.upsample.spec import geometry

Shape = tuple[int, int, int, int]


def padded(shape: Shape, amounts: spec.Amounts) -> Shape:
    """The result's shape."""
    n, c, h, w = shape
    left, right, top, bottom = amounts
    return n, c, h + top + bottom, w + left + right


@lru_cache(maxsize=4096)
def _plan(shape: Shape, amounts: spec.Amounts, mode: str, dtype: torch.dtype, backward: bool, device: int) -> Launch:
    """The launch for x of `shape`."""
    n, c, h, w = shape
    _, _, out_h, out_w = padded(shape, amounts)
    name = storage.name(dtype)
    source = spec.BACKWARD if backward else spec.FORWARD
    rows, columns = (h, w) if backward else (out_h, out_w)
    found = geometry(c // storage.vector_width(name), columns, rows, spec.ROWS)
    grid = found.column_tiles * found.channel_tiles, found.row_tiles, n
    sizes = found.vectors, h, w, out_h, out_w, amounts[2], amounts[0], found.channel_tiles
    return launch(source, spec.defines(name, mode), device, grid, found.block, sizes)


def forward(x: torch.Tensor, amounts: spec.Amounts, mode: str) -> torch.Tensor:
    """Returns x [N, C, H, W] padded by (left, right, top, bottom); both channels_last."""
    n, c, h, w = x.shape
    y = empty_nhwc(padded((n, c, h, w), amounts), x)
    _plan((n, c, h, w), amounts, mode, x.dtype, False, x.device.index or 0).run(x, y)
    return y


def backward(dy: torch.Tensor, shape: Shape, amounts: spec.Amounts, mode: str) -> torch.Tensor:
    """Returns dx of `shape` from dy of the padded one; both channels_last."""
    dx = empty_nhwc(shape, dy)
    _plan(shape, amounts, mode, dy.dtype, True, dy.device.index or 0).run(dy, dx)
    return dx
