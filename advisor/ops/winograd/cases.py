"""Shapes at which Winograd's transforms are measured and verified."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from advisor.ops.family import Arguments, Case, Work
from advisor.ops.winograd import api, reference, spec


def _inputs(
    generator: torch.Generator,
    n: int,
    *,
    call: spec.WinogradConv,
    weight_dtype: str,
    weight_format: torch.memory_format,
) -> Arguments:
    """x [n, I, H, W] channels_last; weight [O, I, 3, 3] of a deviation that keeps y's near 1."""
    device = generator.device
    x = torch.randn(n, call.height, call.width, call.inputs, device=device, generator=generator)
    weight = torch.randn(call.outputs, call.inputs, 3, 3, device=device, generator=generator)
    weight = (weight / (9 * call.inputs) ** 0.5).to(getattr(torch, weight_dtype))
    x = x.to(torch.bfloat16).permute(0, 3, 1, 2)
    return x.requires_grad_(), weight.contiguous(memory_format=weight_format).requires_grad_(), call.padding


def _eager(x: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
    """As autocast runs it: the weight cast to x's dtype."""
    return F.conv2d(x, weight.to(x.dtype), None, 1, padding)


def _case(
    shape: tuple[int, ...],
    outputs: int,
    *,
    padding: int = 1,
    weight_dtype: str = "float32",
    weight_format: torch.memory_format = torch.channels_last,
) -> Case:
    call = spec.call(shape, outputs, padding)
    nbytes, flops = spec.bytes_moved(call), spec.flops(call)
    kernels = tuple(spec.KERNELS)
    return Case(
        name=spec.name(call.inputs, call.outputs),
        kind=spec.name(call.inputs, call.outputs),
        shape=shape,
        dtype=spec.DTYPE,
        passes={
            "forward": Work(kernels=kernels, nbytes=nbytes[0], flops=flops[0], unit="matrix"),
            "backward": Work(kernels=kernels, nbytes=nbytes[1], flops=flops[1], unit="matrix"),
        },
        inputs=partial(_inputs, call=call, weight_dtype=weight_dtype, weight_format=weight_format),
        ours=api.winograd,
        eager=_eager,
        reference=reference.winograd,
        wins=partial(spec.wins, call, spec.DTYPE),
    )


BENCHMARK = (
    *(_case((n, inputs, side, side), outputs) for n, inputs, outputs, side in spec.TRAINED),
    _case((32, 512, 34, 34), 512, padding=0),
)
# One tile, odd sizes, tiles that hang over, unequal channels, both weights' dtypes and formats, without padding.
VERIFICATION = (
    _case((1, 192, 4, 4), 256),
    _case((3, 192, 5, 4), 192, weight_dtype="bfloat16"),
    _case((1, 256, 5, 9), 192, weight_format=torch.contiguous_format),
    _case((2, 320, 7, 6), 192),
    _case((2, 192, 6, 10), 256, padding=0),
    _case((1, 256, 9, 7), 192, padding=0),
)
