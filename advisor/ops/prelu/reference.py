"""PReLU in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def prelu(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x where it is positive, else weight[c] * x, in x's dtype. x: [N, C, H, W]; weight: [C] or of one value."""
    return F.prelu(x, weight.to(x.dtype))
