"""Shapes at which the depthwise kernels are measured and verified."""

from __future__ import annotations

from functools import partial

import torch

from advisor.ops import moments_cases
from advisor.ops.convolution_cases import Tensors, case
from advisor.ops.depthwise import api, reference, spec
from advisor.ops.family import Case, Work

# (k, stride), (C, side): depthwise layers at 224 x 224, batch 256.
_TRAINED = (
    # MobileNetV2, MobileNetV3, EfficientNet-B0
    ((3, 1), ((32, 112), (96, 112), (144, 56), (192, 28), (384, 14), (576, 14), (960, 7))),
    ((3, 2), ((96, 112), (144, 56), (192, 28), (576, 14))),
    ((5, 1), ((240, 28), (672, 14), (1152, 7))),
    ((5, 2), ((72, 56), (144, 56), (672, 14))),
    # ConvNeXt-T
    ((7, 1), ((96, 56), (192, 28), (384, 14), (768, 7))),
    # ShuffleNetV2 x1.0
    ((3, 1), ((58, 28), (116, 14))),
)
# What other networks of docs/networks.md have, and nothing is dispatched for until it is measured: EdgeNeXt's 9 taps, with a bias, and
# DeepLabV3+'s taps far apart.
_ALSO = ((256, 160, 14), (256, 304, 7))
_DILATED = ((64, 512, 16, 12), (64, 512, 16, 24), (16, 304, 64, 12))
# A visual attention network's: 7 taps, 3 pixels apart, with a bias.
_SPREAD = ((64, 64, 56), (64, 128, 28), (64, 320, 14))
_BIASED = 7  # ConvNeXt's convolutions have a bias, the others a batch norm behind them


def _case(
    shape: tuple[int, ...],
    dtype: str,
    kernel: int,
    stride: int = 1,
    padding: tuple[int, int] | None = None,
    dilation: int = 1,
    *,
    bias: bool = False,
    weight_dtype: str = "float32",
) -> Case:
    padding = (dilation * (kernel // 2),) * 2 if padding is None else padding
    sized = spec.call(shape, kernel, stride, padding, dilation)
    # Bytes alone are the limit that the goals are stated against, also where fp32 arithmetic takes longer (the .cu headers).
    forward, backward = spec.bytes_moved(sized, getattr(torch, dtype).itemsize)
    kernels = spec.sources(sized, dtype)
    return case(
        api.CONVOLUTION,
        Tensors(
            shape,
            (shape[1], 1, kernel, kernel),
            (stride, padding, dilation),
            dtype=dtype,
            weight_dtype=weight_dtype,
            bias=bias,
        ),
        passes=(Work(kernels=kernels[0], nbytes=forward), Work(kernels=kernels[1], nbytes=backward)),
        name=spec.name(kernel, stride, dilation, bias=bias),
        kind=spec.kind(kernel, stride, dilation, bias=bias, channels=shape[1]),
        ours=api.depthwise_conv2d,
        reference=reference.depthwise_conv2d,
        wins=partial(
            spec.wins,
            channels=shape[1],
            kernel=kernel,
            stride=stride,
            dilation=dilation,
            image=min(shape[2:]),
            bias=bias,
            dtype=dtype,
        ),
    )


# Those with a batch norm behind them; the last of 5 taps so small that it takes one launch.
_WITH_NORM = (
    ((3, 1), ((32, 112), (144, 56), (384, 14))),
    ((3, 2), ((96, 112), (144, 56))),
    ((5, 1), ((240, 28), (1152, 7))),
    ((5, 2), ((144, 56), (72, 56))),
)


def _with_norm(conv: Case, kernel: int, stride: int) -> tuple[Case, Case]:
    call = spec.call(conv.shape, kernel, stride, (kernel // 2, kernel // 2), 1)
    result = (call.batch, call.channels, call.out_height, call.out_width)
    return moments_cases.cases(conv, api.depthwise_conv2d_moments, result, partial(spec.moments_win, call, conv.dtype))


_ALONE = tuple(
    _case((256, c, side, side), dtype, kernel, stride, bias=kernel == _BIASED)
    for dtype in ("bfloat16", "float16", "float32")
    for (kernel, stride), sizes in _TRAINED
    for c, side in (sizes if dtype == "bfloat16" else sizes[:1])
)
BENCHMARK = (
    *_ALONE,
    *(_case((n, c, side, side), "bfloat16", 9, bias=True) for n, c, side in _ALSO),
    *(_case((n, c, side, side), "bfloat16", 3, dilation=dilation) for n, c, side, dilation in _DILATED),
    *(_case((n, c, side, side), "bfloat16", 7, dilation=3, bias=True) for n, c, side in _SPREAD),
    *(
        case
        for (kernel, stride), sizes in _WITH_NORM
        for c, side in sizes
        for case in _with_norm(_case((256, c, side, side), "bfloat16", kernel, stride), kernel, stride)
    ),
)
_ALSO_IN_FP16 = (  # which differs from bf16 in conversions only
    (3, 34, 9, 13),
    (2, 24, 9, 11),
    (2, 24, 14, 10),
    (2, 40, 14, 15),
    (1, 10, 9, 31),
    (2, 12, 12, 9),
    (2, 16, 6, 7),
)
# Odd sizes, one pixel, no padding and unequal padding, C that fills no tile, rows cut into segments, dilated lattices of unequal
# size, taps that reach over the whole image.
_ODD = tuple(
    case
    for dtype in spec.STORAGE
    for case in (
        _case((3, 34, 9, 13), dtype, 3, bias=True),
        _case((2, 8, 1, 1), dtype, 3),
        _case((1, 6, 40, 5), dtype, 3, padding=(0, 2)),
        _case((2, 66, 11, 8), dtype, 3, 2),
        _case((2, 10, 8, 9), dtype, 3, 2, padding=(0, 2), bias=True),
        _case((2, 24, 14, 10), dtype, 5, bias=True),
        _case((2, 12, 10, 16), dtype, 5, 2),
        _case((1, 4, 7, 6), dtype, 5, 2, padding=(4, 1)),
        _case((2, 40, 14, 15), dtype, 7, bias=True),
        _case((2, 6, 3, 4), dtype, 7, padding=(6, 5)),
        _case((1, 10, 9, 31), dtype, 7, bias=True),
        _case((1, 18, 15, 14), dtype, 7, 2),
        _case((2, 12, 12, 9), dtype, 3, dilation=2, bias=True),
        _case((1, 6, 4, 11), dtype, 5, dilation=3),
        _case((1, 10, 12, 17), dtype, 9),
        _case((1, 6, 9, 10), dtype, 11, 2),
        _case((1, 6, 8, 18), dtype, 13, bias=True),
        _case((1, 4, 17, 16), dtype, 15),
        _case((1, 4, 16, 33), dtype, 15, 2),
        _case((2, 16, 6, 7), dtype, 3, weight_dtype=dtype, bias=True),
        _case((2, 24, 9, 11), dtype, 3, 2, bias=True),
        _case((2, 40, 12, 9), dtype, 5, 2, padding=(2, 1)),
    )
    if dtype != "float16" or case.shape in _ALSO_IN_FP16
    if dtype != "float32" or case.name != "depthwise k3 s1 bias" or case.shape != (2, 16, 6, 7)
)
VERIFICATION = (
    *_ODD,
    *(
        _with_norm(_case(shape, dtype, kernel, stride), kernel, stride)[0]
        for shape, dtype, kernel, stride in (
            ((3, 40, 9, 13), "float32", 3, 1),
            ((2, 72, 11, 8), "float16", 3, 2),
            ((2, 24, 14, 10), "bfloat16", 5, 1),
        )
    ),
)
