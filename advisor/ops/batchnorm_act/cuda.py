"""Launches of the BatchNorm(+add)+activation kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import aligned
from advisor.ops.batchnorm_act import spec


@dataclass(frozen=True, slots=True)
class _Launch:
    """Everything about a launch that depends on shape, dtype and variant only, ready to pass."""

    stats: Any
    apply: Any
    reduce: Any
    backward_apply: Any
    block: tuple[int, int, int]
    stats_grid: tuple[int, int, int]
    grid: tuple[int, int, int]
    stats_partials: int  # fp32 values
    partials: int
    rows: Any
    vectors: Any
    tile: Any


@lru_cache(maxsize=4096)
def _launch(rows: int, channels: int, dtype: torch.dtype, activation: str, residual: bool, device: int) -> _Launch:
    name = storage.name(dtype)
    sms = nvrtc.sm_count(device)
    statistics = spec.geometry(rows, channels, name, sms, spec.STATS_BLOCKS_PER_SM)
    shape = spec.geometry(rows, channels, name, sms, spec.BLOCKS_PER_SM)
    defines = tuple(spec.defines(name, activation, residual).items())
    (stats, apply), (reduce, backward_apply) = (
        [nvrtc.function(source, entry, defines, device) for entry in entries]
        for source, entries in spec.KERNELS.items()
    )
    return _Launch(
        stats=stats,
        apply=apply,
        reduce=reduce,
        backward_apply=backward_apply,
        block=(spec.THREADS, 1, 1),
        stats_grid=(statistics.row_blocks, statistics.tiles, 1),
        grid=(shape.row_blocks, shape.tiles, 1),
        stats_partials=statistics.row_blocks * 2 * channels,
        partials=shape.row_blocks * 2 * channels,
        rows=np.int64(rows),
        vectors=np.int32(shape.vectors),
        tile=np.int32(shape.tile),
    )


def _plan(x: torch.Tensor, activation: str, residual: bool) -> _Launch:
    n, c, h, w = x.shape
    return _launch(n * h * w, c, x.dtype, activation, residual, x.device.index or 0)


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
    *,
    in_place: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns y (like x), saved fp32, and mask (bytes; empty without a residual or an activation).

    saved is [2, C], mean and inverse standard deviation, or, when not `in_place`, [4, C] with the new running mean and
    variance after them; `in_place` updates `running_mean` and `running_var` instead. x and residual: [N, C, H, W] channels_last, fp16, bf16 or fp32.
    """
    weight, bias = aligned(weight), aligned(bias)
    plan = _plan(x, activation, residual is not None)
    device = x.device.index or 0
    y = torch.empty_like(x)
    channels = x.shape[1]
    saved = torch.empty((2 if in_place else 4, channels), dtype=torch.float32, device=x.device)
    partial = torch.empty(plan.stats_partials, dtype=torch.float32, device=x.device)
    masked = residual is not None and activation != "none"
    mask = torch.empty(
        x.numel() // storage.vector_width(storage.name(x.dtype)) if masked else 0, dtype=torch.uint8, device=x.device
    )
    stream = nvrtc.stream(device)
    plan.stats(
        plan.stats_grid,
        plan.block,
        (
            x.data_ptr(),
            partial.data_ptr(),
            nvrtc.tickets(x.device),
            saved.data_ptr(),
            running_mean.data_ptr(),
            running_var.data_ptr(),
            running_mean.data_ptr() if in_place else saved.data_ptr() + 8 * channels,
            running_var.data_ptr() if in_place else saved.data_ptr() + 12 * channels,
            plan.rows,
            plan.vectors,
            plan.tile,
            np.float32(momentum),
            np.float32(eps),
        ),
        0,
        stream,
    )
    plan.apply(
        plan.grid,
        plan.block,
        (
            x.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            saved.data_ptr(),
            weight.data_ptr(),
            bias.data_ptr(),
            y.data_ptr(),
            mask.data_ptr(),
            plan.rows,
            plan.vectors,
            plan.tile,
            np.float32(slope),
        ),
        0,
        stream,
    )
    return y, saved, mask


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    saved: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    activation: str,
    slope: float,
    residual: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dx (like x), dresidual (like x; empty without a residual), dweight and dbias [C] fp32.

    dy: like x, channels_last; the caller makes it so.
    """
    weight, bias = aligned(weight), aligned(bias)
    plan = _plan(x, activation, residual)
    device = x.device.index or 0
    channels = x.shape[1]
    dx = torch.empty_like(x)
    dresidual = torch.empty_like(x) if residual else x.new_empty(0)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=x.device)
    per_channel = torch.empty((4, channels), dtype=torch.float32, device=x.device)
    dweight, dbias = per_channel[2], per_channel[3]
    base = per_channel.data_ptr()
    common = (saved.data_ptr(), weight.data_ptr(), bias.data_ptr())
    stream = nvrtc.stream(device)
    plan.reduce(
        plan.grid,
        plan.block,
        (
            dy.data_ptr(),
            x.data_ptr(),
            mask.data_ptr(),
            *common,
            partial.data_ptr(),
            nvrtc.tickets(x.device),
            base,
            base + 8 * channels,
            base + 12 * channels,
            plan.rows,
            plan.vectors,
            plan.tile,
            np.float32(slope),
        ),
        0,
        stream,
    )
    plan.backward_apply(
        plan.grid,
        plan.block,
        (
            dy.data_ptr(),
            x.data_ptr(),
            mask.data_ptr(),
            *common,
            base,
            dx.data_ptr(),
            dresidual.data_ptr(),
            plan.rows,
            plan.vectors,
            plan.tile,
            np.float32(slope),
        ),
        0,
        stream,
    )
    return dx, dresidual, dweight, dbias
