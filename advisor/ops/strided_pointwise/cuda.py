"""Launches of the kernels for 1 x 1 convolutions of stride 2. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.strided_pointwise import spec
from advisor.ops.strided_pointwise.spec import Call


@lru_cache(maxsize=4096)
def _launch(call: Call, dtype: torch.dtype, device: int, gradient: bool) -> tuple[Any, spec.Plan, tuple[np.int32, ...]]:
    """The kernel, its plan, and the sizes that stand behind the addresses."""
    plan = spec.plan(call, nvrtc.sm_count(device), nvrtc.arch(device), gradient=gradient)
    macros = tuple(spec.defines(plan, storage.name(dtype), gradient=gradient).items())
    (entry,) = spec.KERNELS[spec.PRODUCT]
    kernel = nvrtc.function(spec.PRODUCT, entry, macros, device, plan.shared_bytes)
    sizes = call.rows, call.inputs // spec.OCTET, call.outputs // spec.OCTET, call.height, call.width
    return kernel, plan, tuple(map(np.int32, sizes))


def _product(source: torch.Tensor, weight: torch.Tensor, call: Call, to: torch.Tensor, *, gradient: bool) -> None:
    device = source.device.index or 0
    kernel, plan, sizes = _launch(call, source.dtype, device, gradient)
    addresses = source.data_ptr(), weight.data_ptr(), to.data_ptr()
    kernel((*plan.grid, 1), (spec.THREADS, 1, 1), (*addresses, *sizes), plan.shared_bytes, nvrtc.stream(device))


def forward(x: torch.Tensor, weight: torch.Tensor, call: Call) -> torch.Tensor:
    """Returns y [N, O, ceil(H / 2), ceil(W / 2)] channels_last in x's dtype.

    x: [N, I, H, W] channels_last; weight [O, I, 1, 1] contiguous, in x's dtype; both from a multiple of 16 bytes on.
    """
    y = _result(x, call, call.outputs)
    _product(x, weight, call, y, gradient=False)
    return y


def backward_data(dy: torch.Tensor, weight: torch.Tensor, call: Call) -> torch.Tensor:
    """Returns dx [N, I, H, W] channels_last in dy's dtype. dy: channels_last; weight as in `forward`."""
    shape = (call.batch, call.inputs, call.height, call.width)
    dx = empty_nhwc(shape, dy)
    _product(dy, weight, call, dx, gradient=True)
    return dx


@lru_cache(maxsize=8)
def _gather(device: int) -> Any:
    (entry,) = spec.KERNELS[spec.GATHER]
    return nvrtc.function(spec.GATHER, entry, tuple(spec.gather_defines().items()), device)


def gather(x: torch.Tensor, call: Call) -> torch.Tensor:
    """Returns x[:, :, ::2, ::2], channels_last. x: [N, I, H, W] channels_last, 16 bits a value, from a multiple of 16 bytes on."""
    device = x.device.index or 0
    quarter = _result(x, call, call.inputs)
    units = call.inputs // spec.OCTET
    sizes = np.uint32(call.rows * units), np.uint32(units), np.int32(call.height), np.int32(call.width)
    grid, block = (spec.gather_blocks(call), 1, 1), (spec.GATHER_THREADS, 1, 1)
    _gather(device)(grid, block, (x.data_ptr(), quarter.data_ptr(), *sizes), 0, nvrtc.stream(device))
    return quarter


def _result(x: torch.Tensor, call: Call, channels: int) -> torch.Tensor:
    """An empty tensor like x of every other pixel and row."""
    shape = call.batch, channels, -(-call.height // spec.STRIDE), -(-call.width // spec.STRIDE)
    return empty_nhwc(shape, x)
