"""A batch norm in training mode with what follows it, as one argument of the functions that compute it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from advisor.ops.alignment import aligned


class Norm(NamedTuple):
    """What a batch norm has besides its input, and the activation behind it.

    Attributes:
        running_mean, running_var: [C] fp32, updated in place; None where the norm has none.
        weight, bias: [C] fp32; None for 1 and 0.
        momentum: of the running statistics; of no meaning where the norm is frozen.
        activation: a key of `spec.ACTIVATIONS`; `slope` is LeakyReLU's.
    """

    running_mean: torch.Tensor | None
    running_var: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    momentum: float
    eps: float
    activation: str = "none"
    slope: float = 0.01

    @property
    def running(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The running statistics; None where the norm has none."""
        mean, var = self.running_mean, self.running_var
        return None if mean is None or var is None else (mean, var)

    @property
    def affine(self) -> tuple[Any, Any]:
        """Weight and bias, of a norm that has both: `filled` gives one."""
        return self.weight, self.bias

    @property
    def read(self) -> tuple[Any, Any, Any, Any]:
        """Its four tensors, of a norm that has them all."""
        return self[:4]

    def filled(self, x: torch.Tensor) -> Norm:
        """As the kernels read it: with a weight of 1 and a bias of 0 where the norm of x [N, C, H, W] has none."""
        if self.weight is not None and self.bias is not None:
            return self
        c, weight, bias = x.shape[1], self.weight, self.bias
        weight = torch.ones(c, dtype=torch.float32, device=x.device) if weight is None else weight
        bias = torch.zeros(c, dtype=torch.float32, device=x.device) if bias is None else bias
        return self._replace(weight=weight, bias=bias)

    def aligned(self) -> Norm:
        """With weight and bias where the kernels' vectors begin."""
        weight, bias = self.affine
        return self._replace(weight=aligned(weight), bias=aligned(bias))
