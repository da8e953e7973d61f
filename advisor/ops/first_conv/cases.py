"""Shapes at which the first-convolution kernels are measured and verified."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch.nn import functional as F

from advisor.ops import moments_cases, storage
from advisor.ops.family import Arguments, Case, Work
from advisor.ops.first_conv import api, reference, spec

# (N, side), output channels, k, stride, bias
_TRAINED = (
    ((256, 224), 64, 7, 2, False),  # ResNet, ResNeXt, DenseNet, GoogLeNet
    ((128, 224), 64, 3, 1, True),  # VGG
    ((256, 224), 96, 4, 4, True),  # ConvNeXt-T
    ((256, 224), 32, 3, 2, False),  # MobileNetV2, EfficientNet-B0, RegNet
    ((256, 224), 16, 3, 2, False),  # MobileNetV3
    ((32, 256), 64, 3, 1, False),  # UNet
    ((128, 32), 64, 3, 1, False),  # ResNet-18 on CIFAR
)


def _inputs(
    generator: torch.Generator,
    n: int,
    *,
    shape: tuple[int, ...],
    dtype: str,
    weight_dtype: str,
    channels: int,
    kernel: int,
    stride: int,
    padding: tuple[int, int],
    bias: bool,
) -> Arguments:
    """x [n, 3, H, W] and weight [C, 3, k, k], of deviation 1 / k, channels_last; bias [C]."""
    device = generator.device
    _, c, h, w = shape
    x = torch.randn(n, h, w, c, device=device, generator=generator).to(getattr(torch, dtype))
    weight = torch.randn(channels, kernel, kernel, c, device=device, generator=generator) / kernel
    kind = getattr(torch, weight_dtype)
    return (
        x.permute(0, 3, 1, 2),
        weight.to(kind).permute(0, 3, 1, 2).requires_grad_(),
        torch.randn(channels, device=device, generator=generator).to(kind).requires_grad_() if bias else None,
        stride,
        padding,
    )


def _eager(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int, padding: tuple[int, int]
) -> torch.Tensor:
    """As autocast runs it: parameters cast to x's dtype."""
    bias = None if bias is None else bias.to(x.dtype)
    return F.conv2d(x, weight.to(x.dtype), bias, stride, padding)


def _case(
    shape: tuple[int, ...],
    dtype: str,
    channels: int,
    kernel: int,
    stride: int,
    padding: tuple[int, int] | None = None,
    *,
    bias: bool = False,
    weight_dtype: str = "float32",
) -> Case:
    pad = 0 if stride == kernel else kernel // 2
    padding = (pad, pad) if padding is None else padding
    sized = spec.call(shape, channels, kernel, stride, padding, bias)
    moved, products = spec.bytes_moved(sized, storage.itemsize(dtype)), spec.flops(sized)
    return Case(
        name=spec.name(kernel, stride, channels, bias=bias),
        kind=spec.kind(kernel, stride, bias=bias),
        shape=shape,
        dtype=dtype,
        passes={
            kind: Work(kernels=(source,), nbytes=nbytes, flops=flops, unit="matrix")
            for kind, source, nbytes, flops in zip(
                ("forward", "backward"), (spec.FORWARD, spec.BACKWARD_WEIGHT), moved, products, strict=True
            )
        },
        inputs=partial(
            _inputs,
            shape=shape,
            dtype=dtype,
            weight_dtype=weight_dtype,
            channels=channels,
            kernel=kernel,
            stride=stride,
            padding=padding,
            bias=bias,
        ),
        ours=api.first_conv2d,
        eager=_eager,
        reference=reference.first_conv2d,
        wins=partial(spec.wins, dtype=dtype, kernel=kernel, stride=stride, channels=channels),
    )


def _with_norm(conv: Case, channels: int, kernel: int, stride: int) -> tuple[Case, Case]:
    call = spec.call(conv.shape, channels, kernel, stride, (kernel // 2, kernel // 2), False)
    result = (call.batch, channels, call.out_height, call.out_width)
    wins = partial(spec.moments_win, kernel, stride, channels)
    conv = replace(conv, kind=conv.name)  # channels too decide whether the norm takes its moments
    return moments_cases.cases(conv, api.first_conv2d_moments, result, wins)


_ALONE = tuple(
    _case((n, spec.IN_CHANNELS, side, side), dtype, channels, kernel, stride, bias=bias)
    for dtype in ("bfloat16", "float16")
    for (n, side), channels, kernel, stride, bias in (_TRAINED if dtype == "bfloat16" else _TRAINED[:1])
)
# Norms stand behind those without a bias. That behind the last takes one launch.
BENCHMARK = (
    *_ALONE,
    *(
        case
        for (n, side), channels, kernel, stride, bias in _TRAINED
        if not bias
        for case in _with_norm(
            _case((n, spec.IN_CHANNELS, side, side), "bfloat16", channels, kernel, stride), channels, kernel, stride
        )
    ),
)
# Rows that can be copied as they are and rows that cannot, odd sizes, more taps than image, unequal padding and none, several
# strips of columns, tiles that the image does not fill, channels that fill no group of products, parameters in 16 bits.
VERIFICATION = (
    _case((2, 3, 32, 40), "bfloat16", 64, 7, 2),
    _case((1, 3, 19, 23), "float16", 64, 7, 2, bias=True, weight_dtype="float16"),
    _case((2, 3, 9, 16), "bfloat16", 32, 3, 2),
    _case((1, 3, 7, 8), "float16", 16, 3, 2, (0, 1), bias=True),
    _case((2, 3, 8, 136), "bfloat16", 64, 3, 1, bias=True),
    _case((3, 3, 5, 7), "float16", 16, 3, 1),
    _case((1, 3, 12, 72), "bfloat16", 96, 4, 4, bias=True),
    _case((1, 3, 1, 1), "bfloat16", 24, 5, 1, (4, 3)),
    _case((1, 3, 14, 11), "bfloat16", 40, 5, 3, (0, 2), weight_dtype="bfloat16"),
    _case((1, 3, 10, 24), "float16", 80, 6, 2, (2, 2)),
    _case((1, 3, 8, 272), "bfloat16", 8, 4, 2, (3, 3)),
    *(
        _with_norm(_case(shape, dtype, channels, kernel, stride), channels, kernel, stride)[0]
        for shape, dtype, channels, kernel, stride in (
            ((1, 3, 19, 23), "float16", 64, 7, 2),
            ((3, 3, 15, 17), "bfloat16", 16, 3, 2),
            ((2, 3, 8, 136), "bfloat16", 64, 3, 1),
        )
    ),
)
