"""Launches of the 3 x 3 convolution kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage, tensor_map
from advisor.ops.alignment import empty_nhwc
from advisor.ops.conv3x3 import spec
from advisor.ops.conv3x3 import weight as blocks
from advisor.ops.conv3x3.spec import Call


@lru_cache(maxsize=4096)
def _launch(
    product: Call,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    weight_strides: tuple[int, ...],
    device: int,
    moments: bool,
) -> tuple[Any, spec.Plan, tuple[np.int32, ...]]:
    """The kernel, its plan, and the sizes that stand behind the addresses."""
    plan = spec.plan(product, nvrtc.sm_count(device))
    names = storage.name(dtype), storage.name(weight_dtype)
    macros = spec.defines(product, plan, *names, moments=moments)
    kernel = nvrtc.function(spec.CONV, spec.KERNELS[spec.CONV][0], tuple(macros.items()), device, plan.shared_bytes)
    sizes = (plan.tiles, plan.strips, plan.bands, product.height, product.width, *weight_strides)
    return kernel, plan, tuple(map(np.int32, sizes))


def _product(
    x: torch.Tensor, weight: torch.Tensor, product: Call, *, moments: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    device = x.device.index or 0
    kernel, plan, sizes = _launch(product, x.dtype, weight.dtype, weight.stride(), device, moments)
    shape = (product.batch, product.outputs, product.height, product.width)
    y = empty_nhwc(shape, x)
    boxes = tensor_map.boxes(x, spec.LINE, spec.PITCH, plan.columns // 8 + 2)
    addresses = [boxes, x.data_ptr(), weight.data_ptr(), y.data_ptr()]
    parts = None
    if moments:
        parts = torch.empty((plan.moment_parts, 3, product.outputs), dtype=torch.float32, device=x.device)
        addresses.append(parts.data_ptr())
    kernel((plan.grid, 1, 1), (spec.THREADS, 1, 1), (*addresses, *sizes), plan.shared_bytes, nvrtc.stream(device))
    return y, parts


def forward(
    x: torch.Tensor, weight: torch.Tensor, call: Call, *, moments: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns y [N, O, H, W] channels_last in x's dtype and, if asked for, its moments [parts, 3, O] fp32 (ops/moments.py).

    x: channels_last, 16-byte aligned; weight [O, I, 3, 3], any strides.
    """
    return _product(x, weight, call, moments=moments)


def backward_data(dy: torch.Tensor, weight: torch.Tensor, call: Call) -> torch.Tensor:
    """Returns dx [N, I, H, W] channels_last in dy's dtype. dy: channels_last, 16-byte aligned."""
    return _product(dy, weight, call.gradient())[0]


@lru_cache(maxsize=4096)
def _weight(
    call: Call, dtype: torch.dtype, weight_dtype: torch.dtype, weight_strides: tuple[int, ...], device: int
) -> tuple[Any, Any, blocks.Plan, tuple[np.int32, ...], tuple[np.int32, ...]]:
    """The kernel, the one that adds up what it leaves, their plan, and the sizes that stand behind the addresses of each."""
    plan = spec.weight_plan(call, nvrtc.sm_count(device))
    macros = tuple(spec.weight_defines(call, plan, storage.name(dtype), storage.name(weight_dtype)).items())
    first, second = spec.KERNELS[spec.BACKWARD_WEIGHT]
    partial = nvrtc.function(spec.BACKWARD_WEIGHT, first, macros, device, plan.shared_bytes)
    total = nvrtc.function(spec.BACKWARD_WEIGHT, second, macros, device)
    sizes = (plan.tiles, plan.strips, plan.bands, call.groups, plan.jobs)
    places = (plan.lines, call.groups, *weight_strides)
    return partial, total, plan, tuple(map(np.int32, sizes)), tuple(map(np.int32, places))


def backward_weight(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, call: Call) -> torch.Tensor:
    """Returns dweight like weight. dy and x: channels_last, 16-byte aligned, one dtype."""
    device = x.device.index or 0
    dweight = torch.empty_like(weight)
    first, second, plan, sizes, places = _weight(call, x.dtype, weight.dtype, dweight.stride(), device)
    plain, windowed = (dy, x) if plan.x_windowed else (x, dy)
    maps = (
        tensor_map.boxes(plain, blocks.PLAIN, 8 * plan.wide, plan.rows, call.groups),
        tensor_map.boxes(
            *(windowed, plan.columns, 8 * plan.wide + plan.halo, plan.rows + plan.halo, call.groups),
            *(tensor_map.WHOLE if call.stride == 1 else tensor_map.QUARTERS, call.stride),
        ),
    )
    left = torch.empty(plan.left_bytes // 4, dtype=torch.float32, device=x.device)
    stream = nvrtc.stream(device)
    addresses = (plain.data_ptr(), windowed.data_ptr(), left.data_ptr())
    grid = (plan.lines * plan.jobs, 1, 1)
    first(grid, (blocks.THREADS, 1, 1), (*maps, *addresses, *sizes), plan.shared_bytes, stream)
    grid = (plan.quarters // blocks.SUM_LANES, plan.jobs, 1)
    second(grid, (blocks.SUM_THREADS, 1, 1), (left.data_ptr(), dweight.data_ptr(), *places), 0, stream)
    return dweight
