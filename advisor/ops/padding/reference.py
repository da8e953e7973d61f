"""Padding in plain torch: the definition that tests hold the kernels to, in fp64."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def pad(x: torch.Tensor, amounts: tuple[int, int, int, int], mode: str) -> torch.Tensor:
    """x [N, C, H, W] padded by (left, right, top, bottom) with its own values; `mode` as `F.pad` has it."""
    return F.pad(x, amounts, mode)
