"""Grouped convolution in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def grouped_conv2d(x: torch.Tensor, weight: torch.Tensor, stride: int, groups: int) -> torch.Tensor:
    """Each group's channels convolved with its own 3 x 3 taps and padding 1, written as one product a tap.

    Args:
        x: [N, C, H, W], any float dtype. weight: [C, C / groups, 3, 3].

    Returns:
        [N, C, OH, OW] with OH = (H - 1) // stride + 1.
    """
    n, c, h, w = x.shape
    rows, columns = (h - 1) // stride + 1, (w - 1) // stride + 1
    each = c // groups
    padded = F.pad(x, (1, 1, 1, 1)).reshape(n, groups, each, h + 2, w + 2)
    taps = weight.reshape(groups, each, each, 3, 3)
    y = x.new_zeros((n, groups, each, rows, columns))
    for r in range(3):
        for s in range(3):
            seen = padded[..., r : r + stride * rows : stride, s : s + stride * columns : stride]
            y = y + torch.einsum("goi,ngihw->ngohw", taps[..., r, s], seen[..., :rows, :columns])
    return y.reshape(n, c, rows, columns)
