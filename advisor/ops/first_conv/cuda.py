"""Launches of the first-convolution kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.first_conv import spec
from advisor.ops.first_conv.spec import Call


def _dense(x: torch.Tensor) -> bool:
    """Whether x is NHWC without gaps and its pixels can be copied 16 bytes at a time."""
    return x.is_contiguous(memory_format=torch.channels_last) and x.data_ptr() % 16 == 0


def _channels_last(weight: torch.Tensor) -> bool:
    return not weight.is_contiguous()


def _parameter(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself where it is contiguous or channels_last, else a copy that is."""
    return weight if weight.is_contiguous(memory_format=torch.channels_last) else weight.contiguous()


@dataclass(frozen=True, slots=True)
class _Launch:
    """A kernel with what depends on shapes only: `tiles`, and the sizes that stand behind x's strides."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    tiles: np.int64
    sizes: tuple[np.int32, ...]


def _launch(kernel: Any, call: Call, defines: dict[str, int], device: int) -> _Launch:
    shape = spec.geometry(call, defines, nvrtc.sm_count(device))
    sizes = (call.height, call.width, call.out_height, call.out_width, call.padding[0], shape.strips, shape.bands)
    return _Launch(
        kernel, (shape.grid, 1, 1), (defines["THREADS"], 1, 1), np.int64(shape.tiles), tuple(map(np.int32, sizes))
    )


@lru_cache(maxsize=4096)
def _strides(n: int, c: int, h: int, w: int) -> tuple[np.int64, ...]:
    return tuple(map(np.int64, (n, h, w, c)))


@lru_cache(maxsize=4096)
def _forward(
    call: Call,
    dtype: torch.dtype,
    compute: torch.dtype,
    weight_dtype: torch.dtype,
    dense: bool,
    device: int,
    moments: bool,
) -> tuple[_Launch, int]:
    """The launch, and the parts of the moments that it leaves."""
    names = storage.name(dtype), storage.name(compute), storage.name(weight_dtype)
    raw = spec.copied(call, dtype=names[0], compute=names[1], dense=dense)
    defines = spec.forward_defines(call, *names, raw=raw, moments=moments)
    kernel = nvrtc.function(spec.FORWARD, spec.KERNELS[spec.FORWARD][0], tuple(defines.items()), device)
    launch = _launch(kernel, call, defines, device)
    return launch, spec.moment_parts(defines, launch.grid[0])


_LAYOUT = (np.int32(0), np.int32(1))


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    call: Call,
    compute: torch.dtype,
    *,
    moments: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns y [N, C, OH, OW] channels_last in the dtype `compute` and, if asked for, its moments [parts, 3, C] fp32.

    x: [N, 3, H, W] of any strides; bias [C]: contiguous.
    """
    device = x.device.index or 0
    plan, parts = _forward(call, x.dtype, compute, weight.dtype, _dense(x), device, moments)
    weight = _parameter(weight)
    shape = (call.batch, call.channels, call.out_height, call.out_width)
    y = empty_nhwc(shape, x, compute)
    pointers = (x.data_ptr(), weight.data_ptr(), nvrtc.address(bias), y.data_ptr())
    layout = _LAYOUT[_channels_last(weight)]
    arguments: tuple[Any, ...] = (*pointers, plan.tiles, *_strides(*x.stride()), *plan.sizes, layout)
    left = None
    if moments:
        left = torch.empty((parts, 3, call.channels), dtype=torch.float32, device=x.device)
        arguments = (*arguments, left.data_ptr())
    plan.kernel(plan.grid, plan.block, arguments, 0, nvrtc.stream(device))
    return y, left


@dataclass(frozen=True, slots=True)
class _Weight:
    partial: _Launch
    total: Any
    total_grid: tuple[int, int, int]
    blocks: np.int32
    partials: int  # fp32 values


@lru_cache(maxsize=4096)
def _weight(
    call: Call, dtype: torch.dtype, compute: torch.dtype, weight_dtype: torch.dtype, dense: bool, device: int
) -> _Weight:
    names = storage.name(dtype), storage.name(compute), storage.name(weight_dtype)
    raw = spec.copied(call, dtype=names[0], compute=names[1], dense=dense)
    defines = spec.weight_defines(call, *names, raw=raw, arch=nvrtc.arch(device))
    kernel, total = (
        nvrtc.function(spec.BACKWARD_WEIGHT, entry, tuple(defines.items()), device)
        for entry in spec.KERNELS[spec.BACKWARD_WEIGHT]
    )
    launch = _launch(kernel, call, defines, device)
    each = spec.partials(defines)
    return _Weight(launch, total, (each // spec.SUM_COLUMNS, 1, 1), np.int32(launch.grid[0]), launch.grid[0] * each)


def backward_weight(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns dweight like weight, and dbias like bias (None without one). dy: channels_last, 16-byte aligned."""
    device = x.device.index or 0
    plan = _weight(call, x.dtype, dy.dtype, weight.dtype, _dense(x), device)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=x.device)
    weight = _parameter(weight)
    dweight = torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    stream = nvrtc.stream(device)
    launch = plan.partial
    arguments = (x.data_ptr(), dy.data_ptr(), partial.data_ptr(), launch.tiles, *_strides(*x.stride()), *launch.sizes)
    launch.kernel(launch.grid, launch.block, arguments, 0, stream)
    pointers = (partial.data_ptr(), dweight.data_ptr(), nvrtc.address(dbias))
    plan.total(plan.total_grid, launch.block, (*pointers, plan.blocks, _LAYOUT[_channels_last(weight)]), 0, stream)
    return dweight, dbias
