"""Launches of the depthwise kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.depthwise import spec
from advisor.ops.depthwise.spec import Call

# Addresses of x or dy, weight, bias and result stand before these arguments, which depend on the shapes only.
_Launch = tuple[Any, tuple[int, int, int], tuple[int, int, int], tuple[Any, ...]]


@lru_cache(maxsize=4096)
def _band(
    call: Call, source: str, dtype: torch.dtype, weight_dtype: torch.dtype, device: int, flip: bool, bias: bool
) -> _Launch:
    """A launch of a tensor-core kernel."""
    plan = spec.band(call, weight=source == spec.BAND_WEIGHT)
    shape = spec.band_geometry(call, plan, nvrtc.sm_count(device))
    defines = spec.band_defines(call, plan, storage.name(dtype), storage.name(weight_dtype), bias=bias, flip=flip)
    kernel = nvrtc.function(source, spec.KERNELS[source][0], tuple(defines.items()), device)
    arguments = (
        shape.items,
        call.batch,
        shape.vectors,
        call.height,
        call.width,
        call.out_height,
        call.out_width,
        *call.padding,
        plan.layout.origin,
        plan.layout.lead,
        shape.groups,
        shape.column_tiles,
        shape.segment_rows,
    )
    return kernel, shape.grid, (plan.block.threads, 1, 1), tuple(map(np.int32, arguments))


def _ring_arguments(call: Call, shape: spec.Geometry) -> tuple[Any, ...]:
    sizes = (call.height, call.width, call.out_height, call.out_width, *call.padding)
    return tuple(
        map(
            np.int32,
            (shape.items, shape.vectors, shape.tile, *sizes, shape.strips, shape.segments, shape.segment_rows),
        )
    )


@lru_cache(maxsize=4096)
def _strips(
    call: Call,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: int,
    flip: bool,
    bias: bool,
    moments: bool = False,
) -> _Launch:
    ring = spec.strips_ring(call, storage.name(dtype))
    shape = spec.ring_geometry(call, ring, storage.name(dtype), nvrtc.sm_count(device), backward=False)
    names = storage.name(dtype), storage.name(weight_dtype)
    defines = spec.ring_defines(call, ring, *names, backward=False, bias=bias, flip=flip, moments=moments)
    kernel = nvrtc.function(spec.STRIPS, spec.KERNELS[spec.STRIPS][0], tuple(defines.items()), device)
    return kernel, shape.grid, (ring.threads, 1, 1), _ring_arguments(call, shape)


@lru_cache(maxsize=4096)
def _forward(call: Call, dtype: torch.dtype, weight_dtype: torch.dtype, device: int, flip: bool) -> _Launch:
    config = spec.forward_config(call, storage.name(dtype), nvrtc.arch(device))
    shape = spec.forward_geometry(call, config, nvrtc.sm_count(device))
    defines = spec.forward_defines(call, config, storage.name(dtype), storage.name(weight_dtype), flip=flip)
    kernel = nvrtc.function(spec.FORWARD, spec.KERNELS[spec.FORWARD][0], tuple(defines.items()), device)
    sizes = (call.height, call.width, call.out_height, call.out_width, *call.padding, call.dilation)
    arguments = (
        np.int64(shape.items),
        *map(np.int32, (shape.vectors, shape.tile, *sizes, shape.strips, shape.segments, shape.segment_rows)),
    )
    return kernel, shape.grid, (config.threads, 1, 1), arguments


def _convolve(
    call: Call, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, flip: bool
) -> None:
    device = x.device.index or 0
    if spec.banded(call, storage.name(x.dtype), "data" if flip else "forward"):
        kernel, grid, block, sizes = _band(call, spec.BAND, x.dtype, weight.dtype, device, flip, bias is not None)
    elif spec.ringed(call, storage.name(x.dtype), "data" if flip else "forward"):
        kernel, grid, block, sizes = _strips(call, x.dtype, weight.dtype, device, flip, bias is not None)
    else:
        kernel, grid, block, sizes = _forward(call, x.dtype, weight.dtype, device, flip)
    pointers = (x.data_ptr(), weight.data_ptr(), nvrtc.address(bias), y.data_ptr())
    kernel(grid, block, (*pointers, *sizes), 0, nvrtc.stream(device))


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call, *, moments: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns y [N, C, OH, OW] channels_last in x's dtype and, if asked for and STRIPS runs, its moments [parts, 3, C] fp32.

    x: channels_last; weight [C, 1, k, k], bias [C]: contiguous.
    """
    y = empty_nhwc((call.batch, call.channels, call.out_height, call.out_width), x)
    if not moments or not spec.ringed(call, storage.name(x.dtype), "forward"):
        _convolve(call, x, weight, bias, y, False)
        return y, None
    device = x.device.index or 0
    kernel, grid, block, sizes = _strips(call, x.dtype, weight.dtype, device, False, bias is not None, True)
    parts = torch.empty((grid[0], 3, call.channels), dtype=torch.float32, device=x.device)
    pointers = (x.data_ptr(), weight.data_ptr(), nvrtc.address(bias), y.data_ptr())
    kernel(grid, block, (*pointers, *sizes, parts.data_ptr()), 0, nvrtc.stream(device))
    return y, parts


@lru_cache(maxsize=4096)
def _strided_data(call: Call, dtype: torch.dtype, weight_dtype: torch.dtype, device: int) -> _Launch:
    config = spec.data_config(call, storage.name(dtype))
    shape = spec.data_geometry(call, config, nvrtc.sm_count(device))
    defines = spec.data_defines(call, config, storage.name(dtype), storage.name(weight_dtype))
    kernel = nvrtc.function(spec.BACKWARD_DATA, spec.KERNELS[spec.BACKWARD_DATA][0], tuple(defines.items()), device)
    sizes = (call.height, call.width, call.out_height, call.out_width, *call.padding)
    arguments = (
        np.int64(shape.items),
        *map(np.int32, (shape.vectors, shape.tile, *sizes, shape.strips, shape.segments, shape.segment_rows)),
    )
    return kernel, shape.grid, (config.threads, 1, 1), arguments


def backward_data(dy: torch.Tensor, weight: torch.Tensor, call: Call) -> torch.Tensor:
    """Returns dx [N, C, H, W] channels_last in dy's dtype. dy: channels_last."""
    dx = empty_nhwc((call.batch, call.channels, call.height, call.width), dy)
    if call.stride == 1:
        _convolve(call.transposed(), dy, weight, None, dx, True)
        return dx
    device = dy.device.index or 0
    kernel, grid, block, sizes = _strided_data(call, dy.dtype, weight.dtype, device)
    kernel(grid, block, (dy.data_ptr(), weight.data_ptr(), dx.data_ptr(), *sizes), 0, nvrtc.stream(device))
    return dx


@dataclass(frozen=True, slots=True)
class _Weight:
    partial: _Launch
    total: _Launch
    partials: int  # fp32 values


def _summed(call: Call, launch: _Launch, weight_dtype: torch.dtype, device: int) -> _Weight:
    """`launch`, which writes a block's partial sums, and the one that adds them up."""
    defines = tuple(spec.sum_defines(call, storage.name(weight_dtype)).items())
    total = nvrtc.function(spec.WEIGHT_SUM, spec.KERNELS[spec.WEIGHT_SUM][0], defines, device)
    columns = (call.kernel**2 + 1) * call.channels
    blocks = launch[1][0]
    grid = (-(-columns // spec.SUM_COLUMNS), 1, 1)
    return _Weight(
        partial=launch,
        total=(total, grid, (spec.SUM_THREADS, 1, 1), (np.int32(blocks), np.int32(call.channels))),
        partials=blocks * columns,
    )


@lru_cache(maxsize=4096)
def _weight(call: Call, dtype: torch.dtype, weight_dtype: torch.dtype, device: int, bias: bool) -> _Weight:
    if spec.banded(call, storage.name(dtype), "weight"):
        return _summed(
            call, _band(call, spec.BAND_WEIGHT, dtype, weight_dtype, device, False, bias), weight_dtype, device
        )
    config = spec.weight_config(call, storage.name(dtype))
    shape = spec.weight_geometry(call, config, nvrtc.sm_count(device))
    defines = tuple(spec.weight_defines(call, config, storage.name(dtype), storage.name(weight_dtype)).items())
    kernel = nvrtc.function(spec.BACKWARD_WEIGHT, spec.KERNELS[spec.BACKWARD_WEIGHT][0], defines, device)
    sizes = (call.height, call.width, call.out_height, call.out_width, *call.padding, call.dilation)
    arguments = (
        np.int64(shape.items),
        *map(np.int32, (shape.vectors, shape.tile, *sizes, shape.strips, shape.segments, shape.segment_rows)),
    )
    return _summed(call, (kernel, shape.grid, (config.threads, 1, 1), arguments), weight_dtype, device)


def backward_weight(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns dweight like weight, and dbias like bias (None without one). dy and x: channels_last, one dtype."""
    device = x.device.index or 0
    plan = _weight(call, x.dtype, weight.dtype, device, bias is not None)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=x.device)
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    dbias = None if bias is None else torch.empty_like(bias)
    stream = nvrtc.stream(device)
    kernel, grid, block, sizes = plan.partial
    kernel(grid, block, (dy.data_ptr(), x.data_ptr(), partial.data_ptr(), *sizes), 0, stream)
    kernel, grid, block, sizes = plan.total
    pointers = (partial.data_ptr(), dweight.data_ptr(), nvrtc.address(dbias))
    kernel(grid, block, (*pointers, *sizes), 0, stream)
    return dweight, dbias


@lru_cache(maxsize=4096)
def _backward(call: Call, dtype: torch.dtype, weight_dtype: torch.dtype, device: int, bias: bool) -> _Weight:
    ring = spec.backward_ring(call, storage.name(dtype))
    shape = spec.ring_geometry(call, ring, storage.name(dtype), nvrtc.sm_count(device), backward=True)
    defines = spec.ring_defines(call, ring, storage.name(dtype), storage.name(weight_dtype), backward=True, bias=bias)
    kernel = nvrtc.function(spec.BACKWARD, spec.KERNELS[spec.BACKWARD][0], tuple(defines.items()), device)
    launch = (kernel, shape.grid, (ring.threads, 1, 1), _ring_arguments(call, shape))
    return _summed(call, launch, weight_dtype, device)


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns dx like x, dweight like weight and dbias like bias (None without one). dy and x: channels_last, one dtype."""
    device = x.device.index or 0
    plan = _backward(call, x.dtype, weight.dtype, device, bias is not None)
    dx = empty_nhwc((call.batch, call.channels, call.height, call.width), dy)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=x.device)
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    dbias = None if bias is None else torch.empty_like(bias)
    stream = nvrtc.stream(device)
    kernel, grid, block, sizes = plan.partial
    pointers = (dy.data_ptr(), x.data_ptr(), weight.data_ptr(), dx.data_ptr(), partial.data_ptr())
    kernel(grid, block, (*pointers, *sizes), 0, stream)
    kernel, grid, block, sizes = plan.total
    kernel(
        grid,
        block,
        (partial.data_ptr(), dweight.data_ptr(), nvrtc.address(dbias), *sizes),
        0,
        stream,
    )
    return dx, dweight, dbias
