"""Shapes at which the padding kernels are measured and verified."""

from __future__ import annotations

from functools import partial

import torch

from advisor.ops.family import Arguments, Case, Work
from advisor.ops.padding import api, cuda, reference, spec


def _inputs(generator: torch.Generator, n: int, *, shape: tuple[int, ...], dtype: str) -> Arguments:
    """x [n, C, H, W] channels_last."""
    _, c, h, w = shape
    values = torch.randn(n, h, w, c, device=generator.device, generator=generator)
    return (values.to(getattr(torch, dtype)).permute(0, 3, 1, 2).requires_grad_(),)


def _case(shape: tuple[int, int, int, int], dtype: str, mode: str, amounts: spec.Amounts | int) -> Case:
    """By one amount on all sides unless told otherwise."""
    sides: spec.Amounts = (amounts,) * 4 if isinstance(amounts, int) else amounts
    n, c, h, w = shape
    _, _, out_h, out_w = cuda.padded(shape, sides)
    forward, backward = spec.bytes_moved(
        inputs=n * c * h * w, outputs=n * c * out_h * out_w, itemsize=getattr(torch, dtype).itemsize
    )
    told = sides[0] if len(set(sides)) == 1 else "x".join(map(str, sides))
    return Case(
        name=f"{mode} by {told}",
        kind=mode,
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.FORWARD,), nbytes=forward),
            "backward": Work(kernels=(spec.BACKWARD,), nbytes=backward),
        },
        inputs=partial(_inputs, shape=shape, dtype=dtype),
        ours=partial(api.pad2d, amounts=sides, mode=mode),
        eager=partial(reference.pad, amounts=sides, mode=mode),
        reference=partial(reference.pad, amounts=sides, mode=mode),
        wins=partial(spec.wins, mode, dtype),
    )


# A generator of images from images (CycleGAN, CUT) of 256 x 256: its residual blocks and its last convolution; style transfer's.
BENCHMARK = (
    _case((4, 256, 64, 64), "bfloat16", "reflect", 1),
    _case((4, 64, 256, 256), "bfloat16", "reflect", 3),
    _case((16, 128, 128, 128), "bfloat16", "reflect", 1),
    _case((4, 256, 64, 64), "float32", "reflect", 1),
    _case((4, 64, 256, 256), "float32", "reflect", 3),
    _case((4, 64, 256, 256), "float16", "reflect", 3),
    _case((4, 64, 256, 256), "bfloat16", "replicate", 1),
    _case((4, 64, 256, 256), "bfloat16", "circular", 1),
)
VERIFICATION = (
    _case((2, 16, 5, 7), "bfloat16", "reflect", 3),
    _case((1, 264, 4, 3), "bfloat16", "reflect", (2, 0, 1, 3)),
    _case((3, 24, 9, 6), "float16", "replicate", (1, 4, 2, 0)),
    _case((2, 12, 5, 4), "float32", "reflect", (3, 1, 0, 4)),
    _case((2, 16, 1, 1), "bfloat16", "replicate", 2),
    _case((2, 16, 6, 5), "bfloat16", "circular", (5, 2, 3, 6)),
    _case((1, 8, 2, 3), "float32", "circular", 1),
)
