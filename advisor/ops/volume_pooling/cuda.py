"""Launches of the kernels for pooling volumes. Shapes, windows and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from advisor.ops import storage
from advisor.ops.launches import Launch, launch
from advisor.ops.volume_pooling import spec
from advisor.ops.volume_pooling.spec import VolumeWindow

Shape = tuple[int, int, int, int, int]


@lru_cache(maxsize=4096)
def _plan(
    source: str,
    entry: str,
    shape: Shape,
    window: VolumeWindow,
    dtype: torch.dtype,
    backward: bool,
    indices: bool,
    device: int,
) -> Launch:
    """The launch for x of `shape`."""
    n, c, *size = shape
    name = storage.name(dtype)
    vectors = c // storage.vector_width(name)
    out = window.output(tuple(size))
    count = n * math.prod(size if backward else out) * vectors
    padding = window.padding if source != spec.AVG else ()
    defines = spec.defines(source, window, name, indices=indices)
    sizes = count, vectors, *size, *out, *padding
    return launch(source, defines, device, spec.blocks(count), spec.THREADS, sizes, entry=entry)


def empty_ndhwc(shape: Shape, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An uninitialised channels_last_3d [N, C, D, H, W] tensor on the device of `like`, in its dtype or this one."""
    _, c, d, h, w = shape
    return like.new_empty_strided(shape, (d * h * w * c, 1, h * w * c, w * c, c), dtype=dtype)


def _shape(x: torch.Tensor) -> Shape:
    n, c, d, h, w = x.shape
    return n, c, d, h, w


@lru_cache(maxsize=4096)
def _output(shape: torch.Size, window: VolumeWindow) -> Shape:
    n, c, *size = shape
    return n, c, *window.output((size[0], size[1], size[2]))


def max_pool3d_forward(
    x: torch.Tensor, window: VolumeWindow, *, indices: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns y [N, C, OD, OH, OW] and, with `indices`, each maximum's position in its window in uint8; channels_last_3d."""
    shape = _output(x.shape, window)
    y, index = empty_ndhwc(shape, x), empty_ndhwc(shape, x, torch.uint8) if indices else None
    device = x.device.index or 0
    _plan(spec.MAX_FORWARD, "", _shape(x), window, x.dtype, False, indices, device).run(x, y, index)
    return y, index


def max_pool3d_backward(dy: torch.Tensor, index: torch.Tensor, shape: Shape, window: VolumeWindow) -> torch.Tensor:
    """Returns dx of `shape`; all channels_last_3d."""
    dx = empty_ndhwc(shape, dy)
    device = dy.device.index or 0
    _plan(spec.MAX_BACKWARD, "", shape, window, dy.dtype, True, True, device).run(dy, index, dx)
    return dx


def avg_pool3d_forward(x: torch.Tensor, window: VolumeWindow) -> torch.Tensor:
    """Returns y [N, C, OD, OH, OW], channels_last_3d as x."""
    y = empty_ndhwc(_output(x.shape, window), x)
    device = x.device.index or 0
    _plan(spec.AVG, "avg_pool3d_forward", _shape(x), window, x.dtype, False, True, device).run(x, y)
    return y


def avg_pool3d_backward(dy: torch.Tensor, shape: Shape, window: VolumeWindow) -> torch.Tensor:
    """Returns dx of `shape`, channels_last_3d as dy."""
    dx = empty_ndhwc(shape, dy)
    device = dy.device.index or 0
    _plan(spec.AVG, "avg_pool3d_backward", shape, window, dy.dtype, True, True, device).run(dy, dx)
    return dx
