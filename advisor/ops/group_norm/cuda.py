"""Launches of the GroupNorm(+activation) kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from advisor.ops import nvrtc, storage
from advisor.ops.group_norm import spec
from advisor.ops.launches import Launch, launch


class _Launches(NamedTuple):
    stats: Launch
    apply: Launch
    reduce: Launch
    backward_apply: Launch


@lru_cache(maxsize=4096)
def _launch(
    shape: tuple[int, int, int, int],
    groups: int,
    dtype: torch.dtype,
    result: torch.dtype,
    activation: str,
    parameters: bool,
    device: int,
) -> _Launches:
    """`parameters`: whether the backward makes their gradients, in blocks of their own."""
    n, c, h, w = shape
    names = storage.name(dtype), storage.name(result)
    found = spec.geometry(n, h * w, c, groups, names[0], nvrtc.sm_count(device))
    sums, out, per_group = found.sums, found.apply, c // groups
    of_sums = h * w, sums.vectors, sums.tile
    blocks = found.parameter_blocks if parameters else 0
    shared = sums.tiles, per_group, found.lanes, sums.splits

    def one(source: str, entry: str, grid: Sequence[int] | int, sizes: Sequence[int]) -> Launch:
        defines = spec.defines(source, *names, activation)
        partials = n * sums.splits * 2 * c
        return launch(source, defines, device, grid, spec.THREADS, sizes, entry=entry).leaving(partials)

    columns, rows = (sums.splits, sums.tiles, n), (out.splits, out.tiles, n)
    return _Launches(
        one(spec.FORWARD, "group_norm_stats", columns, of_sums),
        one(spec.FORWARD, "group_norm_apply", rows, (*of_sums, *shared[1:])),
        one(spec.BACKWARD, "group_norm_backward_reduce", columns, (*of_sums, per_group)),
        one(
            spec.BACKWARD,
            "group_norm_backward_apply",
            blocks + out.splits * out.tiles * n,
            (n, *of_sums, *shared, out.splits, blocks),
        ),
    )


def _plan(x: torch.Tensor, groups: int, result: torch.dtype, activation: str, *, parameters: bool = True) -> _Launches:
    return _launch(tuple(x.shape), groups, x.dtype, result, activation, parameters, x.device.index or 0)


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
    partial = torch.empty(plan.stats.partials, dtype=torch.float32, device=x.device)
    plan.stats.run(x, partial)
    plan.apply.run(x, partial, weight, bias, saved, y, behind=(eps, slope))
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
    plan = _plan(x, groups, dy.dtype, activation, parameters=weight is not None or bias is not None)
    dx = torch.empty_like(x)
    partial = torch.empty(plan.reduce.partials, dtype=torch.float32, device=x.device)
    dweight = saved.new_empty(x.shape[1])
    dbias = torch.empty_like(dweight)
    plan.reduce.run(dy, x, saved, weight, bias, partial, behind=(slope,))
    plan.backward_apply.run(dy, x, saved, weight, bias, partial, dx, dweight, dbias, behind=(slope,))
    return dx, dweight, dbias
