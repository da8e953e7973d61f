"""Cases of families of convolutions, at which they are measured and verified, and the tensors in them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from advisor.ops.convolution import Convolution
from advisor.ops.family import Arguments, Case, Work


@dataclass(frozen=True, slots=True)
class Tensors:
    """What a convolution's public function takes.

    Attributes:
        shape, weight_shape: of x, [N, C, H, W], and of the weight, whose deviation keeps the result's near x's.
        numbers: what comes behind the tensors.
        dtype, weight_dtype: of x, and of weight and bias.
        layout: of x, "nhwc" or "nchw".
        bias: None where the function takes none.
        scale: deviation of x and the bias.
    """

    shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    numbers: tuple[Any, ...]
    dtype: str = "bfloat16"
    weight_dtype: str = "float32"
    layout: str = "nhwc"
    weight_format: torch.memory_format = torch.contiguous_format
    bias: bool | None = None
    scale: float = 1.0

    def inputs(self, generator: torch.Generator, n: int) -> Arguments:
        """The arguments, of n images; those that are tensors are leaves."""
        device, (_, c, h, w) = generator.device, self.shape
        kind, weight_kind = getattr(torch, self.dtype), getattr(torch, self.weight_dtype)
        if self.layout == "nhwc" and c > 1:  # of one channel both layouts are the same
            x = torch.randn(n, h, w, c, device=device, generator=generator).permute(0, 3, 1, 2) * self.scale
        else:
            x = torch.randn(n, c, h, w, device=device, generator=generator) * self.scale
        weight = torch.randn(self.weight_shape, device=device, generator=generator)
        weight = (weight / math.prod(self.weight_shape[1:]) ** 0.5).to(weight_kind)
        given = [x.to(kind).requires_grad_(), weight.contiguous(memory_format=self.weight_format).requires_grad_()]
        if self.bias:
            terms = torch.randn(self.weight_shape[0], device=device, generator=generator) * self.scale
            given.append(terms.to(weight_kind).requires_grad_())
        return *given, *([None] if self.bias is False else []), *self.numbers


def case(convolution: Convolution, tensors: Tensors, *, passes: tuple[Work, Work], **others: Any) -> Case:
    """A case of a family of convolutions, held against PyTorch's own with parameters cast to x's dtype, as autocast runs it.

    Args:
        passes: what a forward and a backward must do.
        others: the other fields of Case.
    """
    return Case(
        shape=tensors.shape,
        dtype=tensors.dtype,
        layout=tensors.layout,
        passes=dict(zip(("forward", "backward"), passes, strict=True)),
        inputs=tensors.inputs,
        **{"eager": convolution.eager, **others},
    )
