"""Launches of the grouped convolution kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import torch

from advisor.ops import nvrtc, sources, storage, tensor_map
from advisor.ops.alignment import empty_nhwc
from advisor.ops.conv3x3 import cuda as conv3x3
from advisor.ops.conv3x3.weight import halo
from advisor.ops.grouped import spec, weight, wide
from advisor.ops.grouped.conv import GroupedConv
from advisor.ops.launches import Launch, launch


def _plan(
    source: str,
    call: GroupedConv,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: int,
    transposed: bool,
    moments: bool,
) -> tuple[spec.GroupedPlan, dict[str, int], tuple[int, ...]]:
    """The plan, the macros, and the sizes with which all kernels begin."""
    plan = spec.plan(source, call, nvrtc.sm_count(device))
    names = storage.name(dtype), storage.name(weight_dtype)
    macros = spec.defines(call, plan, *names, transposed=transposed, moments=moments)
    sizes = (
        *(plan.items, call.batch, call.channels // spec.OCTET),
        *(call.height, call.width, call.out_height, call.out_width),
        *(plan.images, plan.strip, plan.strips, plan.segments, plan.segment_rows),
    )
    return plan, macros, sizes


@lru_cache(maxsize=4096)
def _convolution(
    source: str,
    call: GroupedConv,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    weight_strides: tuple[int, ...],
    device: int,
    transposed: bool,
    moments: bool = False,
) -> Launch:
    plan, macros, sizes = _plan(source, call, dtype, weight_dtype, device, transposed, moments)
    sizes = *sizes, *weight_strides
    return launch(source, macros, device, plan.grid, plan.threads, sizes, shared_bytes=plan.shared_bytes)


@cache
def hopper_lacks(device: int) -> str:
    """Why this device runs no kernels of wide groups; empty when it does."""
    lacks = sources.lacks(wide.CONVOLUTION, nvrtc.arch(device))
    return lacks or tensor_map.unavailable() or nvrtc.refused(wide.CONVOLUTION)


@lru_cache(maxsize=4096)
def _wide_launch(
    call: GroupedConv,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    weight_strides: tuple[int, ...],
    device: int,
    transposed: bool,
) -> tuple[Launch, wide.WidePlan]:
    plan = wide.plan(call, nvrtc.sm_count(device), transposed=transposed)
    dtypes = spec.STORAGE[storage.name(dtype)], spec.WEIGHT_STORAGE[storage.name(weight_dtype)]
    macros = wide.defines(call, plan, *dtypes, transposed=transposed)
    sizes = plan.tiles, plan.strips, plan.bands, call.channels // call.group, *weight_strides
    nbytes = plan.shared_bytes
    return launch(wide.CONVOLUTION, macros, device, plan.grid, wide.THREADS, sizes, shared_bytes=nbytes), plan


def _wide(x: torch.Tensor, weight: torch.Tensor, call: GroupedConv, *, transposed: bool) -> torch.Tensor:
    """What is made of x: y, or with `transposed` dx of dy."""
    device = x.device.index or 0
    made, plan = _wide_launch(call, x.dtype, weight.dtype, weight.stride(), device, transposed)
    height, width = (call.height, call.width) if transposed else (call.out_height, call.out_width)
    y = empty_nhwc((call.batch, call.channels, height, width), x)
    reach, groups, rows = halo(call.stride), call.channels // call.group, plan.columns // 8
    whole, parted = (tensor_map.WHOLE, 1), (tensor_map.QUARTERS if call.stride > 1 else tensor_map.WHOLE, call.stride)
    planes = tensor_map.boxes(x, wide.LINE, 8 + reach, rows + reach, groups, *(whole if transposed else parted))
    classes = tensor_map.boxes(y, wide.LINE, 8, rows, groups, *(parted if transposed else whole))
    made.run(planes, classes, x, weight, y)
    return y


def forward(
    x: torch.Tensor, weight: torch.Tensor, call: GroupedConv, *, moments: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns y [N, C, OH, OW] channels_last in x's dtype and, if asked for, its moments [parts, 3, C] fp32 (ops/moments.py).

    x: channels_last; weight [C, C / groups, 3, 3], any strides.
    """
    device = x.device.index or 0
    if spec.is_wide(call) and not hopper_lacks(device):
        return _wide(x, weight, call, transposed=False), None
    y = empty_nhwc((call.batch, call.channels, call.out_height, call.out_width), x)
    source = spec.forward_source(call.group, call.stride)
    plan = _convolution(source, call, x.dtype, weight.dtype, weight.stride(), device, False, moments)
    if not moments:
        plan.run(x, weight, y)
        return y, None
    parts = torch.empty((plan.grid[0], 3, call.channels), dtype=torch.float32, device=x.device)
    plan.run(x, weight, y, parts)
    return y, parts


def backward_data(dy: torch.Tensor, weight: torch.Tensor, call: GroupedConv) -> torch.Tensor:
    """Returns dx [N, C, H, W] channels_last in dy's dtype. dy: channels_last."""
    device = dy.device.index or 0
    if spec.is_wide(call) and not hopper_lacks(device):
        return _wide(dy, weight, call, transposed=True)
    dx = empty_nhwc((call.batch, call.channels, call.height, call.width), dy)
    source, sized = spec.backward_data_source(call.group, call.stride), call.transposed() if call.stride == 1 else call
    _convolution(source, sized, dy.dtype, weight.dtype, weight.stride(), device, True).run(dy, weight, dx)
    return dx


@lru_cache(maxsize=4096)
def _weight(
    call: GroupedConv, dtype: torch.dtype, weight_dtype: torch.dtype, weight_strides: tuple[int, ...], device: int
) -> tuple[Launch, Launch]:
    """Partial sums, and their sum."""
    plan, macros, sizes = _plan(spec.BACKWARD_WEIGHT, call, dtype, weight_dtype, device, False, False)
    splits, values = plan.grid[0], spec.partial_values(call, plan)
    parts = weight.threads_a_place(splits)
    blocks = -(-values // (weight.SUM_THREADS // parts))
    nbytes = plan.shared_bytes

    def one(entry: str, grid: Sequence[int] | int, threads: int, sizes: Sequence[int], nbytes: int = 0) -> Launch:
        return launch(
            *(spec.BACKWARD_WEIGHT, macros, device, grid, threads, sizes), entry=entry, shared_bytes=nbytes
        ).leaving(splits * values)

    return (
        one("grouped_backward_weight", plan.grid, plan.threads, sizes, nbytes),
        one("grouped_backward_weight_sum", blocks, weight.SUM_THREADS, (splits, parts, values, *weight_strides)),
    )


def backward_weight(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, call: GroupedConv) -> torch.Tensor:
    """Returns dweight like weight. dy and x: channels_last, one dtype."""
    device = x.device.index or 0
    if spec.is_wide_weight(call) and not hopper_lacks(device):
        return conv3x3.backward_weight(dy, x, weight, wide.convolution(call))
    dweight = torch.empty_like(weight)
    first, second = _weight(call, x.dtype, weight.dtype, dweight.stride(), device)
    partial = torch.empty(first.partials, dtype=torch.float32, device=x.device)
    first.run(dy, x, partial)
    second.run(partial, dweight)
    return dweight
