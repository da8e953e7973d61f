"""Shapes at which the BatchNorm(+add)+activation kernels are measured and verified."""

from __future__ import annotations

import itertools
from functools import partial

import torch

from advisor.ops import storage
from advisor.ops.batchnorm_act import api, reference, spec
from advisor.ops.family import Arguments, Case, Work

# The batch norms of ResNet-50 at batch 256, of MobileNetV3 at batch 256 and of CIFAR ResNet-18 at batch 128.
_TRAINED = (
    (256, 64, 112, 112),
    (256, 256, 56, 56),
    (256, 512, 28, 28),
    (256, 1024, 14, 14),
    (256, 2048, 7, 7),
    (256, 72, 56, 56),
    (256, 672, 14, 14),
    (128, 64, 32, 32),
    (128, 512, 4, 4),
)
# Odd sizes: few rows, a prime number of vectors, N = 1, one pixel. Channels are multiples of 8, which every dtype takes.
_ODD = ((4, 64, 28, 28), (3, 72, 9, 7), (2, 1016, 5, 3), (1, 24, 7, 5), (2, 8, 1, 1))
_KINKS = (-3.0, 0.0, 3.0, 6.0)


def _inputs(
    generator: torch.Generator, n: int, *, shape: tuple[int, ...], dtype: str, activation: str, residual: bool
) -> Arguments:
    """x and residual [n, C, H, W] channels_last, mean 0.5, deviation 1.5; statistics, weight and bias [C] fp32."""
    device = generator.device
    _, c, h, w = shape

    def tensor() -> torch.Tensor:
        values = torch.randn(n, h, w, c, device=device, generator=generator) * 1.5 + 0.5
        return values.to(getattr(torch, dtype)).permute(0, 3, 1, 2).requires_grad_()

    return (
        tensor(),
        tensor() if residual else None,
        torch.zeros(c, device=device),
        torch.ones(c, device=device),
        (torch.rand(c, device=device, generator=generator) + 0.5).requires_grad_(),
        torch.randn(c, device=device, generator=generator).requires_grad_(),
        0.1,
        1e-5,
        activation,
        0.01,
    )


def _steady(*arguments: object) -> torch.Tensor:
    """False within 1e-3 of a point where an activation's slope jumps."""
    *tensors, _, _ = arguments
    z = reference.batchnorm_act(*tensors)  # type: ignore[arg-type]
    return torch.stack([(z - kink).abs() >= 1e-3 for kink in _KINKS]).all(0)


def _case(shape: tuple[int, ...], dtype: str, activation: str, residual: bool) -> Case:
    n, c, h, w = shape
    forward, backward = spec.bytes_moved(
        elements=n * c * h * w, itemsize=getattr(torch, dtype).itemsize, residual=residual
    )
    return Case(
        name=spec.name(activation, residual),
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.FORWARD,), nbytes=forward),
            "backward": Work(kernels=(spec.BACKWARD,), nbytes=backward),
        },
        inputs=partial(_inputs, shape=shape, dtype=dtype, activation=activation, residual=residual),
        ours=api.batchnorm_act,
        eager=reference.batchnorm_act,
        reference=reference.batchnorm_act,
        wins=partial(spec.wins, activation=activation, residual=residual, dtype=dtype),
        steady=_steady,
        gradient_floor=0.05,  # with few rows a channel dx is what cancellation leaves of dy
    )


_MEASURED = (("relu", False), ("relu", True), ("none", False), ("hardswish", False))

BENCHMARK = tuple(
    _case(shape, dtype, activation, residual)
    for dtype in ("bfloat16", "float16", "float32")
    for activation, residual in _MEASURED
    for shape in (_TRAINED if dtype == "bfloat16" else _TRAINED[:3])
)
_VARIANTS = (*((a, False) for a in spec.ACTIVATIONS), *((a, True) for a in sorted(spec.RESIDUAL_ACTIVATIONS)))
# Each variant and dtype at two of the shapes, so that every shape meets every dtype.
VERIFICATION = tuple(
    _case(_ODD[(number + second) % len(_ODD)], dtype, *variant)
    for number, (variant, dtype) in enumerate(itertools.product(_VARIANTS, storage.STORAGE))
    for second in (0, 2)
)
