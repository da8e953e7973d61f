"""Launches of the pooling kernels. Shapes, windows and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.launches import Launch, launch
from advisor.ops.pooling import spec
from advisor.ops.pooling.spec import PoolWindow

Shape = tuple[int, int, int, int]


def _windows(
    source: str,
    defines: dict[str, int],
    shape: Shape,
    window: PoolWindow,
    dtype: torch.dtype,
    device: int,
    constant: tuple[float, ...] = (),
) -> Launch:
    """A launch over the outputs of x of `shape`, or for a backward over its pixels."""
    n, c, h, w = shape
    vectors = c // storage.vector_width(storage.name(dtype))
    oh, ow = window.output(h, w)
    backward = source in (spec.MAX_BACKWARD, spec.AVG_BACKWARD)
    found = (
        spec.backward_geometry(window, vectors, h, w) if backward else spec.forward_geometry(window, vectors, oh, ow)
    )
    sizes = found.vectors, h, w, oh, ow, *window.padding, found.channel_tiles, *constant
    grid = found.column_tiles * found.channel_tiles, found.row_tiles, n
    return launch(source, defines, device, grid, found.block, sizes)


@lru_cache(maxsize=4096)
def _max(
    shape: Shape,
    dtype: torch.dtype,
    window: PoolWindow,
    backward: bool,
    indices: bool,
    device: int,
    bias: bool = False,
) -> Launch:
    source = spec.MAX_BACKWARD if backward else spec.MAX_FORWARD
    defines = spec.max_defines(source, window, storage.name(dtype), indices=indices, bias=bias)
    return _windows(source, defines, shape, window, dtype, device)


@lru_cache(maxsize=4096)
def _bias_backward(shape: Shape, dtype: torch.dtype, window: PoolWindow, device: int) -> Launch:
    n, c, h, w = shape
    name = storage.name(dtype)
    tile = spec.backward_geometry(window, c // storage.vector_width(name), h, w)
    grid = spec.bias_grid(tile, n, nvrtc.sm_count(device))
    sizes = tile.vectors, h, w, *window.output(h, w), *window.padding, tile.row_tiles, tile.column_tiles, n
    defines = spec.max_defines(spec.BIAS_BACKWARD, window, name)
    return launch(spec.BIAS_BACKWARD, defines, device, grid, tile.block, sizes).leaving(grid[1] * c)


@lru_cache(maxsize=4096)
def _avg(
    shape: Shape,
    dtype: torch.dtype,
    window: PoolWindow,
    count_include_pad: bool,
    divisor_override: int | None,
    backward: bool,
    device: int,
) -> Launch:
    source = spec.AVG_BACKWARD if backward else spec.AVG_FORWARD
    mode = spec.divisor_mode(window, count_include_pad=count_include_pad, divisor_override=divisor_override)
    defines = spec.avg_defines(source, window, storage.name(dtype), mode)
    constant = 1.0 / (divisor_override or window.taps)
    return _windows(source, defines, shape, window, dtype, device, (constant,))


@lru_cache(maxsize=4096)
def _global(shape: Shape, dtype: torch.dtype, backward: bool, device: int) -> Launch:
    n, c, h, w = shape
    name = storage.name(dtype)
    geometry = spec.global_geometry(n, c // storage.vector_width(name), h * w)
    defines, columns = spec.global_defines(name), geometry.columns
    if backward:
        grid, sizes = (geometry.channel_tiles, geometry.pixel_tiles, n), (geometry.vectors, h * w)
        return launch(spec.GLOBAL_AVG, defines, device, grid, geometry.block, sizes, entry="global_avg_pool_backward")
    of_sums = n, h * w, columns.vectors, columns.tile
    return launch(
        spec.GLOBAL_AVG, defines, device, columns.blocks, spec.THREADS, of_sums, entry="global_avg_pool_forward"
    )


def _shape(x: torch.Tensor) -> Shape:
    n, c, h, w = x.shape
    return n, c, h, w


@lru_cache(maxsize=4096)
def output(shape: torch.Size, window: PoolWindow) -> Shape:
    """The shape of a pooled tensor, looked up once for all alike."""
    n, c, h, w = shape
    return n, c, *window.output(h, w)


def max_pool_forward(x: torch.Tensor, window: PoolWindow, *, indices: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns y [N, C, OH, OW] and the positions of the maxima like it in bytes (empty without `indices`).

    x: [N, C, H, W] channels_last, fp16, bf16 or fp32.
    """
    shape = output(x.shape, window)
    y = empty_nhwc(shape, x)
    index = empty_nhwc(shape, x, torch.uint8) if indices else torch.empty(0, dtype=torch.uint8, device=x.device)
    plan = _max(_shape(x), x.dtype, window, False, indices, x.device.index or 0)
    plan.run(x, y, index if indices else None)
    return y, index


def max_pool_backward(dy: torch.Tensor, index: torch.Tensor, shape: Shape, window: PoolWindow) -> torch.Tensor:
    """Returns dx of `shape`. dy: channels_last, like the forward's y."""
    dx = empty_nhwc(shape, dy)
    _max(shape, dy.dtype, window, True, True, dy.device.index or 0).run(dy, index, dx)
    return dx


def bias_max_pool_forward(x: torch.Tensor, bias: torch.Tensor, window: PoolWindow) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns y [N, C, OH, OW] and the positions of the maxima like it in bytes, 255 where ReLU gives zero.

    x: [N, C, H, W] channels_last, fp16, bf16 or fp32; bias: [C] fp32, aligned.
    """
    shape = output(x.shape, window)
    y, index = empty_nhwc(shape, x), empty_nhwc(shape, x, torch.uint8)
    _max(_shape(x), x.dtype, window, False, True, x.device.index or 0, bias=True).run(x, y, index, bias)
    return y, index


def bias_max_pool_backward(
    dy: torch.Tensor, index: torch.Tensor, shape: Shape, window: PoolWindow
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns dx of `shape` and dbias [C] fp32. dy: channels_last, like the forward's y."""
    plan = _bias_backward(shape, dy.dtype, window, dy.device.index or 0)
    dx = empty_nhwc(shape, dy)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=dy.device)
    dbias = torch.empty(shape[1], dtype=torch.float32, device=dy.device)
    plan.run(dy, index, dx, partial, nvrtc.tickets(dy.device), dbias)
    return dx, dbias


def avg_pool_forward(
    x: torch.Tensor, window: PoolWindow, count_include_pad: bool, divisor_override: int | None
) -> torch.Tensor:
    """Returns y [N, C, OH, OW]. x: [N, C, H, W] channels_last, fp16, bf16 or fp32."""
    y = empty_nhwc(output(x.shape, window), x)
    device = x.device.index or 0
    _avg(_shape(x), x.dtype, window, count_include_pad, divisor_override, False, device).run(x, y)
    return y


def avg_pool_backward(
    dy: torch.Tensor, shape: Shape, window: PoolWindow, count_include_pad: bool, divisor_override: int | None
) -> torch.Tensor:
    """Returns dx of `shape`. dy: channels_last, like the forward's y."""
    dx = empty_nhwc(shape, dy)
    device = dy.device.index or 0
    _avg(shape, dy.dtype, window, count_include_pad, divisor_override, True, device).run(dy, dx)
    return dx


def global_avg_pool_forward(x: torch.Tensor) -> torch.Tensor:
    """Returns y [N, C, 1, 1]. x: [N, C, H, W] channels_last, fp16, bf16 or fp32."""
    y = empty_nhwc((x.shape[0], x.shape[1], 1, 1), x)
    _global(_shape(x), x.dtype, False, x.device.index or 0).run(x, y)
    return y


def global_avg_pool_backward(dy: torch.Tensor, shape: Shape) -> torch.Tensor:
    """Returns dx of `shape`. dy: [N, C, 1, 1], contiguous."""
    dx = empty_nhwc(shape, dy)
    _global(shape, dy.dtype, True, dy.device.index or 0).run(dy, dx)
    return dx
