"""Functions of torch that return NCHW where they are given NHWC, and need not; and 1-D convolutions, which know no NHWC.

Each has a stand-in made of torch's own operations, which computes in NHWC memory: the same values, in the same number of passes. For what
computes something (norms, padding) there are kernels (advisor/ops). Where a function is given no image in NHWC it runs as it is.

Replaced are names in torch.nn.functional, which modules call; Dynamo traces the stand-ins, and the functions of torch that they call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from advisor.loop.layouts import is_channels_last
from advisor.transforms.base import Undo
from advisor.transforms.patch import replace_attribute


def keep_nhwc(undo: Undo) -> None:
    """Put the stand-ins in the functions' places; `undo` takes them back."""
    for stand_in in (pixel_shuffle, pixel_unshuffle, conv1d):
        replace_attribute(undo, F, stand_in.__name__, stand_in)


def pixel_shuffle(input: torch.Tensor, upscale_factor: int) -> torch.Tensor:
    """PyTorch's, in NHWC: [N, C r r, H, W] to [N, C, H r, W r]. Channel `c r r + i r + j` becomes channel c of pixel (i, j)."""
    r = upscale_factor
    if not _image(input) or r < 1 or input.shape[1] % (r * r):
        return torch.pixel_shuffle(input, upscale_factor)
    n, c, h, w = input.shape
    pixels = input.permute(0, 2, 3, 1).reshape(n, h, w, c // (r * r), r, r)
    return pixels.permute(0, 1, 4, 2, 5, 3).reshape(n, h * r, w * r, c // (r * r)).permute(0, 3, 1, 2)


def pixel_unshuffle(input: torch.Tensor, downscale_factor: int) -> torch.Tensor:
    """The way back."""
    r = downscale_factor
    if not _image(input) or r < 1 or input.shape[2] % r or input.shape[3] % r:
        return torch.pixel_unshuffle(input, downscale_factor)
    n, c, h, w = input.shape
    pixels = input.permute(0, 2, 3, 1).reshape(n, h // r, r, w // r, r, c)
    return pixels.permute(0, 1, 3, 5, 2, 4).reshape(n, h // r, w // r, c * r * r).permute(0, 3, 1, 2)


def conv1d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> torch.Tensor:
    """A signal [N, C, L] is an image [N, C, 1, L]; the result lies in NLC, [N, L, C] in memory, as the next convolution reads it."""
    if input.dim() != 3 or not input.is_floating_point() or weight.dim() != 3:
        return torch.conv1d(input, weight, bias, stride, padding, dilation, groups)
    image = input.unsqueeze(2).contiguous(memory_format=torch.channels_last)
    around: Any = padding if isinstance(padding, str) else (0, _one(padding))
    row = torch.conv2d(image, weight.unsqueeze(2), bias, (1, _one(stride)), around, (1, _one(dilation)), groups)
    return row.squeeze(2)


def _one(value: int | Sequence[int]) -> int:
    return value if isinstance(value, int) else value[0]


def _image(x: torch.Tensor) -> bool:
    return isinstance(x, torch.Tensor) and x.dim() == 4 and is_channels_last(x)
