"""Shapes at which the PReLU kernels are measured and verified."""

from __future__ import annotations

import math
from functools import partial

import torch

from advisor.ops import storage
from advisor.ops.family import Arguments, Case, Work
from advisor.ops.prelu import api, reference, spec

# A face network's (iResNet-50 at batch 128, 112 x 112), by stage.
_TRAINED = ((128, 64, 112, 112), (128, 64, 56, 56), (128, 128, 28, 28), (128, 256, 14, 14))
_ODD = ((1, 8, 1, 1), (3, 72, 9, 7), (2, 1016, 5, 3), (5, 24, 28, 26))


def _inputs(generator: torch.Generator, n: int, *, shape: tuple[int, ...], dtype: str) -> Arguments:
    """x [n, C, H, W] channels_last, weight [C] fp32."""
    _, c, h, w = shape
    values = torch.randn(n, h, w, c, device=generator.device, generator=generator).to(getattr(torch, dtype))
    weight = torch.rand(c, device=generator.device, generator=generator) * 0.5
    return values.permute(0, 3, 1, 2).requires_grad_(), weight.requires_grad_()


def _case(shape: tuple[int, ...], dtype: str) -> Case:
    forward, backward = spec.bytes_moved(elements=math.prod(shape), itemsize=getattr(torch, dtype).itemsize)
    return Case(
        name="prelu",
        kind="prelu",
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.FORWARD,), nbytes=forward),
            "backward": Work(kernels=(spec.BACKWARD,), nbytes=backward),
        },
        inputs=partial(_inputs, shape=shape, dtype=dtype),
        ours=api.prelu,
        eager=reference.prelu,
        reference=reference.prelu,
        wins=partial(spec.wins, dtype),
    )


BENCHMARK = (
    *(_case(shape, "bfloat16") for shape in _TRAINED),
    *(_case(_TRAINED[1], dtype) for dtype in ("float16", "float32")),
)
VERIFICATION = tuple(_case(shape, dtype) for shape in _ODD for dtype in storage.STORAGE)
