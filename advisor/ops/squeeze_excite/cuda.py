"""Launches of the squeeze-and-excite kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.squeeze_excite import spec


@dataclass(frozen=True, slots=True)
class _Launch:
    """Everything about a launch that depends on shape, dtype and variant only, ready to pass."""

    pool: Any
    scale: Any
    squeeze: Any
    excite: Any
    excite_backward: Any
    squeeze_backward: Any
    reduce: Any
    apply: Any
    block: tuple[int, int, int]
    gate_block: tuple[int, int, int]
    sums_grid: tuple[int, int, int]
    apply_grid: tuple[int, int, int]
    squeeze_grid: tuple[int, int, int]
    excite_grid: tuple[int, int, int]
    weights_grid: tuple[int, int, int]
    parts: int
    # scalars as the kernels take them, in their order
    sums: tuple[Any, ...]
    written: tuple[Any, ...]
    joined: tuple[Any, ...]
    expanded: tuple[Any, ...]
    weights: tuple[Any, ...]
    inverse: Any


def _int32(*values: int) -> tuple[Any, ...]:
    return tuple(np.int32(value) for value in values)


@lru_cache(maxsize=4096)
def _launch(
    shape: tuple[int, int, int, int], hidden: int, dtype: torch.dtype, activation: str, gate: str, device: int
) -> _Launch:
    n, c, h, w = shape
    name = storage.name(dtype)
    found = spec.geometry(n, h * w, c, hidden, name, nvrtc.sm_count(device))
    stream = tuple(spec.stream_defines(name, gate).items())
    between = tuple(spec.gate_defines(name, activation, gate, hidden).items())
    (pool, scale), (squeeze, excite, excite_backward, squeeze_backward), (reduce, apply) = (
        [nvrtc.function(source, entry, between if source == spec.GATE else stream, device) for entry in entries]
        for source, entries in spec.KERNELS.items()
    )
    sums, out = found.sums, found.apply
    return _Launch(
        pool=pool,
        scale=scale,
        squeeze=squeeze,
        excite=excite,
        excite_backward=excite_backward,
        squeeze_backward=squeeze_backward,
        reduce=reduce,
        apply=apply,
        block=(spec.THREADS, 1, 1),
        gate_block=(spec.GATE_THREADS, 1, 1),
        sums_grid=(sums.blocks, 1, 1),
        apply_grid=(out.blocks, 1, 1),
        squeeze_grid=(found.squeeze.blocks, 1, 1),
        excite_grid=(found.excite.blocks, 1, 1),
        weights_grid=(found.squeeze_backward.blocks, 1, 1),
        parts=sums.splits,
        sums=_int32(n, h * w, sums.vectors, sums.tile, sums.splits),
        written=_int32(n, h * w, out.vectors, out.tile, out.splits),
        joined=_int32(n, sums.splits, c, hidden, found.squeeze.slices),
        expanded=_int32(n, c, hidden, found.excite.slices),
        weights=_int32(
            n,
            c,
            hidden,
            found.squeeze_backward.slices,
            found.weight_slices,
            found.pool_blocks,
            found.weight_blocks,
        ),
        inverse=np.float32(1.0 / (h * w)),
    )


def _plan(x: torch.Tensor, hidden: int, activation: str, gate: str) -> _Launch:
    return _launch(tuple(x.shape), hidden, x.dtype, activation, gate, x.device.index or 0)


_NO_SLOPE = np.float32(0.0)  # neither activation has one


def forward(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    gate: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns y (like x) and saved [N * (2 C + S)] fp32: the means [N, C], z2 [N, C] and z1 [N, S], one after the other.

    x: [N, C, H, W] channels_last. w1: [S, C, ...], w2: [C, S, ...], contiguous fp32.
    """
    n, c = x.shape[:2]
    hidden = w1.shape[0]
    plan = _plan(x, hidden, activation, gate)
    y = torch.empty_like(x)
    scratch = torch.empty(n * (plan.parts * c + hidden), dtype=torch.float32, device=x.device)
    saved = torch.empty(n * (2 * c + hidden), dtype=torch.float32, device=x.device)
    partial, pooled = scratch.data_ptr(), saved.data_ptr()
    h = partial + 4 * n * plan.parts * c
    z2, z1 = pooled + 4 * n * c, pooled + 8 * n * c
    stream = nvrtc.stream(x.device.index or 0)
    plan.pool(plan.sums_grid, plan.block, (x.data_ptr(), partial, *plan.sums), 0, stream)
    plan.squeeze(
        plan.squeeze_grid,
        plan.gate_block,
        (partial, w1.data_ptr(), nvrtc.address(b1), pooled, z1, h, *plan.joined, plan.inverse, _NO_SLOPE),
        0,
        stream,
    )
    plan.excite(plan.excite_grid, plan.gate_block, (h, w2.data_ptr(), nvrtc.address(b2), z2, *plan.expanded), 0, stream)
    plan.scale(plan.apply_grid, plan.block, (x.data_ptr(), z2, y.data_ptr(), *plan.written), 0, stream)
    return y, saved


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    saved: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    activation: str,
    gate: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dx (like x) and the gradients of w1, b1, w2, b2: fp32, the weights in their shapes.

    dy: like x, channels_last.
    """
    n, c = x.shape[:2]
    hidden = w1.shape[0]
    plan = _plan(x, hidden, activation, gate)
    dx = torch.empty_like(x)
    scratch = torch.empty(n * ((plan.parts + 2) * c + 2 * hidden), dtype=torch.float32, device=x.device)
    dw1, dw2 = (saved.new_empty(weight.shape) for weight in (w1, w2))
    db1, db2 = saved.new_empty(hidden), saved.new_empty(c)
    pooled = saved.data_ptr()
    z2, z1 = pooled + 4 * n * c, pooled + 8 * n * c
    partial = scratch.data_ptr()
    dz2 = partial + 4 * n * plan.parts * c
    dpool, dz1 = dz2 + 4 * n * c, dz2 + 8 * n * c
    h = dz1 + 4 * n * hidden
    stream = nvrtc.stream(x.device.index or 0)
    plan.reduce(plan.sums_grid, plan.block, (dy.data_ptr(), x.data_ptr(), partial, *plan.sums), 0, stream)
    plan.excite_backward(
        plan.squeeze_grid,
        plan.gate_block,
        (partial, z1, z2, w2.data_ptr(), dz2, dz1, h, *plan.joined, _NO_SLOPE),
        0,
        stream,
    )
    plan.squeeze_backward(
        plan.weights_grid,
        plan.gate_block,
        (
            pooled,
            h,
            dz1,
            dz2,
            w1.data_ptr(),
            dpool,
            dw1.data_ptr(),
            db1.data_ptr(),
            dw2.data_ptr(),
            db2.data_ptr(),
            *plan.weights,
            plan.inverse,
        ),
        0,
        stream,
    )
    plan.apply(plan.apply_grid, plan.block, (dy.data_ptr(), z2, dpool, dx.data_ptr(), *plan.written), 0, stream)
    return dx, dw1, db1, dw2, db2
