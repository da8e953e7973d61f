"""Shapes at which the bias (+ add) kernels are measured and verified."""

from __future__ import annotations

import math
from functools import partial

import torch

from advisor.ops import storage
from advisor.ops.bias_add import api, reference, spec
from advisor.ops.family import Arguments, Case, Work

# Results of convolutions: a diffusion UNet's levels at batch 64, a 3-D UNet's first, as an image; a segmentation head's; small ones.
_TRAINED = (
    (64, 128, 64, 64),
    (64, 256, 32, 32),
    (64, 384, 16, 16),
    (64, 512, 8, 8),
    (2, 32, 16384, 128),
    (4, 256, 64, 64),
    (8, 128, 46, 62),
)
_ODD = ((1, 8, 1, 1), (3, 72, 9, 7), (2, 1016, 5, 3), (5, 24, 28, 26))


def _inputs(generator: torch.Generator, n: int, *, shape: tuple[int, ...], dtype: str, residual: bool) -> Arguments:
    """x and residual [n, C, H, W] channels_last, bias [C] fp32."""
    _, c, h, w = shape

    def tensor() -> torch.Tensor:
        values = torch.randn(n, h, w, c, device=generator.device, generator=generator)
        return values.to(getattr(torch, dtype)).permute(0, 3, 1, 2).requires_grad_()

    bias = torch.randn(c, device=generator.device, generator=generator).requires_grad_()
    return tensor(), bias, tensor() if residual else None


def _case(shape: tuple[int, ...], dtype: str, *, residual: bool = False) -> Case:
    elements, itemsize = math.prod(shape), getattr(torch, dtype).itemsize
    forward, backward = spec.bytes_moved(elements=elements, itemsize=itemsize, residual=residual)
    name = spec.name(residual=residual)
    return Case(
        name=name,
        kind=name,
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.FORWARD,), nbytes=forward),
            "backward": Work(kernels=(spec.BACKWARD,), nbytes=backward),
        },
        inputs=partial(_inputs, shape=shape, dtype=dtype, residual=residual),
        ours=api.bias_add,
        eager=reference.bias_add,
        reference=reference.bias_add,
        wins=partial(spec.wins, residual=residual, dtype=dtype),
    )


BENCHMARK = (
    *(_case(shape, "bfloat16") for shape in _TRAINED),
    *(_case(_TRAINED[number], "bfloat16", residual=True) for number in (0, 2, 5)),
    *(_case(_TRAINED[1], dtype) for dtype in ("float16", "float32")),
    *(_case(_TRAINED[1], dtype, residual=True) for dtype in ("float16", "float32")),
)
VERIFICATION = tuple(
    _case(shape, dtype, residual=residual)
    for shape, residual in zip(_ODD, (False, True, False, True), strict=True)
    for dtype in storage.STORAGE
)
