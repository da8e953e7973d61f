"""Squeeze-and-excite in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def squeeze_excite(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    gate: str,
) -> torch.Tensor:
    """x * gate(act(mean(x) W1ᵀ + b1) W2ᵀ + b2), the mean over the pixels.

    Args:
        x: [N, C, H, W], any float dtype. w1: [S, C] or [S, C, 1, 1]; w2: [C, S] or [C, S, 1, 1]; b1: [S], b2: [C], or None.
        activation, gate: keys of `spec.ACTIVATIONS` and `spec.GATES`.
    """
    kind = torch.promote_types(x.dtype, w1.dtype)
    s = x.mean((2, 3), dtype=kind)
    h = F.linear(s, w1.flatten(1), b1)
    h = F.relu(h) if activation == "relu" else F.silu(h)
    z = F.linear(h, w2.flatten(1), b2)
    scale = torch.sigmoid(z) if gate == "sigmoid" else F.hardsigmoid(z)
    return x * scale.to(x.dtype)[:, :, None, None]
