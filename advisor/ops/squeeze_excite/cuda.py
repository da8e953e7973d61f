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
    gate: Any
    gate_backward: Any
    reduce: Any
    apply: Any
    block: tuple[int, int, int]
    gate_block: tuple[int, int, int]
    sums_grid: tuple[int, int, int]
    scale_grid: tuple[int, int, int]
    gate_grid: tuple[int, int, int]
    apply_grid: tuple[int, int, int]
    partials: int  # fp32 values
    samples: Any
    rows: Any
    vectors: Any
    channels: Any
    hidden: Any
    tile: Any
    tiles: Any
    parts: Any
    splits: Any
    lanes: tuple[Any, Any]
    inverse: Any


@lru_cache(maxsize=4096)
def _launch(
    shape: tuple[int, int, int, int], hidden: int, dtype: torch.dtype, activation: str, gate: str, device: int
) -> _Launch:
    n, c, h, w = shape
    name = storage.name(dtype)
    found = spec.geometry(n, h * w, c, hidden, name, nvrtc.sm_count(device))
    stream = tuple(spec.stream_defines(name, activation, gate).items())
    between = tuple(spec.gate_defines(activation, gate).items())
    (pool, scale), (forward, backward), (reduce, apply) = (
        [nvrtc.function(source, entry, between if source == spec.GATE else stream, device) for entry in entries]
        for source, entries in spec.KERNELS.items()
    )
    sums, out = found.sums, found.apply
    return _Launch(
        pool=pool,
        scale=scale,
        gate=forward,
        gate_backward=backward,
        reduce=reduce,
        apply=apply,
        block=(spec.THREADS, 1, 1),
        gate_block=(spec.GATE_THREADS, 1, 1),
        sums_grid=(sums.splits, sums.tiles, n),
        scale_grid=(out.splits, out.tiles, n),
        gate_grid=(found.gate_blocks, 1, 1),
        apply_grid=(found.weight_blocks + out.splits * out.tiles * n, 1, 1),
        partials=n * sums.splits * c,
        samples=np.int32(n),
        rows=np.int32(h * w),
        vectors=np.int32(sums.vectors),
        channels=np.int32(c),
        hidden=np.int32(hidden),
        tile=np.int32(sums.tile),
        tiles=np.int32(sums.tiles),
        parts=np.int32(sums.splits),
        splits=np.int32(out.splits),
        lanes=(np.int32(found.lanes[0]), np.int32(found.lanes[1])),
        inverse=np.float32(1.0 / (h * w)),
    )


def _plan(x: torch.Tensor, hidden: int, activation: str, gate: str) -> _Launch:
    return _launch(tuple(x.shape), hidden, x.dtype, activation, gate, x.device.index or 0)  # type: ignore[arg-type]


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


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
    plan = _plan(x, w1.shape[0], activation, gate)
    y = torch.empty_like(x)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=x.device)
    saved = torch.empty(n * (2 * c + w1.shape[0]), dtype=torch.float32, device=x.device)
    pooled = saved.data_ptr()
    z2, z1 = pooled + 4 * n * c, pooled + 8 * n * c
    stream = nvrtc.stream(x.device.index or 0)
    plan.pool(
        plan.sums_grid,
        plan.block,
        (x.data_ptr(), partial.data_ptr(), plan.rows, plan.vectors, plan.tile),
        0,
        stream,
    )
    plan.gate(
        plan.gate_grid,
        plan.gate_block,
        (
            partial.data_ptr(),
            w1.data_ptr(),
            _address(b1),
            w2.data_ptr(),
            _address(b2),
            pooled,
            z1,
            z2,
            plan.samples,
            plan.parts,
            plan.channels,
            plan.hidden,
            *plan.lanes,
            plan.inverse,
            np.float32(0.0),
        ),
        0,
        stream,
    )
    plan.scale(
        plan.scale_grid,
        plan.block,
        (x.data_ptr(), z2, y.data_ptr(), plan.rows, plan.vectors, plan.tile),
        0,
        stream,
    )
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
    """Returns dx (like x) and the gradients of w1, b1, w2, b2: fp32, views of one tensor, the weights in their shapes.

    dy: like x, channels_last.
    """
    n, c = x.shape[:2]
    hidden = w1.shape[0]
    plan = _plan(x, hidden, activation, gate)
    dx = torch.empty_like(x)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=x.device)
    between = torch.empty(n * (2 * c + hidden), dtype=torch.float32, device=x.device)
    gradients = torch.empty(2 * c * hidden + c + hidden, dtype=torch.float32, device=x.device)
    # in this order each begins at 16 bytes, whatever the hidden width
    dw1, dw2, db2, db1 = torch.split(gradients, [c * hidden, c * hidden, c, hidden])
    pooled = saved.data_ptr()
    z2, z1 = pooled + 4 * n * c, pooled + 8 * n * c
    dpool = between.data_ptr()
    dz2, dz1 = dpool + 4 * n * c, dpool + 8 * n * c
    stream = nvrtc.stream(x.device.index or 0)
    plan.reduce(
        plan.sums_grid,
        plan.block,
        (dy.data_ptr(), x.data_ptr(), partial.data_ptr(), plan.rows, plan.vectors, plan.tile),
        0,
        stream,
    )
    plan.gate_backward(
        plan.gate_grid,
        plan.gate_block,
        (
            partial.data_ptr(),
            z1,
            z2,
            w1.data_ptr(),
            w2.data_ptr(),
            dz1,
            dz2,
            dpool,
            plan.samples,
            plan.parts,
            plan.channels,
            plan.hidden,
            plan.inverse,
            np.float32(0.0),
        ),
        0,
        stream,
    )
    plan.apply(
        plan.apply_grid,
        plan.block,
        (
            dy.data_ptr(),
            pooled,
            z1,
            z2,
            dz1,
            dz2,
            dpool,
            dx.data_ptr(),
            dw1.data_ptr(),
            db1.data_ptr(),
            dw2.data_ptr(),
            db2.data_ptr(),
            plan.samples,
            plan.rows,
            plan.vectors,
            plan.hidden,
            plan.tile,
            plan.tiles,
            plan.splits,
            np.float32(0.0),
        ),
        0,
        stream,
    )
    return dx, dw1.view(w1.shape), db1, dw2.view(w2.shape), db2
