"""A convolution in plain torch: the definition that tests hold this family to, in fp64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The convolution of x [N, C, ...] of two or three dimensions, in `dtype` or that of x."""
    kind = dtype or x.dtype
    function = F.conv3d if x.dim() == 5 else F.conv2d
    b = None if bias is None else bias.to(kind)
    return function(x.to(kind), weight.to(kind), b, tuple(stride), tuple(padding), tuple(dilation))
