"""Shapes at which the kernel that normalises images is measured and verified."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from advisor.ops import storage
from advisor.ops.family import Arguments, Case, Work
from advisor.ops.input import api, reference, spec

# ImageNet's, of every torchvision recipe.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _inputs(generator: torch.Generator, n: int, *, shape: tuple[int, ...], x_nhwc: bool) -> Arguments:
    """Pixels [n, C, H, W] uint8, the table of their values, mean and standard deviation [C, 1, 1]."""
    _, c, h, w = shape
    order = (n, h, w, c) if x_nhwc else (n, c, h, w)
    pixels = torch.randint(256, order, dtype=torch.uint8, device=generator.device, generator=generator)
    mean, std = (torch.tensor(values[:c], device=generator.device).view(c, 1, 1) for values in (_MEAN, _STD))
    every = torch.arange(256, dtype=torch.float32, device=generator.device).expand(c, 1, 256)
    table = every.div(255).sub(mean).div(std).view(c, 256)
    return pixels.permute(0, 3, 1, 2) if x_nhwc else pixels, table, mean, std


def _ours(pixels: torch.Tensor, table: torch.Tensor, mean: Any, std: Any, *, dtype: str, y_nhwc: bool) -> torch.Tensor:
    return api.normalise(pixels, table, getattr(torch, dtype), _format(y_nhwc))


def _eager(pixels: torch.Tensor, table: Any, mean: torch.Tensor, std: torch.Tensor, *, dtype: str, y_nhwc: bool) -> Any:
    """What scripts that send uint8 write."""
    return (
        pixels.float().div(255).sub(mean).div(std).contiguous(memory_format=_format(y_nhwc)).to(getattr(torch, dtype))
    )


def _reference(pixels: torch.Tensor, table: torch.Tensor, mean: Any, std: Any) -> torch.Tensor:
    return reference.normalise(pixels, table)


def _format(nhwc: bool) -> torch.memory_format:
    return torch.channels_last if nhwc else torch.contiguous_format


def _case(shape: tuple[int, int, int, int], dtype: str, *, x_nhwc: bool = True, y_nhwc: bool = False) -> Case:
    n, c, h, w = shape
    work = Work(kernels=(spec.NORMALISE,), nbytes=spec.bytes_moved(n * c * h * w, dtype))
    orders = {True: "nhwc", False: "nchw"}
    return Case(
        name=f"uint8 {orders[x_nhwc]} to normalised {orders[y_nhwc]}",
        kind=spec.kind(c, x_nhwc=x_nhwc, y_nhwc=y_nhwc),
        shape=shape,
        dtype=dtype,
        passes={"forward": work},
        inputs=partial(_inputs, shape=shape, x_nhwc=x_nhwc),
        ours=partial(_ours, dtype=dtype, y_nhwc=y_nhwc),
        eager=partial(_eager, dtype=dtype, y_nhwc=y_nhwc),
        reference=_reference,
        wins=partial(spec.wins, c, x_nhwc=x_nhwc, y_nhwc=y_nhwc, dtype=dtype),
        layout=orders[y_nhwc],
    )


_IMAGENET, _CIFAR = (256, 3, 224, 224), (512, 3, 32, 32)

BENCHMARK = (
    _case(_IMAGENET, "float32"),
    _case(_IMAGENET, "float32", y_nhwc=True),
    _case(_IMAGENET, "float32", x_nhwc=False),
    _case(_IMAGENET, "bfloat16"),
    _case(_IMAGENET, "bfloat16", y_nhwc=True),
    _case(_IMAGENET, "float16", y_nhwc=True),
    _case(_CIFAR, "float32"),
)
# Every order in every dtype, with planes that are no multiple of a vector, one channel, and more than a block.
VERIFICATION = (
    *(
        _case((3, 3, 8, 10), dtype, x_nhwc=x_nhwc, y_nhwc=y_nhwc)
        for dtype in storage.STORAGE
        for x_nhwc, y_nhwc in ((True, False), (True, True), (False, False))
    ),
    *(
        _case((2, 3, 7, 5), dtype, x_nhwc=x_nhwc, y_nhwc=y_nhwc)
        for dtype in ("float32", "bfloat16")
        for x_nhwc, y_nhwc in ((True, False), (True, True), (False, False))
    ),
    *(_case((2, 1, *size), dtype, x_nhwc=False) for dtype in storage.STORAGE for size in ((4, 6), (3, 3))),
    _case((2, 3, 48, 72), "float32"),
)
