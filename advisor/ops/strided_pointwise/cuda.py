"""Launches of the kernels for 1 x 1 convolutions of stride 2. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.launches import Launch, launch
from advisor.ops.strided_pointwise import spec
from advisor.ops.strided_pointwise.spec import StridedConv


@lru_cache(maxsize=4096)
def _launch(call: StridedConv, dtype: torch.dtype, device: int, gradient: bool) -> Launch:
    plan = spec.plan(call, nvrtc.sm_count(device), nvrtc.arch(device), gradient=gradient)
    defines = spec.defines(plan, storage.name(dtype), gradient=gradient)
    sizes = call.rows, call.inputs // spec.OCTET, call.outputs // spec.OCTET, call.height, call.width
    return launch(spec.PRODUCT, defines, device, plan.grid, spec.THREADS, sizes, shared_bytes=plan.shared_bytes)


def forward(x: torch.Tensor, weight: torch.Tensor, call: StridedConv) -> torch.Tensor:
    """Returns y [N, O, ceil(H / 2), ceil(W / 2)] channels_last in x's dtype.

    x: [N, I, H, W] channels_last; weight [O, I, 1, 1] contiguous, in x's dtype; both from a multiple of 16 bytes on.
    """
    y = _result(x, call, call.outputs)
    _launch(call, x.dtype, x.device.index or 0, False).run(x, weight, y)
    return y


def backward_data(dy: torch.Tensor, weight: torch.Tensor, call: StridedConv) -> torch.Tensor:
    """Returns dx [N, I, H, W] channels_last in dy's dtype. dy: channels_last; weight as in `forward`."""
    shape = (call.batch, call.inputs, call.height, call.width)
    dx = empty_nhwc(shape, dy)
    _launch(call, dy.dtype, dy.device.index or 0, True).run(dy, weight, dx)
    return dx


@lru_cache(maxsize=4096)
def _gather(call: StridedConv, device: int) -> Launch:
    units = call.inputs // spec.OCTET
    sizes = call.rows * units, units, call.height, call.width
    return launch(spec.GATHER, spec.gather_defines(), device, spec.gather_blocks(call), spec.GATHER_THREADS, sizes)


def gather(x: torch.Tensor, call: StridedConv) -> torch.Tensor:
    """Returns x[:, :, ::2, ::2], channels_last. x: [N, I, H, W] channels_last, 16 bits a value, from a multiple of 16 bytes on."""
    quarter = _result(x, call, call.inputs)
    _gather(call, x.device.index or 0).run(x, quarter)
    return quarter


def _result(x: torch.Tensor, call: StridedConv, channels: int) -> torch.Tensor:
    """An empty tensor like x of every other pixel and row."""
    shape = call.batch, channels, -(-call.height // spec.STRIDE), -(-call.width // spec.STRIDE)
    return empty_nhwc(shape, x)
