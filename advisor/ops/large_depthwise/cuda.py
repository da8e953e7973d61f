"""Launches of the kernels for large depthwise taps. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.large_depthwise import spec
from advisor.ops.large_depthwise.spec import LargeConv
from advisor.ops.launches import Launch, launch


@lru_cache(maxsize=4096)
def _conv(
    call: LargeConv, dtype: torch.dtype, weight_dtype: torch.dtype, device: int, flip: bool, bias: bool
) -> Launch:
    plan = spec.plan(call, storage.name(dtype), nvrtc.arch(device))
    macros = spec.defines(call, plan, storage.name(dtype), storage.name(weight_dtype), flip=flip, bias=bias)
    grid = plan.row_tiles * plan.column_tiles, -(-call.batch // plan.planes), call.channels
    sizes = (
        *(call.batch, call.channels, call.height, call.width, call.out_height, call.out_width),
        *(call.pad_h, call.pad_w, call.lead, plan.column_tiles),
    )
    return launch(spec.CONV, macros, device, grid, plan.threads, sizes, shared_bytes=plan.shared_bytes)


def _product(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, product: LargeConv, *, flip: bool
) -> torch.Tensor:
    y = x.new_empty((product.batch, product.channels, product.out_height, product.out_width))
    plan = _conv(product, x.dtype, weight.dtype, x.device.index or 0, flip, bias is not None)
    plan.run(x, weight, bias, y)
    return y


def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: LargeConv) -> torch.Tensor:
    """Returns y [N, C, OH, OW] contiguous in x's dtype. x: contiguous, 16-byte aligned; weight [C, 1, KH, KW] contiguous."""
    return _product(x, weight, bias, call, flip=False)


def backward_data(dy: torch.Tensor, weight: torch.Tensor, call: LargeConv) -> torch.Tensor:
    """Returns dx [N, C, H, W] contiguous in dy's dtype. dy: contiguous, 16-byte aligned."""
    return _product(dy, weight, None, call.gradient(), flip=True)


@lru_cache(maxsize=4096)
def _turning(images: int, rows: int, columns: int, dtype: torch.dtype, device: int) -> Launch:
    name = storage.name(dtype)
    grid, across = spec.planes_grid(images, rows, columns, name)
    macros = spec.planes_defines(rows, columns, name)
    return launch(spec.PLANES, macros, device, grid, spec.PLANES_THREADS, (rows, columns, across))


def planes(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of a channels_last x [N, C, H, W] that begins at a multiple of 16 bytes."""
    n, c, h, w = x.shape
    y = x.new_empty((n, c, h, w))
    _turning(n, h * w, c, x.dtype, x.device.index or 0).run(x, y)
    return y


def images(x: torch.Tensor) -> torch.Tensor:
    """A channels_last copy of a contiguous x [N, C, H, W] that begins at a multiple of 16 bytes."""
    n, c, h, w = x.shape
    y = empty_nhwc((n, c, h, w), x)
    _turning(n, c, h * w, x.dtype, x.device.index or 0).run(x, y)
    return y


@lru_cache(maxsize=4096)
def _weight(call: LargeConv, dtype: torch.dtype, device: int) -> tuple[spec.WeightPlan, Launch]:
    plan = spec.weight_plan(call, storage.name(dtype), nvrtc.sm_count(device), nvrtc.arch(device))
    macros = spec.weight_defines(call, plan, storage.name(dtype))
    sizes = (
        *(call.batch, call.channels, call.height, call.width, call.out_height, call.out_width),
        *(call.pad_h, call.pad_w, call.lead, plan.row_tiles, plan.column_tiles),
    )
    grid = plan.splits, plan.groups, call.channels
    threads, nbytes = 32 * plan.warps, plan.shared_bytes
    return plan, launch(spec.BACKWARD_WEIGHT, macros, device, grid, threads, sizes, shared_bytes=nbytes)


def backward_weight(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, call: LargeConv) -> torch.Tensor:
    """Returns dweight like weight. dy and x: contiguous, 16-byte aligned, one dtype."""
    plan, partial = _weight(call, x.dtype, x.device.index or 0)
    left = torch.empty(
        (plan.splits, call.channels, 1, call.kernel_h, call.kernel_w), dtype=torch.float32, device=x.device
    )
    partial.run(dy, x, left)
    return left.sum(0).to(weight.dtype)
