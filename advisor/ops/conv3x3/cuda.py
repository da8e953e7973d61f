"""Launches of the 3 x 3 convolution kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.conv3x3 import spec
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
    y = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    addresses = [x.data_ptr(), weight.data_ptr(), y.data_ptr()]
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
