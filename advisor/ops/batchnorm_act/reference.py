"""BatchNorm(+add)+activation in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    "relu6": F.relu6,
    "silu": F.silu,
    "hardswish": F.hardswish,
}


def activate(z: torch.Tensor, activation: str, slope: float) -> torch.Tensor:
    """`activation` of z, any shape and dtype."""
    if activation == "none":
        return z
    if activation == "leaky_relu":
        return F.leaky_relu(z, slope)
    if activation == "gelu":
        return F.gelu(z)
    if activation == "gelu_tanh":
        return F.gelu(z, approximate="tanh")
    result: torch.Tensor = ACTIVATIONS[activation](z)
    return result


def batchnorm_act(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
    activation: str = "none",
    slope: float = 0.01,
) -> torch.Tensor:
    """act(batch_norm(x) + residual) in training mode.

    Args:
        x: [N, C, H, W], any float dtype. residual: the same shape, or None.
        running_mean, running_var: [C], updated in place; None without. weight, bias: [C]; None for 1 and 0.
    """
    z = F.batch_norm(x, running_mean, running_var, weight, bias, training=True, momentum=momentum, eps=eps)
    return activate(z if residual is None else z + residual, activation, slope)


def forked_batchnorm_act(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """`batchnorm_act` of the arguments, twice: autograd adds up the gradients of both."""
    y = batchnorm_act(*arguments)
    return y, y


def frozen_batchnorm_act(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str = "none",
    slope: float = 0.01,
) -> torch.Tensor:
    """act(batch_norm(x) + residual) in evaluation mode: by the running statistics, which stay as they are."""
    z = F.batch_norm(x, running_mean, running_var, weight, bias, training=False, eps=eps)
    return activate(z if residual is None else z + residual, activation, slope)
