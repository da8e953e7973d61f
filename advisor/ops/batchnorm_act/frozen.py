"""Launches of a batch norm that normalises by its running statistics: one a pass. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import nvrtc, storage
from advisor.ops.batchnorm_act import spec
from advisor.ops.batchnorm_act.norm import Norm
from advisor.ops.launches import Launch, launch


@lru_cache(maxsize=4096)
def _launch(
    source: str,
    rows: int,
    channels: int,
    dtype: torch.dtype,
    activation: str,
    residual: bool,
    affine_gradients: bool,
    device: int,
) -> Launch:
    name = storage.name(dtype)
    shape = spec.geometry(rows, channels, name, nvrtc.sm_count(device), spec.BLOCKS_PER_SM)
    return launch(
        source,
        spec.frozen_defines(source, name, activation, residual, affine_gradients),
        device,
        (shape.row_blocks, shape.tiles),
        spec.THREADS,
        (rows, shape.vectors, shape.tile),
    ).leaving(shape.row_blocks * 2 * channels if affine_gradients else 0)


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    affine_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns y (like x) and mask (bytes; empty where `spec.frozen_masked` says that the backward needs none).

    x and residual: [N, C, H, W] channels_last, fp16, bf16 or fp32; the rest [C] fp32.
    """
    n, c, h, w = x.shape
    device = x.device.index or 0
    variant = norm.activation, residual is not None, affine_gradients
    plan = _launch(spec.FROZEN_FORWARD, n * h * w, c, x.dtype, *variant, device)
    y = torch.empty_like(x)
    masked = spec.frozen_masked(*variant)
    width = storage.vector_width(storage.name(x.dtype))
    mask = torch.empty(x.numel() // width if masked else 0, dtype=torch.uint8, device=x.device)
    plan.run(x, residual, *norm.read, y, mask, behind=(norm.eps, norm.slope))
    return y, mask


def backward(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    mask: torch.Tensor,
    norm: Norm,
    residual: bool,
    affine_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dx and dresidual (like dy; empty without a residual), dweight and dbias ([C] fp32; empty without `affine_gradients`).

    dy: [N, C, H, W] channels_last, like x, which is None where `spec.frozen_keeps_input` says that it is not read.
    """
    n, c, h, w = dy.shape
    device = dy.device.index or 0
    plan = _launch(spec.FROZEN_BACKWARD, n * h * w, c, dy.dtype, norm.activation, residual, affine_gradients, device)
    dx = torch.empty_like(dy)
    dresidual = torch.empty_like(dy) if residual else dy.new_empty(0)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=dy.device)
    dweight, dbias = (dy.new_empty(c if affine_gradients else 0, dtype=torch.float32) for _ in range(2))
    sums = partial, nvrtc.tickets(dy.device)
    plan.run(dy, x, mask, *norm.read, *sums, dx, dresidual, dweight, dbias, behind=(norm.eps, norm.slope))
    return dx, dresidual, dweight, dbias
