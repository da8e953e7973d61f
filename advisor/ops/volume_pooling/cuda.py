"""Launches of the kernels for pooling volumes. Shapes, windows and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.volume_pooling import spec
from advisor.ops.volume_pooling.spec import Window

Shape = tuple[int, int, int, int, int]


@dataclass(frozen=True, slots=True)
class _Launch:
    """Everything about a launch that depends on shape, dtype and variant only, ready to pass."""

    kernel: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    output: Shape


@lru_cache(maxsize=4096)
def _plan(
    source: str,
    entry: str,
    shape: Shape,
    window: Window,
    dtype: torch.dtype,
    backward: bool,
    indices: bool,
    device: int,
) -> _Launch:
    """The launch for x of `shape`."""
    n, c, *size = shape
    name = storage.name(dtype)
    vectors = c // storage.vector_width(name)
    out = window.output(tuple(size))
    count = n * math.prod(size if backward else out) * vectors
    padding = window.padding if source != spec.AVG else ()
    defines = spec.defines(source, window, name, indices=indices)
    return _Launch(
        nvrtc.function(source, entry, tuple(defines.items()), device),
        (spec.blocks(count), 1, 1),
        (np.uint32(count), *(np.int32(value) for value in (vectors, *size, *out, *padding))),
        (n, c, *out),
    )


def empty_ndhwc(shape: Shape, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised channels_last_3d [N, C, D, H, W] tensor on the device of `like`, in its dtype or this one."""
    _, c, d, h, w = shape
    return like.new_empty_strided(shape, (d * h * w * c, 1, h * w * c, w * c, c), dtype=dtype)


def _shape(x: torch.Tensor) -> Shape:
    n, c, d, h, w = x.shape
    return n, c, d, h, w


def _run(plan: _Launch, addresses: tuple[int, ...], device: int) -> None:
    plan.kernel(plan.grid, (spec.THREADS, 1, 1), (*addresses, *plan.arguments), 0, nvrtc.stream(device))


def max_pool3d_forward(x: torch.Tensor, window: Window, *, indices: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns y [N, C, OD, OH, OW] and, with `indices`, each maximum's position in its window in uint8; channels_last_3d."""
    device = x.device.index or 0
    plan = _plan(spec.MAX_FORWARD, "max_pool3d_forward", _shape(x), window, x.dtype, False, indices, device)
    y = empty_ndhwc(plan.output, x)
    index = empty_ndhwc(plan.output, x, torch.uint8) if indices else None
    _run(plan, (x.data_ptr(), y.data_ptr(), nvrtc.address(index)), device)
    return y, index


def max_pool3d_backward(dy: torch.Tensor, index: torch.Tensor, shape: Shape, window: Window) -> torch.Tensor:
    """Returns dx of `shape`; all channels_last_3d."""
    device = dy.device.index or 0
    plan = _plan(spec.MAX_BACKWARD, "max_pool3d_backward", shape, window, dy.dtype, True, True, device)
    dx = empty_ndhwc(shape, dy)
    _run(plan, (dy.data_ptr(), index.data_ptr(), dx.data_ptr()), device)
    return dx


def avg_pool3d_forward(x: torch.Tensor, window: Window) -> torch.Tensor:
    """Returns y [N, C, OD, OH, OW], channels_last_3d as x."""
    device = x.device.index or 0
    plan = _plan(spec.AVG, "avg_pool3d_forward", _shape(x), window, x.dtype, False, True, device)
    y = empty_ndhwc(plan.output, x)
    _run(plan, (x.data_ptr(), y.data_ptr()), device)
    return y


def avg_pool3d_backward(dy: torch.Tensor, shape: Shape, window: Window) -> torch.Tensor:
    """Returns dx of `shape`, channels_last_3d as dy."""
    device = dy.device.index or 0
    plan = _plan(spec.AVG, "avg_pool3d_backward", shape, window, dy.dtype, True, True, device)
    dx = empty_ndhwc(shape, dy)
    _run(plan, (dy.data_ptr(), dx.data_ptr()), device)
    return dx
