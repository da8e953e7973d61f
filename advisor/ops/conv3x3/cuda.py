"""Launches of the 3 x 3 convolution kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import nvrtc, storage, tensor_map
from advisor.ops.alignment import empty_nhwc
from advisor.ops.conv3x3 import spec
from advisor.ops.conv3x3 import weight as blocks
from advisor.ops.conv3x3.spec import Conv3x3
from advisor.ops.launches import Launch, launch


@lru_cache(maxsize=4096)
def _launch(
    product: Conv3x3,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    weight_strides: tuple[int, ...],
    device: int,
    moments: bool,
) -> tuple[Launch, spec.Conv3x3Plan]:
    plan = spec.plan(product, nvrtc.sm_count(device))
    names = storage.name(dtype), storage.name(weight_dtype)
    macros = spec.defines(product, plan, *names, moments=moments)
    sizes = plan.tiles, plan.strips, plan.bands, product.height, product.width, *weight_strides
    nbytes = plan.shared_bytes
    return launch(spec.CONV, macros, device, plan.grid, spec.THREADS, sizes, shared_bytes=nbytes), plan


def _product(
    x: torch.Tensor, weight: torch.Tensor, product: Conv3x3, *, moments: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    made, plan = _launch(product, x.dtype, weight.dtype, weight.stride(), x.device.index or 0, moments)
    shape = (product.batch, product.outputs, product.height, product.width)
    y = empty_nhwc(shape, x)
    boxes = tensor_map.boxes(x, spec.LINE, spec.PITCH, plan.columns // 8 + 2)
    if not moments:
        made.run(boxes, x, weight, y)
        return y, None
    parts = torch.empty((plan.moment_parts, 3, product.outputs), dtype=torch.float32, device=x.device)
    made.run(boxes, x, weight, y, parts)
    return y, parts


def forward(
    x: torch.Tensor, weight: torch.Tensor, call: Conv3x3, *, moments: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns y [N, O, H, W] channels_last in x's dtype and, if asked for, its moments [parts, 3, O] fp32 (ops/moments.py).

    x: channels_last, 16-byte aligned; weight [O, I, 3, 3], any strides.
    """
    return _product(x, weight, call, moments=moments)


def backward_data(dy: torch.Tensor, weight: torch.Tensor, call: Conv3x3) -> torch.Tensor:
    """Returns dx [N, I, H, W] channels_last in dy's dtype. dy: channels_last, 16-byte aligned."""
    return _product(dy, weight, call.gradient())[0]


@lru_cache(maxsize=4096)
def _weight(
    call: Conv3x3, dtype: torch.dtype, weight_dtype: torch.dtype, weight_strides: tuple[int, ...], device: int
) -> tuple[Launch, Launch, blocks.Conv3x3WeightPlan]:
    """The launch, the one that adds up what it leaves, and their plan."""
    plan = spec.weight_plan(call, nvrtc.sm_count(device))
    macros = spec.weight_defines(call, plan, storage.name(dtype), storage.name(weight_dtype))
    first, second = spec.KERNELS[spec.BACKWARD_WEIGHT]
    sizes = plan.tiles, plan.strips, plan.bands, call.groups, plan.jobs
    places, grid = (plan.lines, call.groups, *weight_strides), (plan.quarters // blocks.SUM_LANES, plan.jobs)
    of, jobs, nbytes = (spec.BACKWARD_WEIGHT, macros, device), plan.lines * plan.jobs, plan.shared_bytes
    return (
        launch(*of, jobs, blocks.THREADS, sizes, entry=first, shared_bytes=nbytes),
        launch(*of, grid, blocks.SUM_THREADS, places, entry=second),
        plan,
    )


def backward_weight(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, call: Conv3x3) -> torch.Tensor:
    """Returns dweight like weight. dy and x: channels_last, 16-byte aligned, one dtype."""
    device = x.device.index or 0
    dweight = torch.empty_like(weight)
    first, second, plan = _weight(call, x.dtype, weight.dtype, dweight.stride(), device)
    plain, windowed = (dy, x) if plan.x_windowed else (x, dy)
    maps = (
        tensor_map.boxes(plain, blocks.PLAIN, 8 * plan.wide, plan.rows, call.groups),
        tensor_map.boxes(
            *(windowed, plan.columns, 8 * plan.wide + plan.halo, plan.rows + plan.halo, call.groups),
            *(tensor_map.WHOLE if call.stride == 1 else tensor_map.QUARTERS, call.stride),
        ),
    )
    left = torch.empty(plan.left_bytes // 4, dtype=torch.float32, device=x.device)
    first.run(*maps, plain, windowed, left)
    second.run(left, dweight)
    return dweight
