"""Launches of the bias (+ add) kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import channel_launches, nvrtc
from advisor.ops.bias_add import spec
from advisor.ops.launches import Launch


@lru_cache(maxsize=4096)
def _forward(shape: torch.Size, dtype: torch.dtype, residual: bool, device: int) -> Launch:
    return channel_launches.flat(spec, shape, dtype, device, residual=residual)


@lru_cache(maxsize=4096)
def _backward(shape: torch.Size, dtype: torch.dtype, device: int) -> Launch:
    return channel_launches.summed(spec, shape, dtype, device)


def forward(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None, out: torch.Tensor) -> None:
    """x + bias (+ residual) into `out`, which may be x. x, residual, out: [N, C, H, W] channels_last, of one dtype; bias: [C] fp32."""
    _forward(x.shape, x.dtype, residual is not None, x.device.index or 0).run(x, bias, residual, out)


def backward(dy: torch.Tensor) -> torch.Tensor:
    """Returns dbias [C] fp32 of dy [N, C, H, W] channels_last."""
    plan = _backward(dy.shape, dy.dtype, dy.device.index or 0)
    dbias = dy.new_empty(dy.shape[1], dtype=torch.float32)
    plan.run(dy, dbias.new_empty(plan.partials), nvrtc.tickets(dy.device), dbias)
    return dbias
