"""Shapes at which the 1 x 1 convolution kernel is measured and verified: always with the batch norm that takes its moments.

Beside it stands what it takes the place of: PyTorch's convolution and this project's batch norm, which reads the result once
more. The backward is the same on both sides.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional as F

from advisor.ops import moments_cases
from advisor.ops.family import Arguments, Case, Work
from advisor.ops.pointwise import api, reference, spec


def _inputs(generator: torch.Generator, n: int, *, shape: tuple[int, ...], dtype: str, out_channels: int) -> Arguments:
    """x [n, CI, H, W] channels_last, mean 0.5; weight [CO, CI, 1, 1] fp32, of a deviation that keeps y's near 1."""
    device = generator.device
    _, c, h, w = shape
    x = torch.randn(n, h, w, c, device=device, generator=generator) + 0.5
    weight = torch.randn(out_channels, c, 1, 1, device=device, generator=generator) / c**0.5
    return x.to(getattr(torch, dtype)).permute(0, 3, 1, 2).requires_grad_(), weight.requires_grad_()


def _eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As autocast runs it: the weight cast to x's dtype."""
    return F.conv2d(x, weight.to(x.dtype))


def _cases(shape: tuple[int, ...], out_channels: int, dtype: str) -> tuple[Case, Case]:
    """With a batch norm and ReLU behind it: with its moments; and apart, where the convolution is PyTorch's own."""
    n, c, h, w = shape
    rows = n * h * w
    nbytes, flops = spec.bytes_moved(rows, c, out_channels), spec.flops(rows, c, out_channels)
    pytorchs = Case(
        name=spec.name(c, out_channels),
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(), nbytes=nbytes, flops=flops, unit="matrix"),
            "backward": Work(kernels=(), nbytes=2 * nbytes, flops=2 * flops, unit="matrix"),
        },
        inputs=partial(_inputs, shape=shape, dtype=dtype, out_channels=out_channels),
        ours=_eager,
        eager=_eager,
        reference=reference.pointwise_conv2d,
        wins=lambda: "the convolution is PyTorch's own",
    )
    wins = partial(spec.wins, dtype=dtype, rows=rows, in_channels=c, out_channels=out_channels)
    leaving, apart = moments_cases.cases(pytorchs, api.pointwise_conv2d_moments, (n, out_channels, h, w), wins)
    forward = leaving.passes["forward"]
    ours = replace(forward, kernels=(spec.FORWARD, *forward.kernels))
    return replace(leaving, passes={**leaving.passes, "forward": ours}), replace(apart, wins=pytorchs.wins)


BENCHMARK = tuple(
    case
    for dtype in ("bfloat16", "float16")
    for c, out, side in spec.TRAINED
    if dtype == "bfloat16" or (c, out) == (64, 256)
    for case in _cases((256, c, side, side), out, dtype)
)
# Few and odd pixels, channels that fill no step, column or chunk, several chunks, several columns of blocks.
VERIFICATION = tuple(
    _cases(shape, out, dtype)[0]
    for shape, out, dtype in (
        ((1, 8, 1, 2), 8, "float16"),
        ((2, 16, 5, 7), 64, "bfloat16"),
        ((3, 24, 9, 11), 72, "float16"),
        ((1, 64, 13, 5), 24, "bfloat16"),
        ((1, 40, 9, 9), 240, "bfloat16"),
        ((1, 136, 13, 11), 272, "bfloat16"),
        ((2, 200, 13, 11), 40, "float16"),
        ((1, 512, 5, 7), 128, "bfloat16"),
    )
)
