"""Launches of the squeeze-and-excite kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from advisor.ops import nvrtc, storage
from advisor.ops.launches import Launch, launch
from advisor.ops.pixel_columns import ColumnGeometry
from advisor.ops.squeeze_excite import spec


class _Launches(NamedTuple):
    """`parts`: of the pool's sums."""

    parts: int
    pool: Launch
    squeeze: Launch
    excite: Launch
    scale: Launch
    reduce: Launch
    excite_backward: Launch
    squeeze_backward: Launch
    apply: Launch


_NO_SLOPE = 0.0  # neither activation has one


@lru_cache(maxsize=4096)
def _launch(
    shape: tuple[int, int, int, int], hidden: int, dtype: torch.dtype, activation: str, gate: str, device: int
) -> _Launches:
    n, c, h, w = shape
    name = storage.name(dtype)
    found = spec.geometry(n, h * w, c, hidden, name, nvrtc.sm_count(device))
    sums, out, back = found.sums, found.apply, found.squeeze_backward
    inverse = 1.0 / (h * w)

    def streamed(source: str, entry: str, by: ColumnGeometry) -> Launch:
        sizes = n, h * w, by.vectors, by.tile, by.splits
        return launch(
            source,
            spec.stream_defines(name, gate),
            device,
            by.blocks,
            spec.THREADS,
            sizes,
            entry=f"squeeze_excite_{entry}",
        )

    def gated(entry: str, blocks: int, sizes: tuple[float, ...]) -> Launch:
        defines = spec.gate_defines(name, activation, gate, hidden)
        return launch(spec.GATE, defines, device, blocks, spec.GATE_THREADS, sizes, entry=f"squeeze_excite_{entry}")

    joined = n, sums.splits, c, hidden, found.squeeze.slices
    weights = n, c, hidden, back.slices, found.weight_slices, found.pool_blocks, found.weight_blocks
    return _Launches(
        sums.splits,
        streamed(spec.FORWARD, "pool", sums),
        gated("squeeze", found.squeeze.blocks, (*joined, inverse, _NO_SLOPE)),
        gated("excite", found.excite.blocks, (n, c, hidden, found.excite.slices)),
        streamed(spec.FORWARD, "scale", out),
        streamed(spec.BACKWARD, "backward_reduce", sums),
        gated("excite_backward", found.squeeze.blocks, (*joined, _NO_SLOPE)),
        gated("squeeze_backward", back.blocks, (*weights, inverse)),
        streamed(spec.BACKWARD, "backward_apply", out),
    )


def _plan(x: torch.Tensor, hidden: int, activation: str, gate: str) -> _Launches:
    return _launch(tuple(x.shape), hidden, x.dtype, activation, gate, x.device.index or 0)


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
    plan.pool.run(x, partial)
    plan.squeeze.run(partial, w1, b1, pooled, z1, h)
    plan.excite.run(h, w2, b2, z2)
    plan.scale.run(x, z2, y)
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
    plan.reduce.run(dy, x, partial)
    plan.excite_backward.run(partial, z1, z2, w2, dz2, dz1, h)
    plan.squeeze_backward.run(pooled, h, dz1, dz2, w1, dpool, dw1, db1, dw2, db2)
    plan.apply.run(dy, z2, dpool, dx)
    return dx, dw1, db1, dw2, db2
