"""Shapes at which the LayerNorm kernels are measured and verified."""

from __future__ import annotations

from functools import partial

import torch

from advisor.ops.family import Arguments, Case, Work
from advisor.ops.layer_norm import api, reference, spec

# ConvNeXt-T at batch 256 (a norm in each block and before each downsampling) and ConvNeXt-B's widest at batch 128.
# EdgeNeXt's and PVT's first stages: fewer channels than it is dispatched for, until it is measured.
_NARROW = ((256, 48, 56, 56), (256, 64, 56, 56))
_TRAINED = ((256, 96, 56, 56), (256, 192, 28, 28), (256, 384, 14, 14), (256, 768, 7, 7), (128, 1024, 7, 7))
# Under autocast the stem's norm feeds a sum and stays fp32; behind the sums the input is fp32 and a convolution follows.
_PAIRS = (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float16"))
# Every pair of types and every number of vectors a lane; one pixel, idle lanes, a prime number of vectors, several rounds.
_ODD = (
    ((1, 8, 1, 1), "bfloat16", "bfloat16"),
    ((3, 24, 5, 7), "float16", "float32"),
    ((2, 72, 9, 9), "float32", "bfloat16"),
    ((2, 96, 28, 28), "bfloat16", "bfloat16"),
    ((1, 200, 5, 3), "float32", "float16"),
    ((2, 256, 6, 5), "float32", "float32"),
    ((1, 1016, 5, 3), "float16", "float16"),
    ((1, 1536, 4, 3), "bfloat16", "float32"),
    ((1, 2048, 3, 3), "bfloat16", "bfloat16"),
    ((1, 1024, 3, 3), "float32", "float32"),
)


def _inputs(
    generator: torch.Generator, n: int, *, shape: tuple[int, ...], dtype: str, result: str, dim: int
) -> Arguments:
    """x [n, C, H, W] channels_last (dim 1) or [n, H, W, C] (dim -1), mean 0.5, deviation 1.5; weight and bias [C] fp32."""
    device = generator.device
    _, c, h, w = shape
    x = (torch.randn(n, h, w, c, device=device, generator=generator) * 1.5 + 0.5).to(getattr(torch, dtype))
    return (
        (x if dim == -1 else x.permute(0, 3, 1, 2)).requires_grad_(),
        (torch.rand(c, device=device, generator=generator) + 0.5).requires_grad_(),
        torch.randn(c, device=device, generator=generator).requires_grad_(),
        1e-6,
        dim,
        getattr(torch, result),
    )


def _reference(*arguments: object) -> torch.Tensor:
    *rest, _ = arguments  # without the result's dtype: it stays fp64
    return reference.layer_norm(*rest)  # type: ignore[arg-type]  # the case's own arguments


def _case(shape: tuple[int, ...], dtype: str, result: str, dim: int = 1) -> Case:
    n, c, h, w = shape
    elements = n * c * h * w
    forward, backward = spec.bytes_moved(elements=elements, dtype=dtype, result=result)
    return Case(
        name=spec.name(dtype, result),
        kind=spec.name(dtype, result),
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.FORWARD,), nbytes=forward, flops=spec.FORWARD_FLOPS * elements),
            "backward": Work(kernels=(spec.BACKWARD,), nbytes=backward, flops=spec.BACKWARD_FLOPS * elements),
        },
        inputs=partial(_inputs, shape=shape, dtype=dtype, result=result, dim=dim),
        ours=api.layer_norm,
        eager=reference.layer_norm,
        reference=_reference,
        wins=partial(spec.wins, channels=c, dtype=dtype, result=result),
        gradient_floor=0.05,  # in a row of few channels dx is what cancellation leaves of dy
    )


BENCHMARK = tuple(
    _case(shape, *pair)
    for pair in (*_PAIRS, ("float32", "float32"))
    for shape in ((*_TRAINED, *_NARROW) if pair == _PAIRS[0] else _TRAINED[:2])
)
VERIFICATION = tuple(_case(*case, dim=(1, -1)[number % 2]) for number, case in enumerate(_ODD))
