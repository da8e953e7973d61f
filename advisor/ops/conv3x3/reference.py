"""3 x 3 convolution of stride 1 in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def conv3x3(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """3 x 3 taps, padding 1, stride 1, one group, no bias, written as one product a tap.

    Args:
        x: [N, I, H, W], any float dtype. weight: [O, I, 3, 3].

    Returns:
        [N, O, H, W].
    """
    _, _, h, w = x.shape
    padded = F.pad(x, (1, 1, 1, 1))
    taps = [
        torch.einsum("oi,nihw->nohw", weight[..., r, s], padded[..., r : r + h, s : s + w])
        for r in range(3)
        for s in range(3)
    ]
    return torch.stack(taps).sum(0)
