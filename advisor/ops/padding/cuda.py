"""Launches of the padding kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.padding import spec
from advisor.ops.upsample.spec import geometry

Shape = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Launch:
    """Everything about a launch that depends on shape, dtype and variant only, ready to pass."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    arguments: tuple[Any, ...]


def padded(shape: Shape, amounts: spec.Amounts) -> Shape:
    """The result's shape."""
    n, c, h, w = shape
    left, right, top, bottom = amounts
    return n, c, h + top + bottom, w + left + right


@lru_cache(maxsize=4096)
def _plan(shape: Shape, amounts: spec.Amounts, mode: str, dtype: torch.dtype, backward: bool, device: int) -> _Launch:
    """The launch for x of `shape`."""
    n, c, h, w = shape
    _, _, out_h, out_w = padded(shape, amounts)
    name = storage.name(dtype)
    source = spec.BACKWARD if backward else spec.FORWARD
    rows, columns = (h, w) if backward else (out_h, out_w)
    found = geometry(c // storage.vector_width(name), columns, rows, spec.ROWS)
    return _Launch(
        nvrtc.function(source, spec.KERNELS[source][0], tuple(spec.defines(name, mode).items()), device),
        (found.column_tiles * found.channel_tiles, found.row_tiles, n),
        found.block,
        tuple(
            np.int32(value)
            for value in (found.vectors, h, w, out_h, out_w, amounts[2], amounts[0], found.channel_tiles)
        ),
    )


def forward(x: torch.Tensor, amounts: spec.Amounts, mode: str) -> torch.Tensor:
    """Returns x [N, C, H, W] padded by (left, right, top, bottom); both channels_last."""
    device = x.device.index or 0
    n, c, h, w = x.shape
    plan = _plan((n, c, h, w), amounts, mode, x.dtype, False, device)
    y = empty_nhwc(padded((n, c, h, w), amounts), x)
    plan.kernel(plan.grid, plan.block, (x.data_ptr(), y.data_ptr(), *plan.arguments), 0, nvrtc.stream(device))
    return y


def backward(dy: torch.Tensor, shape: Shape, amounts: spec.Amounts, mode: str) -> torch.Tensor:
    """Returns dx of `shape` from dy of the padded one; both channels_last."""
    device = dy.device.index or 0
    plan = _plan(shape, amounts, mode, dy.dtype, True, device)
    dx = empty_nhwc(shape, dy)
    plan.kernel(plan.grid, plan.block, (dy.data_ptr(), dx.data_ptr(), *plan.arguments), 0, nvrtc.stream(device))
    return dx
