"""Pooling of volumes in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from advisor.ops.volume_pooling.spec import Triple


def max_pool3d(x: torch.Tensor, kernel: Triple, stride: Triple, padding: Triple = (0, 0, 0)) -> torch.Tensor:
    """The largest value of each window of x [N, C, D, H, W], any float dtype; of equal values the first gets the gradient.

    Windows are cut out with `unfold`, so that nothing of PyTorch's own pooling is in it.
    """
    back = [amount for p in reversed(padding) for amount in (p, p)]
    padded = F.pad(x, back, value=-torch.inf)
    cut = padded.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1]).unfold(4, kernel[2], stride[2])
    taps = cut.flatten(5)
    shown = taps.detach()
    at = torch.where(shown.isnan(), torch.inf, shown).argmax(-1, keepdim=True)
    return taps.gather(-1, at).squeeze(-1)


def avg_pool3d(x: torch.Tensor, kernel: Triple, stride: Triple) -> torch.Tensor:
    """The mean of each window."""
    cut = x.unfold(2, kernel[0], stride[0]).unfold(3, kernel[1], stride[1]).unfold(4, kernel[2], stride[2])
    return cut.flatten(5).mean(-1)


def eager_avg_pool3d(x: torch.Tensor, kernel: Triple, stride: Triple) -> torch.Tensor:
    """PyTorch's own; on a CPU, where it has none in half precision, widened."""
    if x.device.type == "cpu":
        return F.avg_pool3d(x.float(), kernel, stride).to(x.dtype)
    return F.avg_pool3d(x, kernel, stride)
