"""The convolution as plain torch has it: the definition that tests hold the transforms to, in fp64."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def fft_conv2d(x: torch.Tensor, weight: torch.Tensor, padding: tuple[int, int]) -> torch.Tensor:
    """`conv2d` of stride 1. x: [N, I, H, W]; weight: [O, I, R, S]."""
    return F.conv2d(x, weight, None, 1, padding)
