"""Launches of the kernels for large depthwise taps. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.large_depthwise import spec
from advisor.ops.large_depthwise.spec import Call

_Launch = tuple[Any, tuple[int, int, int], int, int, tuple[Any, ...]]


@lru_cache(maxsize=4096)
def _conv(call: Call, dtype: torch.dtype, weight_dtype: torch.dtype, device: int, flip: bool, bias: bool) -> _Launch:
    plan = spec.plan(call, storage.name(dtype), nvrtc.arch(device))
    macros = spec.defines(call, plan, storage.name(dtype), storage.name(weight_dtype), flip=flip, bias=bias)
    kernel = nvrtc.function(spec.CONV, spec.KERNELS[spec.CONV][0], tuple(macros.items()), device, plan.shared_bytes)
    grid = plan.row_tiles * plan.column_tiles, -(-call.batch // plan.planes), call.channels
    sizes = (
        *(call.batch, call.channels, call.height, call.width, call.out_height, call.out_width),
        *(call.pad_h, call.pad_w, call.lead, plan.column_tiles),
    )
    return kernel, grid, plan.threads, plan.shared_bytes, tuple(map(np.int32, sizes))


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, product: Call, *, flip: bool
) -> torch.Tensor:
    device = x.device.index or 0
    launch = _conv(product, x.dtype, weight.dtype, device, flip, bias is not None)
    kernel, grid, threads, shared_bytes, sizes = launch
    y = x.new_empty((product.batch, product.channels, product.out_height, product.out_width))
    pointers = x.data_ptr(), weight.data_ptr(), nvrtc.address(bias), y.data_ptr()
    kernel(grid, (threads, 1, 1), (*pointers, *sizes), shared_bytes, nvrtc.stream(device))
    return y


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call) -> torch.Tensor:
    """Returns y [N, C, OH, OW] contiguous in x's dtype. x: contiguous, 16-byte aligned; weight [C, 1, KH, KW] contiguous."""
    return _product(x, weight, bias, call, flip=False)


def backward_data(dy: torch.Tensor, weight: torch.Tensor, call: Call) -> torch.Tensor:
    """Returns dx [N, C, H, W] contiguous in dy's dtype. dy: contiguous, 16-byte aligned."""
    return _product(dy, weight, None, call.gradient(), flip=True)


@lru_cache(maxsize=4096)
def _weight(call: Call, dtype: torch.dtype, device: int) -> tuple[spec.WeightPlan, _Launch]:
    plan = spec.weight_plan(call, storage.name(dtype), nvrtc.sm_count(device), nvrtc.arch(device))
    macros = tuple(spec.weight_defines(call, plan, storage.name(dtype)).items())
    kernel = nvrtc.function(
        spec.BACKWARD_WEIGHT, spec.KERNELS[spec.BACKWARD_WEIGHT][0], macros, device, plan.shared_bytes
    )
    sizes = (
        *(call.batch, call.channels, call.height, call.width, call.out_height, call.out_width),
        *(call.pad_h, call.pad_w, call.lead, plan.row_tiles, plan.column_tiles),
    )
    grid = plan.splits, plan.groups, call.channels
    return plan, (kernel, grid, 32 * plan.warps, plan.shared_bytes, tuple(map(np.int32, sizes)))


def backward_weight(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, call: Call) -> torch.Tensor:
    """Returns dweight like weight. dy and x: contiguous, 16-byte aligned, one dtype."""
    device = x.device.index or 0
    plan, (kernel, grid, threads, shared_bytes, sizes) = _weight(call, x.dtype, device)
    left = torch.empty(
        (plan.splits, call.channels, 1, call.kernel_h, call.kernel_w), dtype=torch.float32, device=x.device
    )
    pointers = dy.data_ptr(), x.data_ptr(), left.data_ptr()
    kernel(grid, (threads, 1, 1), (*pointers, *sizes), shared_bytes, nvrtc.stream(device))
    return left.sum(0).to(weight.dtype)
