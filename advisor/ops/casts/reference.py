"""The definition: a cast changes nothing but the rounding."""

from __future__ import annotations

import torch


def cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies of `tensors`."""
    return tuple(tensor.clone() for tensor in tensors)
