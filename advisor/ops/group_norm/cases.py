"""Shapes at which the GroupNorm(+activation) kernels are measured and verified."""

from __future__ import annotations

from functools import partial

import torch

from advisor.ops.family import Arguments, Case, Work
from advisor.ops.group_norm import api, reference, spec

# (groups, shape): ResNet-50 with GroupNorm at batch 256, a diffusion UNet, a detection head, an image-to-image network.
_TRAINED = (
    (32, (256, 256, 56, 56)),
    (32, (256, 512, 28, 28)),
    (32, (256, 1024, 14, 14)),
    (32, (16, 320, 64, 64)),
    (32, (4, 256, 100, 168)),
    (1, (256, 384, 14, 14)),
    (64, (16, 64, 256, 256)),
)
# Every pair of types and every activation, with and without parameters; groups wider and narrower than a vector, across
# vectors and tiles, one group, one channel a group; one row of pixels; N = 1.
_ODD = (
    (2, (2, 16, 1, 2), "bfloat16", "bfloat16", "silu", True),
    (4, (3, 24, 5, 7), "float32", "bfloat16", "relu", True),
    (24, (2, 24, 9, 9), "float16", "float16", "none", False),
    (1, (2, 72, 7, 5), "bfloat16", "bfloat16", "silu", True),
    (32, (1, 256, 9, 14), "float32", "float32", "silu", True),
    (8, (2, 200, 5, 3), "float32", "float32", "silu", True),
    (4, (1, 1016, 3, 3), "float16", "float16", "none", True),
    (64, (3, 64, 16, 24), "bfloat16", "float32", "relu", False),
    (16, (2, 64, 16, 24), "bfloat16", "float32", "relu", True),
)


def _inputs(
    generator: torch.Generator,
    n: int,
    *,
    shape: tuple[int, ...],
    groups: int,
    dtype: str,
    result: str,
    activation: str,
    affine: bool,
) -> Arguments:
    """x [n, C, H, W] channels_last, mean 0.5, deviation 1.5; weight and bias [C] fp32, or None."""
    device = generator.device
    _, c, h, w = shape
    x = (torch.randn(n, h, w, c, device=device, generator=generator) * 1.5 + 0.5).to(getattr(torch, dtype))
    return (
        x.permute(0, 3, 1, 2).requires_grad_(),
        groups,
        (torch.rand(c, device=device, generator=generator) + 0.5).requires_grad_() if affine else None,
        torch.randn(c, device=device, generator=generator).requires_grad_() if affine else None,
        1e-5,
        activation,
        getattr(torch, result),
    )


def _reference(*arguments: object) -> torch.Tensor:
    *rest, _ = arguments  # without the result's dtype: it stays fp64
    return reference.group_norm(*rest)  # type: ignore[arg-type]  # the case's own arguments


def _steady(*arguments: object) -> torch.Tensor:
    """False within 1e-3 of ReLU's kink."""
    x, groups, weight, bias, eps, *_ = arguments
    return reference.group_norm(x, groups, weight, bias, eps).abs() >= 1e-3  # type: ignore[arg-type]  # the case's own arguments


def _case(groups: int, shape: tuple[int, ...], dtype: str, result: str, activation: str, affine: bool = True) -> Case:
    n, c, h, w = shape
    elements = n * c * h * w
    forward, backward = spec.bytes_moved(elements=elements, dtype=dtype, result=result)
    return Case(
        name=spec.name(groups, c, activation, dtype, result),
        kind=spec.kind(groups == c, activation, dtype, result),
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.FORWARD,), nbytes=forward, flops=spec.FORWARD_FLOPS * elements),
            "backward": Work(kernels=(spec.BACKWARD,), nbytes=backward, flops=spec.BACKWARD_FLOPS * elements),
        },
        inputs=partial(
            _inputs, shape=shape, groups=groups, dtype=dtype, result=result, activation=activation, affine=affine
        ),
        ours=api.group_norm,
        eager=reference.group_norm,
        reference=_reference,
        wins=partial(spec.wins, channels=c, groups=groups, activation=activation, dtype=dtype, result=result),
        steady=_steady if activation == "relu" else None,
        gradient_floor=0.05,  # in a group of few values dx is what cancellation leaves of dy
    )


BENCHMARK = (
    *(_case(groups, shape, "bfloat16", "bfloat16", "none") for groups, shape in _TRAINED),
    *(_case(*_TRAINED[number], "bfloat16", "bfloat16", "relu") for number in (0, 4)),
    *(_case(*_TRAINED[number], "bfloat16", "bfloat16", "silu") for number in (0, 3)),
    _case(*_TRAINED[0], "bfloat16", "float32", "none"),
    _case(*_TRAINED[0], "float16", "float16", "none"),
    _case(*_TRAINED[0], "float32", "float32", "none"),
)
VERIFICATION = tuple(_case(*case) for case in _ODD)
