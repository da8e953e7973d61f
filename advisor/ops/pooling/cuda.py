"""Launches of the pooling kernels. Shapes, windows and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.pooling import spec
from advisor.ops.pooling.spec import Window


@dataclass(frozen=True, slots=True)
class _Launch:
    """Everything about a launch that depends on shape, dtype and variant only, ready to pass."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    out_size: tuple[int, int]
    sizes: tuple[Any, ...]
    partials: int = 0  # fp32 values of scratch


def window_sizes(
    geometry: spec.Geometry, height: int, width: int, out_height: int, out_width: int, window: Window
) -> tuple[Any, ...]:
    """The integer arguments that all window kernels take first."""
    values = (geometry.vectors, height, width, out_height, out_width, *window.padding)
    return tuple(np.int32(value) for value in values)


def _launch(
    source: str, defines: dict[str, int], geometry: spec.Geometry, images: int, sizes: tuple[Any, ...], device: int
) -> tuple[Any, tuple[int, int, int], tuple[Any, ...]]:
    (entry,) = spec.KERNELS[source]
    kernel = nvrtc.function(source, entry, tuple(defines.items()), device)
    grid = (geometry.column_tiles * geometry.channel_tiles, geometry.row_tiles, images)
    return kernel, grid, (*sizes, np.int32(geometry.channel_tiles))


@lru_cache(maxsize=4096)
def _max(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    window: Window,
    backward: bool,
    indices: bool,
    device: int,
    bias: bool = False,
) -> _Launch:
    n, c, h, w = shape
    name = storage.name(dtype)
    vectors = c // storage.vector_width(name)
    oh, ow = window.output(h, w)
    source = spec.MAX_BACKWARD if backward else spec.MAX_FORWARD
    geometry = (
        spec.backward_geometry(window, vectors, h, w) if backward else spec.forward_geometry(window, vectors, oh, ow)
    )
    kernel, grid, sizes = _launch(
        source,
        spec.max_defines(source, window, name, indices=indices, bias=bias),
        geometry,
        n,
        window_sizes(geometry, h, w, oh, ow, window),
        device,
    )
    return _Launch(kernel, grid, geometry.block, (oh, ow), sizes)


@lru_cache(maxsize=4096)
def _bias_backward(shape: tuple[int, int, int, int], dtype: torch.dtype, window: Window, device: int) -> _Launch:
    n, c, h, w = shape
    name = storage.name(dtype)
    oh, ow = window.output(h, w)
    (entry,) = spec.KERNELS[spec.BIAS_BACKWARD]
    tile = spec.backward_geometry(window, c // storage.vector_width(name), h, w)
    defines = spec.max_defines(spec.BIAS_BACKWARD, window, name)
    walked = (np.int32(tile.row_tiles), np.int32(tile.column_tiles), np.int32(n))
    grid = spec.bias_grid(tile, n, nvrtc.sm_count(device))
    return _Launch(
        kernel=nvrtc.function(spec.BIAS_BACKWARD, entry, tuple(defines.items()), device),
        grid=grid,
        block=tile.block,
        out_size=(oh, ow),
        sizes=(*window_sizes(tile, h, w, oh, ow, window), *walked),
        partials=grid[1] * c,
    )


@lru_cache(maxsize=4096)
def _avg(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    window: Window,
    count_include_pad: bool,
    divisor_override: int | None,
    backward: bool,
    device: int,
) -> _Launch:
    n, c, h, w = shape
    name = storage.name(dtype)
    vectors = c // storage.vector_width(name)
    oh, ow = window.output(h, w)
    source = spec.AVG_BACKWARD if backward else spec.AVG_FORWARD
    geometry = (
        spec.backward_geometry(window, vectors, h, w) if backward else spec.forward_geometry(window, vectors, oh, ow)
    )
    mode = spec.divisor_mode(window, count_include_pad=count_include_pad, divisor_override=divisor_override)
    kernel, grid, sizes = _launch(
        source,
        spec.avg_defines(source, window, name, mode),
        geometry,
        n,
        window_sizes(geometry, h, w, oh, ow, window),
        device,
    )
    constant = np.float32(1.0 / (divisor_override or window.taps))
    return _Launch(kernel, grid, geometry.block, (oh, ow), (*sizes, constant))


@lru_cache(maxsize=4096)
def _global(shape: tuple[int, int, int, int], dtype: torch.dtype, device: int) -> tuple[_Launch, _Launch]:
    n, c, h, w = shape
    name = storage.name(dtype)
    geometry = spec.global_geometry(n, c // storage.vector_width(name), h * w)
    defines = tuple(spec.global_defines(name).items())
    forward, backward = (
        nvrtc.function(spec.GLOBAL_AVG, entry, defines, device) for entry in spec.KERNELS[spec.GLOBAL_AVG]
    )
    sizes = (np.int32(geometry.vectors), np.int32(h * w))
    columns = geometry.columns
    summed = tuple(np.int32(value) for value in (n, h * w, columns.vectors, columns.tile))
    return (
        _Launch(forward, (columns.blocks, 1, 1), (spec.THREADS, 1, 1), (1, 1), summed),
        _Launch(backward, (geometry.channel_tiles, geometry.pixel_tiles, n), geometry.block, (1, 1), sizes),
    )


def _shape(x: torch.Tensor) -> tuple[int, int, int, int]:
    n, c, h, w = x.shape
    return n, c, h, w


def max_pool_forward(x: torch.Tensor, window: Window, *, indices: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns y [N, C, OH, OW] and the positions of the maxima like it in bytes (empty without `indices`).

    x: [N, C, H, W] channels_last, fp16, bf16 or fp32.
    """
    device = x.device.index or 0
    plan = _max(_shape(x), x.dtype, window, False, indices, device)
    shape = (x.shape[0], x.shape[1], *plan.out_size)
    y = empty_nhwc(shape, x)
    index = empty_nhwc(shape, x, torch.uint8) if indices else torch.empty(0, dtype=torch.uint8, device=x.device)
    plan.kernel(
        plan.grid,
        plan.block,
        (x.data_ptr(), y.data_ptr(), index.data_ptr() if indices else 0, *plan.sizes),
        0,
        nvrtc.stream(device),
    )
    return y, index


def max_pool_backward(
    dy: torch.Tensor, index: torch.Tensor, shape: tuple[int, int, int, int], window: Window
) -> torch.Tensor:
    """Returns dx of `shape`. dy: channels_last, like the forward's y."""
    device = dy.device.index or 0
    plan = _max(shape, dy.dtype, window, True, True, device)
    dx = empty_nhwc(shape, dy)
    plan.kernel(
        plan.grid,
        plan.block,
        (dy.data_ptr(), index.data_ptr(), dx.data_ptr(), *plan.sizes),
        0,
        nvrtc.stream(device),
    )
    return dx


def bias_max_pool_forward(x: torch.Tensor, bias: torch.Tensor, window: Window) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns y [N, C, OH, OW] and the positions of the maxima like it in bytes, 255 where ReLU gives zero.

    x: [N, C, H, W] channels_last, fp16, bf16 or fp32; bias: [C] fp32, aligned.
    """
    device = x.device.index or 0
    plan = _max(_shape(x), x.dtype, window, False, True, device, bias=True)
    shape = (x.shape[0], x.shape[1], *plan.out_size)
    y, index = empty_nhwc(shape, x), empty_nhwc(shape, x, torch.uint8)
    plan.kernel(
        plan.grid,
        plan.block,
        (x.data_ptr(), y.data_ptr(), index.data_ptr(), bias.data_ptr(), *plan.sizes),
        0,
        nvrtc.stream(device),
    )
    return y, index


def bias_max_pool_backward(
    dy: torch.Tensor, index: torch.Tensor, shape: tuple[int, int, int, int], window: Window
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns dx of `shape` and dbias [C] fp32. dy: channels_last, like the forward's y."""
    device = dy.device.index or 0
    plan = _bias_backward(shape, dy.dtype, window, device)
    dx = empty_nhwc(shape, dy)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=dy.device)
    dbias = torch.empty(shape[1], dtype=torch.float32, device=dy.device)
    plan.kernel(
        plan.grid,
        plan.block,
        (
            dy.data_ptr(),
            index.data_ptr(),
            dx.data_ptr(),
            partial.data_ptr(),
            nvrtc.tickets(dy.device),
            dbias.data_ptr(),
            *plan.sizes,
        ),
        0,
        nvrtc.stream(device),
    )
    return dx, dbias


def avg_pool_forward(
    x: torch.Tensor, window: Window, count_include_pad: bool, divisor_override: int | None
) -> torch.Tensor:
    """Returns y [N, C, OH, OW]. x: [N, C, H, W] channels_last, fp16, bf16 or fp32."""
    device = x.device.index or 0
    plan = _avg(_shape(x), x.dtype, window, count_include_pad, divisor_override, False, device)
    y = empty_nhwc((x.shape[0], x.shape[1], *plan.out_size), x)
    plan.kernel(plan.grid, plan.block, (x.data_ptr(), y.data_ptr(), *plan.sizes), 0, nvrtc.stream(device))
    return y


def avg_pool_backward(
    dy: torch.Tensor,
    shape: tuple[int, int, int, int],
    window: Window,
    count_include_pad: bool,
    divisor_override: int | None,
) -> torch.Tensor:
    """Returns dx of `shape`. dy: channels_last, like the forward's y."""
    device = dy.device.index or 0
    plan = _avg(shape, dy.dtype, window, count_include_pad, divisor_override, True, device)
    dx = empty_nhwc(shape, dy)
    plan.kernel(plan.grid, plan.block, (dy.data_ptr(), dx.data_ptr(), *plan.sizes), 0, nvrtc.stream(device))
    return dx


def global_avg_pool_forward(x: torch.Tensor) -> torch.Tensor:
    """Returns y [N, C, 1, 1]. x: [N, C, H, W] channels_last, fp16, bf16 or fp32."""
    device = x.device.index or 0
    plan, _ = _global(_shape(x), x.dtype, device)
    y = empty_nhwc((x.shape[0], x.shape[1], 1, 1), x)
    plan.kernel(plan.grid, plan.block, (x.data_ptr(), y.data_ptr(), *plan.sizes), 0, nvrtc.stream(device))
    return y


def global_avg_pool_backward(dy: torch.Tensor, shape: tuple[int, int, int, int]) -> torch.Tensor:
    """Returns dx of `shape`. dy: [N, C, 1, 1], contiguous."""
    device = dy.device.index or 0
    _, plan = _global(shape, dy.dtype, device)
    dx = empty_nhwc(shape, dy)
    plan.kernel(plan.grid, plan.block, (dy.data_ptr(), dx.data_ptr(), *plan.sizes), 0, nvrtc.stream(device))
    return dx
