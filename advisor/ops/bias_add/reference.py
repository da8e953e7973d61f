"""Bias (+ residual add) in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

import torch


def bias_add(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    """x + bias (+ residual), in x's dtype. x, residual: [N, C, H, W]; bias: [C]."""
    y = x + bias.to(x.dtype).view(1, -1, 1, 1)
    return y if residual is None else y + residual
