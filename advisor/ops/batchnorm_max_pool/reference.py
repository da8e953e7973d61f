"""BatchNorm, activation and max-pooling in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops.batchnorm_act import reference as batchnorm_act


def batchnorm_max_pool(x: torch.Tensor, *norm_and_pool: Any) -> torch.Tensor:
    """max_pool2d(act(batch_norm(x))) in training mode.

    Args:
        x: [N, C, H, W], any float dtype.
        norm_and_pool: as of `api.batchnorm_max_pool`.
    """
    y: torch.Tensor = F.max_pool2d(batchnorm_act.batchnorm_act(x, None, *norm_and_pool[:8]), *norm_and_pool[8:])
    return y
