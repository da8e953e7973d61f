"""Launches of the 1 x 1 convolution kernel. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.pointwise import spec


@dataclass(frozen=True, slots=True)
class _Launch:
    """The kernel with all that depends on shapes only."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    sizes: tuple[Any, Any, Any]  # rows, octets of x and of y
    shared_bytes: int
    moments: bool


def launch_of(
    plan: spec.Plan, rows: int, in_channels: int, out_channels: int, dtype: torch.dtype, device: int, *, moments: bool
) -> _Launch:
    """The launch that a plan says."""
    macros = tuple(spec.defines(plan, storage.name(dtype), moments=moments).items())
    (entry,) = spec.KERNELS[spec.FORWARD]
    return _Launch(
        kernel=nvrtc.function(spec.FORWARD, entry, macros, device, plan.shared_bytes),
        grid=(*plan.grid, 1),
        block=(plan.threads, 1, 1),
        sizes=(np.int32(rows), np.int32(in_channels // spec.OCTET), np.int32(out_channels // spec.OCTET)),
        shared_bytes=plan.shared_bytes,
        moments=moments,
    )


@lru_cache(maxsize=4096)
def _launch(rows: int, in_channels: int, out_channels: int, dtype: torch.dtype, device: int, moments: bool) -> _Launch:
    plan = spec.plan(rows, in_channels, out_channels, nvrtc.sm_count(device), nvrtc.arch(device))
    return launch_of(plan, rows, in_channels, out_channels, dtype, device, moments=moments)


def run(launch: _Launch, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `forward`, with this launch."""
    n, _, h, w = x.shape
    channels = weight.shape[0]
    y = torch.empty((n, channels, h, w), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    addresses = [x.data_ptr(), weight.data_ptr(), y.data_ptr()]
    parts = None
    if launch.moments:
        parts = torch.empty((launch.grid[0], 3, channels), dtype=torch.float32, device=x.device)
        addresses.append(parts.data_ptr())
    stream = nvrtc.stream(x.device.index or 0)
    launch.kernel(launch.grid, launch.block, (*addresses, *launch.sizes), launch.shared_bytes, stream)
    return y, parts


def forward(x: torch.Tensor, weight: torch.Tensor, *, moments: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns y [N, CO, H, W] channels_last in x's dtype and, if asked for, its moments [parts, 3, CO] fp32 (ops/moments.py).

    x: [N, CI, H, W] channels_last; weight [CO, CI, 1, 1] contiguous, in x's dtype, from a multiple of 16 bytes on.
    """
    n, c, h, w = x.shape
    return run(_launch(n * h * w, c, weight.shape[0], x.dtype, x.device.index or 0, moments), x, weight)
