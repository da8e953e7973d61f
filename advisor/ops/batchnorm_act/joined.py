"""Launches of a batch norm over channels that are no multiple of a vector's: some rows are taken for one.

As `cuda`: one launch a pass, or with one more between two (kernels/batchnorm/batchnorm_joined.cu). Shapes and dtypes have been checked by
the caller (spec).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.batchnorm_act import cuda, spec


@dataclass(frozen=True, slots=True)
class _Join:
    """The launches between, ready to pass."""

    statistics: Any
    sums: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]


@lru_cache(maxsize=4096)
def _join(channels: int, device: int) -> _Join:
    defines = spec.joined_defines()
    statistics, sums = (
        nvrtc.function(spec.JOINED_ROWS, entry, tuple(defines.items()), device)
        for entry in spec.KERNELS[spec.JOINED_ROWS]
    )
    return _Join(statistics, sums, grid=(-(-channels // defines["THREADS"]), 1, 1), block=(defines["THREADS"], 1, 1))


def _plan(x: torch.Tensor, joined: int, activation: str, residual: bool) -> cuda.Launch:
    n, c, h, w = x.shape
    device = x.device.index or 0
    return cuda.launch(n * h * w // joined, c * joined, x.dtype, activation, residual, False, device, joined=True)


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As `cuda.forward` in place; of several launches what is saved is [6, joined, C] fp32, as the kernels have it."""
    n, channels, h, w = x.shape
    joined = spec.joined(channels, storage.name(x.dtype))
    tensors = x, residual, running_mean, running_var, weight, bias
    found = cuda.forward_at_once(*tensors, momentum, eps, activation, slope, joined=joined)
    if found is not None:
        return found
    device = x.device.index or 0
    plan, join = _plan(x, joined, activation, residual is not None), _join(channels, device)
    y = torch.empty_like(x)
    saved = weight.new_empty(6, joined, channels)
    partial = weight.new_empty(plan.stats_partials)
    mask = cuda.mask_memory(x, activation, residual=residual is not None)
    stream = nvrtc.stream(device)
    row = 4 * joined * channels
    at = [saved.data_ptr() + i * row for i in range(6)]
    # The first launch reads old running values of each of its columns and writes new ones: here x's bits, to where the next one writes anew.
    first = (x.data_ptr(), partial.data_ptr(), nvrtc.tickets(x.device), at[4], x.data_ptr(), x.data_ptr(), at[2], at[3])
    sizes = (plan.rows, plan.vectors, plan.tile)
    plan.stats(plan.stats_grid, plan.block, (*first, *sizes, np.float32(1.0), np.float32(0.0)), 0, stream)
    if running_mean is None or running_var is None:  # as in `cuda`: they are read, and written to where nobody looks
        running, updated = (bias.data_ptr(), weight.data_ptr()), (at[4], at[5])
    else:
        running = updated = running_mean.data_ptr(), running_var.data_ptr()
    join.statistics(
        join.grid,
        join.block,
        (
            saved.data_ptr(),
            weight.data_ptr(),
            bias.data_ptr(),
            *running,
            *updated,
            np.int32(channels),
            np.int32(joined),
            np.float64(n * h * w),
            np.float32(momentum),
            np.float32(eps),
        ),
        0,
        stream,
    )
    passed = (x.data_ptr(), nvrtc.address(residual), at[0], at[2], at[3], y.data_ptr(), nvrtc.address(mask))
    plan.apply(plan.grid, plan.block, (*passed, *sizes, np.float32(slope)), 0, stream)
    return y, saved, mask


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    saved: torch.Tensor,
    mask: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    activation: str,
    slope: float,
    residual: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """As `cuda.backward` with one gradient."""
    channels, device = x.shape[1], dy.device.index or 0
    joined = spec.joined(channels, storage.name(x.dtype))
    if saved.dim() == 2:  # of a forward in one launch
        tensors = (dy, None, x, saved, mask, weight, bias)
        found = cuda.backward_at_once(*tensors, activation, slope, residual, joined=joined)
        if found is not None:
            return found
        saved = torch.stack((*saved[:2], weight, bias)).unsqueeze(1).repeat(1, joined, 1)
    plan, join = _plan(x, joined, activation, residual), _join(channels, device)
    dx, dresidual = cuda.gradient_memory(dy, x, activation, residual=residual, forked=False)
    columns, partial = saved.new_empty(4, joined, channels), saved.new_empty(plan.partials)
    dweight, dbias = saved.new_empty(channels), saved.new_empty(channels)
    stream = nvrtc.stream(device)
    row = 4 * joined * channels
    at, norm = columns.data_ptr(), (saved.data_ptr(), saved.data_ptr() + 2 * row, saved.data_ptr() + 3 * row)
    sizes = (plan.rows, plan.vectors, plan.tile, np.float32(slope))
    above, other = (dy.data_ptr(), 0), nvrtc.address(dresidual)
    sums = (other, partial.data_ptr(), nvrtc.tickets(x.device), at, at + 2 * row, at + 3 * row)
    plan.reduce(plan.grid, plan.block, (*above, x.data_ptr(), nvrtc.address(mask), *norm, *sums, *sizes), 0, stream)
    totals = (at, dweight.data_ptr(), dbias.data_ptr(), np.int32(channels), np.int32(joined))
    join.sums(join.grid, join.block, totals, 0, stream)
    given = (other, 0) if residual else above
    plan.backward_apply(plan.grid, plan.block, (*given, x.data_ptr(), *norm, at, dx.data_ptr(), *sizes), 0, stream)
    return dx, dresidual, dweight, dbias
