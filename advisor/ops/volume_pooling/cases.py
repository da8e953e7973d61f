"""Shapes at which the kernels for pooling volumes are measured and verified."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch.nn import functional as F

from advisor.ops import storage
from advisor.ops.family import Arguments, Case, Work
from advisor.ops.volume_pooling import api, reference, spec
from advisor.ops.volume_pooling.spec import VolumeWindow

_STEM = VolumeWindow((3, 3, 3), (2, 2, 2), (1, 1, 1))
_HALVING = VolumeWindow((2, 2, 2), (2, 2, 2))
_PLANES = VolumeWindow((1, 2, 2), (1, 2, 2))


def _inputs(
    generator: torch.Generator, n: int, *, shape: tuple[int, ...], dtype: str, window: VolumeWindow
) -> Arguments:
    """x [n, C, D, H, W] channels_last_3d, and the window."""
    _, c, *size = shape
    values = torch.randn(n, *size, c, device=generator.device, generator=generator).to(getattr(torch, dtype))
    return (values.permute(0, 4, 1, 2, 3).requires_grad_(), *window)


def _avg_inputs(*arguments: object, window: VolumeWindow, **about: object) -> Arguments:
    return _inputs(*arguments, window=window, **about)[:3]  # type: ignore[arg-type]  # the case's own arguments


def _case(operation: str, shape: tuple[int, ...], window: VolumeWindow, dtype: str) -> Case:
    n, c, *size = shape
    forward, backward = spec.bytes_moved(
        operation,
        inputs=math.prod(shape),
        outputs=n * c * math.prod(window.output(tuple(size))),
        itemsize=getattr(torch, dtype).itemsize,
    )
    is_max = operation == "max_pool3d"
    return Case(
        name=f"{operation} {window.label}",
        kind=operation,
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.MAX_FORWARD if is_max else spec.AVG,), nbytes=forward),
            "backward": Work(kernels=(spec.MAX_BACKWARD if is_max else spec.AVG,), nbytes=backward),
        },
        inputs=partial(_inputs if is_max else _avg_inputs, shape=shape, dtype=dtype, window=window),
        ours=api.max_pool3d if is_max else api.avg_pool3d,
        eager=F.max_pool3d if is_max else reference.eager_avg_pool3d,
        reference=reference.max_pool3d if is_max else reference.avg_pool3d,
        wins=partial(spec.wins, operation, dtype=dtype),
    )


# A 3-D ResNet's stem (16 frames of 112 x 112), a 3-D UNet's levels, pooling of planes as in networks for thick slices.
BENCHMARK = (
    _case("max_pool3d", (32, 64, 16, 56, 56), _STEM, "bfloat16"),
    _case("max_pool3d", (2, 32, 96, 96, 96), _HALVING, "bfloat16"),
    _case("max_pool3d", (2, 32, 96, 96, 96), _PLANES, "bfloat16"),
    _case("max_pool3d", (32, 64, 16, 56, 56), _STEM, "float16"),
    _case("max_pool3d", (32, 64, 16, 56, 56), _STEM, "float32"),
    _case("avg_pool3d", (2, 32, 96, 96, 96), _HALVING, "bfloat16"),
    _case("avg_pool3d", (2, 32, 96, 96, 96), _HALVING, "float16"),
    _case("avg_pool3d", (2, 32, 96, 96, 96), _HALVING, "float32"),
)
_ODD = VolumeWindow((3, 2, 3), (1, 2, 3), (1, 0, 1))
_SPARSE = VolumeWindow((1, 1, 1), (2, 2, 2))  # elements that no window covers
VERIFICATION = (
    *(_case("max_pool3d", (2, 16, 5, 7, 6), _STEM, dtype) for dtype in storage.STORAGE),
    *(_case("avg_pool3d", (2, 16, 4, 6, 5), _HALVING, dtype) for dtype in storage.STORAGE),
    _case("max_pool3d", (1, 264, 4, 5, 7), _ODD, "bfloat16"),
    _case("max_pool3d", (2, 8, 3, 5, 4), _SPARSE, "bfloat16"),
    _case("avg_pool3d", (1, 24, 5, 4, 6), VolumeWindow((3, 2, 2), (1, 1, 2)), "bfloat16"),
    _case("avg_pool3d", (2, 8, 3, 5, 4), _SPARSE, "bfloat16"),
)
