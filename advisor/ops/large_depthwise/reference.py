"""Depthwise convolution in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def large_depthwise_conv2d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, padding: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """Each channel convolved with its own taps, written as one product a tap.

    Args:
        x: [N, C, H, W], any float dtype. weight: [C, 1, KH, KW]. bias: [C] or None.

    Returns:
        [N, C, OH, OW] with OH = H + 2 * padding - KH + 1.
    """
    n, c, h, w = x.shape
    taps = weight.shape[2:]
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    rows, columns = h + 2 * padding[0] - taps[0] + 1, w + 2 * padding[1] - taps[1] + 1
    y = x.new_zeros((n, c, rows, columns)) if bias is None else bias.view(1, c, 1, 1).expand(n, c, rows, columns)
    for r in range(taps[0]):
        for s in range(taps[1]):
            y = y + weight[:, 0, r, s].view(1, c, 1, 1) * padded[:, :, r : r + rows, s : s + columns]
    return y
