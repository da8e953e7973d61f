"""Shapes at which the upsampling kernels are measured and verified."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from advisor.ops import storage
from advisor.ops.family import Arguments, Case, Work
from advisor.ops.pooling.spec import Pair
from advisor.ops.upsample import api, reference, spec

# The four levels of UNet-64 on 32 images of 256 x 256: (what is upsampled, channels of the skip it is concatenated with).
_UNET = (
    ((32, 512, 16, 16), 512),
    ((32, 256, 32, 32), 256),
    ((32, 128, 64, 64), 128),
    ((32, 64, 128, 128), 64),
)

_Call = tuple[Pair, tuple[float, float] | None, str, bool]  # size, factors, mode, align_corners


def _inputs(
    generator: torch.Generator, n: int, *, shape: tuple[int, ...], skip: int, size: Pair, dtype: str
) -> Arguments:
    """x [n, C, H, W] and, with skip channels, what comes before it in the concatenation; channels_last."""
    _, c, h, w = shape

    def tensor(channels: int, height: int, width: int) -> torch.Tensor:
        values = torch.randn(n, height, width, channels, device=generator.device, generator=generator)
        return values.to(getattr(torch, dtype)).permute(0, 3, 1, 2).requires_grad_()

    return (tensor(c, h, w), *((tensor(skip, *size),) if skip else ()))


def _ours(*tensors: torch.Tensor, call: _Call) -> torch.Tensor:
    return api.upsample_concat(tensors[::-1], len(tensors) - 1, *call)


def _reference(*tensors: torch.Tensor, call: _Call) -> torch.Tensor:
    return reference.upsample_concat(tensors[::-1], len(tensors) - 1, *call)


def _eager(x: torch.Tensor, *skip: torch.Tensor, call: _Call) -> torch.Tensor:
    size, factors, mode, align = call
    y = F.interpolate(x, None if factors else size, factors, mode, align if mode == "bilinear" else None)
    return torch.cat([*skip, y], 1) if skip else y


def case_of(
    shape: tuple[int, ...],
    dtype: str,
    mode: str = "bilinear",
    *,
    align: bool = False,
    skip: int = 0,
    size: Pair | None = None,
    factors: tuple[float, float] | None = None,
) -> Case:
    """Twice the size unless told otherwise."""
    n, c, h, w = shape
    if size is None:
        factors = factors or (2.0, 2.0)
        size = int(h * factors[0]), int(w * factors[1])
    call: _Call = size, factors, mode, align
    forward, backward = spec.bytes_moved(
        inputs=n * c * h * w,
        outputs=n * c * size[0] * size[1],
        copied=n * skip * size[0] * size[1],
        itemsize=getattr(torch, dtype).itemsize,
    )
    name = f"{mode}{' corners' if align else ''} to {size[0]}x{size[1]}" + (f"+cat{skip}" if skip else "")
    return Case(
        name=name,
        kind=spec.kind(mode, align_corners=align, concatenates=bool(skip)),
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.FORWARD,), nbytes=forward),
            "backward": Work(kernels=(spec.BACKWARD,), nbytes=backward),
        },
        inputs=partial(_inputs, shape=shape, skip=skip, size=size, dtype=dtype),
        ours=partial(_ours, call=call),
        eager=partial(_eager, call=call),
        reference=partial(_reference, call=call),
        wins=partial(spec.wins, mode, align_corners=align, concatenates=bool(skip), dtype=dtype),
    )


BENCHMARK = (
    *(case_of(shape, "bfloat16", align=True, skip=skip) for shape, skip in _UNET),
    *(case_of(shape, "bfloat16", align=align) for shape, _ in _UNET[2:] for align in (False, True)),
    *(case_of(shape, "bfloat16", "nearest", skip=skip) for shape, skip in _UNET[2:]),
    *(case_of(shape, "bfloat16", "nearest") for shape, _ in _UNET[2:]),
    *(case_of(_UNET[3][0], dtype, align=True, skip=_UNET[3][1]) for dtype in ("float16", "float32")),
)
# Every variant in bf16, every kernel in every dtype. They run emulated in the tests too, where each variant is compiled.
VERIFICATION = (
    case_of((1, 264, 3, 2), "bfloat16", align=True),
    case_of((3, 16, 1, 1), "bfloat16", skip=8),
    case_of((2, 16, 9, 13), "bfloat16", size=(4, 5)),
    case_of((2, 16, 4, 5), "bfloat16", factors=(2.5, 3.0)),
    case_of((2, 16, 5, 3), "bfloat16", "nearest", skip=8),
    case_of((2, 16, 5, 4), "bfloat16", "nearest-exact", size=(13, 9)),
    *(case_of((2, 24, 11, 7), dtype, skip=16) for dtype in storage.STORAGE),
)
