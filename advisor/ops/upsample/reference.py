"""Upsampling and concatenation in plain torch: the definition that tests hold the kernels to, in fp64.

Source positions are computed in fp32 whatever the values' dtype is, as PyTorch's CUDA kernels do: in fp64 a nearest pixel
could be another one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from advisor.ops.pooling.spec import Pair
from advisor.ops.upsample import spec
from advisor.ops.upsample.spec import Axis


def weights(line: Axis, mode: str, align_corners: bool, like: torch.Tensor) -> torch.Tensor:
    """[out_size, size]: what each output pixel takes of each input pixel, in the dtype of `like`."""
    out = torch.arange(line.out_size, dtype=torch.float32, device=like.device)
    shift = 0.5 if spec.half_pixel(mode, align_corners=align_corners) else 0.0
    at = (out + shift) * line.scale
    if mode == "bilinear":
        at = (at - shift).clamp_min(0.0)
    index = at.floor().long().clamp_max(line.size - 1)
    second = (at - index) if mode == "bilinear" else torch.zeros_like(at)
    second = torch.where(index < line.size - 1, second, 0.0).to(like.dtype)
    matrix = torch.zeros(line.out_size, line.size, dtype=like.dtype, device=like.device)
    matrix.scatter_add_(1, index[:, None], (1.0 - second)[:, None])
    matrix.scatter_add_(1, (index + 1).clamp_max(line.size - 1)[:, None], second[:, None])
    return matrix


def upsample_concat(
    tensors: Sequence[torch.Tensor],
    position: int,
    size: Pair,
    factors: tuple[float, float] | None,
    mode: str,
    align_corners: bool,
) -> torch.Tensor:
    """`tensors` concatenated along C, the one at `position` upsampled to `size` first. Any float dtype."""
    x = tensors[position]
    rows, columns = spec.axes(x.shape[2], x.shape[3], size, factors, align_corners=align_corners)
    down, across = (weights(line, mode, align_corners, x) for line in (rows, columns))
    y = torch.einsum("ph,nchw,qw->ncpq", down, x, across)
    return torch.cat([y if i == position else t for i, t in enumerate(tensors)], 1)
