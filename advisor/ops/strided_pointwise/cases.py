"""Shapes at which the kernels for 1 x 1 convolutions of stride 2 are measured and verified."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from advisor.ops.family import Arguments, Case, Work
from advisor.ops.strided_pointwise import api, reference, spec


def _inputs(generator: torch.Generator, n: int, *, call: spec.Call, dtype: str) -> Arguments:
    """x [n, I, H, W] channels_last; weight [O, I, 1, 1] fp32, of a deviation that keeps y's near 1."""
    device = generator.device
    x = torch.randn(n, call.height, call.width, call.inputs, device=device, generator=generator)
    weight = torch.randn(call.outputs, call.inputs, 1, 1, device=device, generator=generator) / call.inputs**0.5
    return x.to(getattr(torch, dtype)).permute(0, 3, 1, 2).requires_grad_(), weight.requires_grad_()


def _eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As autocast runs it: the weight cast to x's dtype."""
    return F.conv2d(x, weight.to(x.dtype), None, spec.STRIDE)


def _case(shape: tuple[int, ...], outputs: int, dtype: str = "bfloat16") -> Case:
    call = spec.call(shape, outputs)
    nbytes, flops = spec.bytes_moved(call, 2), spec.flops(call)
    return Case(
        name=spec.name(call.inputs, call.outputs),
        kind=spec.KIND,
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.PRODUCT,), nbytes=nbytes[0], flops=flops[0], unit="matrix"),
            "backward": Work(kernels=(spec.PRODUCT, spec.GATHER), nbytes=nbytes[1], flops=flops[1], unit="matrix"),
        },
        inputs=partial(_inputs, call=call, dtype=dtype),
        ours=api.strided_pointwise_conv2d,
        eager=_eager,
        reference=reference.strided_pointwise_conv2d,
        wins=partial(spec.wins, call, dtype),
    )


BENCHMARK = (
    *(_case((n, inputs, side, side), outputs) for n, inputs, outputs, side in spec.TRAINED),
    *(_case((n, inputs, side, side), outputs, "float16") for n, inputs, outputs, side in spec.TRAINED[:1]),
)
# One to a few pixels, odd sizes, one image, channels that fill no chunk and no block, several chunks and blocks across.
VERIFICATION = (
    _case((1, 8, 1, 1), 8),
    _case((2, 64, 3, 2), 64, "float16"),
    _case((3, 64, 9, 13), 128),
    _case((1, 24, 8, 33), 72),
    _case((2, 136, 7, 9), 40, "float16"),
    _case((5, 320, 6, 5), 200),
    _case((1, 64, 10, 64), 272),
    _case((2, 512, 4, 7), 64),
)
