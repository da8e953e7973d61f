"""Launches of the PReLU kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import channel_launches, nvrtc
from advisor.ops.launches import Launch
from advisor.ops.prelu import spec


@lru_cache(maxsize=4096)
def _forward(shape: torch.Size, dtype: torch.dtype, device: int) -> Launch:
    return channel_launches.flat(spec, shape, dtype, device)


@lru_cache(maxsize=4096)
def _backward(shape: torch.Size, dtype: torch.dtype, device: int) -> Launch:
    return channel_launches.summed(spec, shape, dtype, device)


def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Returns y, like x [N, C, H, W] channels_last; weight: [C] fp32."""
    y = torch.empty_like(x)
    _forward(x.shape, x.dtype, x.device.index or 0).run(x, weight, y)
    return y


def backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns dx, like x, and dweight [C] fp32. dy, x: [N, C, H, W] channels_last, of one dtype; weight: [C] fp32."""
    plan = _backward(dy.shape, dy.dtype, dy.device.index or 0)
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    plan.run(dy, x, weight, dx, dweight.new_empty(plan.partials), nvrtc.tickets(dy.device), dweight)
    return dx, dweight
