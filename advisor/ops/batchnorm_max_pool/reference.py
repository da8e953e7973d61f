"""BatchNorm, activation and max-pooling in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from advisor.ops.batchnorm_act import reference as batchnorm_act
from advisor.ops.pooling.spec import Pair


def batchnorm_max_pool(
    x: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
    kernel: Pair,
    stride: Pair,
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    ceil_mode: bool = False,
) -> torch.Tensor:
    """max_pool2d(act(batch_norm(x))) in training mode.

    Args:
        x: [N, C, H, W], any float dtype.
        running_mean, running_var: [C], updated in place. weight, bias: [C].
    """
    y = batchnorm_act.batchnorm_act(x, None, running_mean, running_var, weight, bias, momentum, eps, activation, slope)
    return F.max_pool2d(y, kernel, stride, padding, dilation, ceil_mode)
