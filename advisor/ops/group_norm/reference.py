"""GroupNorm(+activation) in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def activate(z: torch.Tensor, activation: str, slope: float = 0.01) -> torch.Tensor:
    """`activation`, a key of `spec.ACTIVATIONS`, of z; `slope` is LeakyReLU's."""
    if activation == "leaky_relu":
        return F.leaky_relu(z, slope)
    if activation == "relu":
        return F.relu(z)
    return F.silu(z) if activation == "silu" else z


def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str = "none",
    dtype: torch.dtype | None = None,
    slope: float = 0.01,
) -> torch.Tensor:
    """act(group_norm(x)); with as many groups as channels it is instance normalisation.

    Args:
        x: [N, C, H, W], any float dtype. weight, bias: [C] or None; where they are wider than x, it is widened, as autocast does.
        dtype: of the result; None: x's own.
    """
    kind = torch.promote_types(x.dtype, weight.dtype) if weight is not None else x.dtype
    weight, bias = (None if p is None else p.to(kind) for p in (weight, bias))
    return activate(F.group_norm(x.to(kind), groups, weight, bias, eps), activation, slope).to(dtype or x.dtype)
