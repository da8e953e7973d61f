"""A first convolution in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def first_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: tuple[int, int] = (0, 0),
) -> torch.Tensor:
    """A convolution of three channels, written as one product a tap.

    Args:
        x: [N, 3, H, W], any float dtype. weight: [C, 3, k, k]. bias: [C] or None.

    Returns:
        [N, C, OH, OW] with OH = (H + 2 * padding - k) // stride + 1.
    """
    n, _, h, w = x.shape
    channels, k = weight.shape[0], weight.shape[-1]
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
    rows, columns = (h + 2 * padding[0] - k) // stride + 1, (w + 2 * padding[1] - k) // stride + 1
    y = x.new_zeros(1) if bias is None else bias.view(1, channels, 1, 1)
    y = y.expand(n, channels, rows, columns)
    for r in range(k):
        for s in range(k):
            seen = padded[:, :, r : r + stride * rows : stride, s : s + stride * columns : stride]
            y = y + torch.einsum("oc,nchw->nohw", weight[:, :, r, s], seen[:, :, :rows, :columns])
    return y
