"""3 x 3 convolution of stride 1 as plain torch has it: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def winograd(x: torch.Tensor, weight: torch.Tensor, padding: int = 1) -> torch.Tensor:
    """`conv2d` with one group and no bias. x: [N, I, H, W]; weight: [O, I, 3, 3]."""
    return F.conv2d(x, weight, None, 1, padding)
