"""The convolution as plain torch has it: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def exact_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    dilation: int = 1,
    groups: int = 1,
) -> torch.Tensor:
    """`conv2d`. x: [N, I, H, W]; weight: [O, I / groups, R, S]; bias: [O] or None."""
    return F.conv2d(x, weight, bias, stride, padding, dilation, groups)
