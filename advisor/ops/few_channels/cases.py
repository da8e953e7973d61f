"""Shapes at which convolutions of a few channels are measured and verified."""

from __future__ import annotations

import math
from functools import partial

import torch

from advisor.ops.family import Arguments, Case, Work
from advisor.ops.few_channels import api, reference, spec

Sizes = tuple[int, ...]


def _inputs(
    generator: torch.Generator,
    n: int,
    *,
    shape: Sizes,
    dtype: str,
    out: int,
    taps: Sizes,
    stride: Sizes,
    padding: Sizes,
) -> Arguments:
    """x [n, C, ...] channels_last without a gradient, weight [O, C, ...] in the same dtype, no bias."""
    device = generator.device
    _, c, *size = shape
    last = (0, len(shape) - 1, *range(1, len(shape) - 1))
    x = torch.randn(n, *size, c, device=device, generator=generator).to(getattr(torch, dtype)).permute(last)
    scale = 1 / math.sqrt(c * math.prod(taps))
    weight = torch.randn(out, *taps, c, device=device, generator=generator) * scale
    weight = weight.to(getattr(torch, dtype)).permute(last).requires_grad_()
    return x, weight, None, stride, padding, (1,) * len(taps)


def _case(shape: Sizes, dtype: str, out: int, taps: Sizes, stride: Sizes, padding: Sizes) -> Case:
    n, c, *size = shape
    made = [(s + 2 * p - k) // t + 1 for s, p, k, t in zip(size, padding, taps, stride, strict=True)]
    result = n * out * math.prod(made)
    flops, nbytes = 2 * result * c * math.prod(taps), 2 * (math.prod(shape) + result)
    work = Work(kernels=(spec.PAD,), nbytes=nbytes, flops=flops, unit="matrix")
    return Case(
        name=spec.name(len(size), c, taps),
        kind=spec.kind(len(size), c),
        shape=shape,
        dtype=dtype,
        passes={"forward": work, "backward": work},
        inputs=partial(_inputs, shape=shape, dtype=dtype, out=out, taps=taps, stride=stride, padding=padding),
        ours=api.few_channels_conv,
        eager=reference.convolution,
        reference=reference.convolution,
        wins=partial(spec.wins, dims=len(size), channels=c, compute=dtype),
    )


# Stems of 3-D ResNets (16 frames of 112 x 112), first convolutions of 3-D UNets with one and four modalities; images of one channel, of a
# pair (a discriminator that sees both), of optical flow.
BENCHMARK = (
    _case((32, 3, 16, 112, 112), "bfloat16", 64, (7, 7, 7), (1, 2, 2), (3, 3, 3)),
    _case((16, 3, 16, 112, 112), "bfloat16", 64, (3, 7, 7), (1, 2, 2), (1, 3, 3)),
    _case((2, 1, 128, 128, 128), "bfloat16", 32, (3, 3, 3), (1, 1, 1), (1, 1, 1)),
    _case((2, 4, 128, 128, 128), "bfloat16", 32, (3, 3, 3), (1, 1, 1), (1, 1, 1)),
    _case((64, 1, 256, 256), "bfloat16", 64, (3, 3), (1, 1), (1, 1)),
    _case((128, 1, 224, 224), "bfloat16", 64, (7, 7), (2, 2), (3, 3)),
    _case((64, 2, 128, 128), "bfloat16", 64, (3, 3), (1, 1), (1, 1)),
    _case((128, 4, 224, 224), "bfloat16", 64, (7, 7), (2, 2), (3, 3)),
    _case((16, 6, 256, 256), "bfloat16", 64, (4, 4), (2, 2), (1, 1)),
    _case((1024, 3, 32, 32), "bfloat16", 24, (2, 2), (1, 1), (0, 0)),
    _case((32, 3, 16, 112, 112), "float16", 64, (7, 7, 7), (1, 2, 2), (3, 3, 3)),
)
VERIFICATION = (
    _case((2, 3, 4, 7, 6), "bfloat16", 8, (3, 3, 3), (1, 2, 2), (1, 1, 1)),
    _case((1, 1, 3, 5, 4), "float16", 8, (1, 3, 3), (1, 1, 1), (0, 1, 1)),
    _case((2, 7, 9, 11), "bfloat16", 16, (3, 3), (2, 2), (1, 1)),
    _case((3, 2, 17, 15), "float16", 8, (2, 2), (1, 1), (0, 0)),
)
