"""Depthwise convolution in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def depthwise_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
    dilation: int = 1,
) -> torch.Tensor:
    """Each channel convolved with its own k x k taps, written as one product a tap.

    Args:
        x: [N, C, H, W], any float dtype. weight: [C, 1, k, k]. bias: [C] or None.

    Returns:
        [N, C, OH, OW] with OH = (H + 2 * padding - dilation * (k - 1) - 1) // stride + 1.
    """
    n, c, h, w = x.shape
    k = weight.shape[-1]
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    rows = (h + 2 * padding[0] - dilation * (k - 1) - 1) // stride + 1
    columns = (w + 2 * padding[1] - dilation * (k - 1) - 1) // stride + 1
    y = x.new_zeros((n, c, rows, columns)) if bias is None else bias.view(1, c, 1, 1).expand(n, c, rows, columns)
    for r in range(k):
        for s in range(k):
            top, left = r * dilation, s * dilation
            seen = padded[:, :, top : top + stride * rows : stride, left : left + stride * columns : stride]
            y = y + weight[:, 0, r, s].view(1, c, 1, 1) * seen[:, :, :rows, :columns]
    return y
