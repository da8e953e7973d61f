"""Norms over a growing concatenation in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from advisor.ops.batchnorm_act import reference

# running_mean, running_var, weight, bias: [C] each.
Norm = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def batchnorm_concat(
    features: Sequence[torch.Tensor],
    norms: Sequence[Norm],
    momentum: float,
    eps: float,
    activation: str = "none",
    slope: float = 0.01,
) -> tuple[torch.Tensor, ...]:
    """For each norm k act(batch_norm(cat(features[:k + 1]))) in training mode; running statistics are updated in place.

    Args:
        features: [N, c_k, H, W], as many as norms; any float dtype.
        norms: of c_0 + ... + c_k channels.
    """
    return tuple(
        reference.batchnorm_act(torch.cat(tuple(features[: k + 1]), 1), None, *norm, momentum, eps, activation, slope)
        for k, norm in enumerate(norms)
    )
