"""Shapes at which the grouped convolution kernels are measured and verified."""

from __future__ import annotations

from functools import partial

import torch

from advisor.ops import moments_cases
from advisor.ops.convolution_cases import Tensors, case
from advisor.ops.family import Case, Work
from advisor.ops.grouped import api, reference, spec, wide
from advisor.ops.grouped.conv import grouped_conv


def _case(
    shape: tuple[int, ...],
    dtype: str,
    group: int,
    stride: int = 1,
    *,
    weight_dtype: str = "float32",
    weight_format: torch.memory_format = torch.channels_last,
) -> Case:
    groups = shape[1] // group
    sized = grouped_conv(shape, groups, stride)
    nbytes, flops = spec.bytes_moved(sized, 2), spec.flops(sized)
    forward = () if spec.forward_wins(group, stride) else (spec.forward_source(group, stride),)
    gradient = spec.backward_data_source(group, stride), spec.BACKWARD_WEIGHT
    if spec.has_wide_groups(group, stride):  # as they run on Hopper
        forward, gradient = (wide.CONVOLUTION,), (wide.CONVOLUTION, gradient[1])
    if spec.has_wide_weight(group, stride):
        gradient = gradient[0], wide.BACKWARD_WEIGHT
    return case(
        api.CONVOLUTION,
        Tensors(
            shape,
            (shape[1], group, 3, 3),
            (stride, groups),
            dtype=dtype,
            weight_dtype=weight_dtype,
            weight_format=weight_format,
        ),
        passes=(
            Work(kernels=forward, nbytes=nbytes[0], flops=flops[0], unit="matrix"),
            Work(kernels=gradient, nbytes=nbytes[1], flops=flops[1], unit="matrix"),
        ),
        name=spec.name(group, stride),
        kind=spec.name(group, stride),
        ours=api.grouped_conv2d,
        reference=reference.grouped_conv2d,
        wins=partial(spec.wins, dtype=dtype, group=group, stride=stride),
    )


def _with_norm(conv: Case, group: int, stride: int) -> tuple[Case, ...]:
    """With a batch norm behind it; nothing where the forward leaves it no moments."""
    if spec.leaves_moments(group, stride):
        return ()
    call = grouped_conv(conv.shape, conv.shape[1] // group, stride)
    result = (call.batch, call.channels, call.out_height, call.out_width)
    return moments_cases.cases(conv, api.grouped_conv2d_moments, result, partial(spec.moments_win, group, stride))


# Of those behind whose forward a norm takes two launches (spec.TRAINED).
_WITH_NORM = ((4, 128, 1, 56), (8, 256, 1, 28))
_ALSO_FP16 = ((4, 1), (8, 2), (24, 1))
# What other networks of docs/networks.md have: RegNetX-3.2GF (48 channels a group), RegNetY-8GF (56), the last stage of ResNeXt-101 32x8d (64).
_ALSO = (
    *(
        (48, channels, stride, side)
        for channels, stride, side in ((96, 1, 56), (192, 2, 56), (192, 1, 28), (432, 2, 28))
    ),
    *((48, channels, stride, side) for channels, stride, side in ((432, 1, 14), (1008, 2, 14))),
    *((56, channels, stride, side) for channels, stride, side in ((448, 2, 56), (448, 1, 28), (896, 1, 14))),
    *((64, channels, stride, side) for channels, stride, side in ((2048, 2, 14), (2048, 1, 7))),
)
_ALONE = tuple(
    _case((256, channels, side, side), dtype, group, stride)
    for dtype in ("bfloat16", "float16")
    for group, channels, stride, side in (*spec.TRAINED, *_ALSO)
    if dtype == "bfloat16" or (group, stride) in _ALSO_FP16
)
BENCHMARK = (
    *_ALONE,
    *(
        case
        for group, channels, stride, side in _WITH_NORM
        for case in _with_norm(_case((256, channels, side, side), "bfloat16", group, stride), group, stride)
    ),
)
# Odd sizes, one to three pixels, one image, slabs that are not full, strips of a wide row, many images side by side, all groups.
VERIFICATION = (
    _case((1, 8, 1, 1), "bfloat16", 4),
    _case((3, 40, 7, 9), "bfloat16", 4),
    _case((2, 32, 7, 6), "float16", 4, 2, weight_dtype="float16"),
    _case((2, 32, 4, 5), "bfloat16", 8),
    _case((1, 40, 6, 3), "float16", 8, weight_dtype="float16", weight_format=torch.contiguous_format),
    _case((1, 8, 3, 115), "bfloat16", 8),
    _case((2, 32, 7, 6), "bfloat16", 8, 2),
    _case((1, 16, 2, 3), "bfloat16", 8, 2),
    _case((2, 48, 7, 7), "bfloat16", 16),
    _case((3, 32, 6, 9), "float16", 16, 2),
    _case((1, 72, 3, 14), "bfloat16", 24, weight_dtype="bfloat16"),
    _case((1, 48, 7, 4), "bfloat16", 24, 2),
    _case((3, 80, 5, 35), "bfloat16", 16, weight_dtype="bfloat16", weight_format=torch.contiguous_format),
    _case((5, 128, 6, 9), "bfloat16", 16, 2),
    _case((9, 120, 3, 7), "float16", 24),
    _case((2, 144, 5, 70), "bfloat16", 24, 2, weight_format=torch.contiguous_format),
    _case((5, 32, 4, 7), "bfloat16", 32),
    _case((1, 64, 3, 2), "float16", 32, 2),
    _case((2, 40, 4, 5), "bfloat16", 40),
    _case((1, 64, 3, 4), "bfloat16", 64),
    _case((2, 64, 3, 4), "bfloat16", 64, 2),
    _case((3, 96, 9, 13), "bfloat16", 48),
    _case((2, 96, 10, 19), "bfloat16", 48, 2, weight_dtype="bfloat16"),
    _case((2, 112, 7, 6), "float16", 56, weight_format=torch.contiguous_format),
    _case((3, 112, 17, 8), "bfloat16", 56, 2),
    _case((1, 128, 8, 33), "bfloat16", 64, weight_dtype="bfloat16", weight_format=torch.contiguous_format),
    _case((1, 80, 1, 1), "float16", 40, 2, weight_dtype="float16"),
    *(
        _with_norm(_case(shape, dtype, group, stride), group, stride)[0]
        for shape, dtype, group, stride in (
            ((3, 40, 7, 9), "bfloat16", 4, 1),
            ((2, 32, 4, 5), "float16", 8, 1),
            ((2, 64, 9, 20), "bfloat16", 32, 1),
        )
    ),
)
