"""Bias + activation and layer scale + drop path + add in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

import torch

from advisor.ops.batchnorm_act.reference import activate


def over_channels(values: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
    """`values`, one a channel, in a shape that broadcasts over the dimension `dim` of x."""
    shape = [1] * x.dim()
    shape[dim] = -1
    return values.view(shape)


def bias_act(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    slope: float = 0.01,
    in_place: bool = False,
    dim: int = 1,
) -> torch.Tensor:
    """act(x + bias + residual), like x. x, residual: with C channels in `dim`; bias: [C], added in x's dtype. x stays as it is."""
    z = x
    if bias is not None:
        z = z + over_channels(bias.to(x.dtype), x, dim)
    if residual is not None:
        z = z + residual
    return activate(z, activation, slope)


def scale_add(
    branch: torch.Tensor,
    scale: torch.Tensor | None,
    keep: torch.Tensor | None,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    result: torch.dtype | None = None,
    twin: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """residual + (branch + bias) * scale * keep in `result` (None: like residual); with `twin` also in the branch's dtype.

    Args:
        branch, residual: [N, C, H, W]. bias, scale: C values. keep: N values.
    """
    y = branch if bias is None else branch + bias.to(branch.dtype).reshape(1, -1, 1, 1)
    if scale is not None:
        y = y * scale.reshape(1, -1, 1, 1)
    if keep is not None:
        y = y * keep.reshape(-1, 1, 1, 1)
    y = (residual + y).to(residual.dtype if result is None or residual.dtype == torch.float64 else result)
    return (y, y.to(branch.dtype)) if twin else y
