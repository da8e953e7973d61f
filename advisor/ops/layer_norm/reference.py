"""LayerNorm over the channels in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dim: int = -1,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Normalise over `dim`, the last one or, of [N, C, H, W], dimension 1.

    Args:
        x: any float dtype. weight, bias: [C] or None; where they are wider than x, it is widened, as autocast does.
        dtype: of the result; None: x's own.
    """
    kind = torch.promote_types(x.dtype, weight.dtype) if weight is not None else x.dtype
    rows = x.to(kind) if dim == -1 else x.to(kind).permute(0, 2, 3, 1)
    y = F.layer_norm(rows, rows.shape[-1:], weight, bias, eps).to(dtype or x.dtype)
    return y if dim == -1 else y.permute(0, 3, 1, 2)
