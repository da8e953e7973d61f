"""Launches of the GroupNorm(+activation) kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.group_norm import spec


@dataclass(frozen=True, slots=True)
class _Launch:
    """Everything about a launch that depends on shape, dtypes and variant only, ready to pass."""

    stats: Any
    apply: Any
    reduce: Any
    backward_apply: Any
    block: tuple[int, int, int]
    sums_grid: tuple[int, int, int]
    apply_grid: tuple[int, int, int]
    stream_blocks: int  # of the backward's apply, beside those of the parameters' gradients
    parameter_blocks: int
    partials: int  # fp32 values
    samples: Any
    rows: Any
    vectors: Any
    tile: Any
    tiles: Any
    per_group: Any
    lanes: Any
    parts: Any
    splits: Any


@lru_cache(maxsize=4096)
def _launch(
    shape: tuple[int, int, int, int],
    groups: int,
    dtype: torch.dtype,
    result: torch.dtype,
    activation: str,
    device: int,
) -> _Launch:
    n, c, h, w = shape
    names = storage.name(dtype), storage.name(result)
    found = spec.geometry(n, h * w, c, groups, names[0], nvrtc.sm_count(device))
    (stats, apply), (reduce, backward_apply) = (
        [
            nvrtc.function(source, entry, tuple(spec.defines(source, *names, activation).items()), device)
            for entry in entries
        ]
        for source, entries in spec.KERNELS.items()
    )
    sums, out = found.sums, found.apply
    return _Launch(
        stats=stats,
        apply=apply,
        reduce=reduce,
        backward_apply=backward_apply,
        block=(spec.THREADS, 1, 1),
        sums_grid=(sums.splits, sums.tiles, n),
        apply_grid=(out.splits, out.tiles, n),
        stream_blocks=out.splits * out.tiles * n,
        parameter_blocks=found.parameter_blocks,
        partials=n * sums.splits * 2 * c,
        samples=np.int32(n),
        rows=np.int32(h * w),
        vectors=np.int32(sums.vectors),
        tile=np.int32(sums.tile),
        tiles=np.int32(sums.tiles),
        per_group=np.int32(c // groups),
        lanes=np.int32(found.lanes),
        parts=np.int32(sums.splits),
        splits=np.int32(out.splits),
    )


def _plan(x: torch.Tensor, groups: int, result: torch.dtype, activation: str) -> _Launch:
    return _launch(tuple(x.shape), groups, x.dtype, result, activation, x.device.index or 0)


def forward(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    dtype: torch.dtype,
    slope: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns y, x's shape and layout in `dtype`, and saved [N, G, 2] fp32: mean and inverse standard deviation.

    x: [N, C, H, W] channels_last.
    """
    plan = _plan(x, groups, dtype, activation)
    y = torch.empty_like(x, dtype=dtype)
    saved = torch.empty((x.shape[0], groups, 2), dtype=torch.float32, device=x.device)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=x.device)
    stream = nvrtc.stream(x.device.index or 0)
    plan.stats(
        plan.sums_grid,
        plan.block,
        (x.data_ptr(), partial.data_ptr(), plan.rows, plan.vectors, plan.tile),
        0,
        stream,
    )
    plan.apply(
        plan.apply_grid,
        plan.block,
        (
            x.data_ptr(),
            partial.data_ptr(),
            nvrtc.address(weight),
            nvrtc.address(bias),
            saved.data_ptr(),
            y.data_ptr(),
            plan.rows,
            plan.vectors,
            plan.tile,
            plan.per_group,
            plan.lanes,
            plan.parts,
            np.float32(eps),
            np.float32(slope),
        ),
        0,
        stream,
    )
    return y, saved


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    saved: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    activation: str,
    slope: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dx (like x), dweight and dbias [C] fp32 (not written without a weight and a bias).

    dy: the forward's result's dtype, channels_last.
    """
    plan = _plan(x, groups, dy.dtype, activation)
    dx = torch.empty_like(x)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=x.device)
    dweight = saved.new_empty(x.shape[1])
    dbias = torch.empty_like(dweight)
    parameter_blocks = 0 if weight is None and bias is None else plan.parameter_blocks
    stream = nvrtc.stream(x.device.index or 0)
    common = (saved.data_ptr(), nvrtc.address(weight), nvrtc.address(bias), partial.data_ptr())
    plan.reduce(
        plan.sums_grid,
        plan.block,
        (
            dy.data_ptr(),
            x.data_ptr(),
            *common,
            plan.rows,
            plan.vectors,
            plan.tile,
            plan.per_group,
            np.float32(slope),
        ),
        0,
        stream,
    )
    plan.backward_apply(
        (parameter_blocks + plan.stream_blocks, 1, 1),
        plan.block,
        (
            dy.data_ptr(),
            x.data_ptr(),
            *common,
            dx.data_ptr(),
            dweight.data_ptr(),
            dbias.data_ptr(),
            plan.samples,
            plan.rows,
            plan.vectors,
            plan.tile,
            plan.tiles,
            plan.per_group,
            plan.lanes,
            plan.parts,
            plan.splits,
            np.int32(parameter_blocks),
            np.float32(slope),
        ),
        0,
        stream,
    )
    return dx, dweight, dbias
