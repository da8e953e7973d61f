"""Shapes at which the 3 x 3 convolution kernels are measured and verified."""

from __future__ import annotations

from functools import partial

import torch

from advisor.ops import moments_cases
from advisor.ops.conv3x3 import api, reference, spec
from advisor.ops.convolution_cases import Tensors, case
from advisor.ops.family import Case, Work


def _case(
    shape: tuple[int, ...],
    outputs: int,
    dtype: str = "bfloat16",
    *,
    weight_dtype: str = "float32",
    weight_format: torch.memory_format = torch.channels_last,
) -> Case:
    call = spec.call(shape, outputs)
    nbytes, flops = spec.bytes_moved(call, 2), spec.flops(call)
    kernels = spec.kernels(call), spec.kernels(call, backward=True)
    return case(
        api.CONVOLUTION,
        Tensors(
            shape, (outputs, call.inputs, 3, 3), (), dtype=dtype, weight_dtype=weight_dtype, weight_format=weight_format
        ),
        passes=(
            Work(kernels=kernels[0], nbytes=nbytes[0], flops=flops[0], unit="matrix"),
            Work(kernels=kernels[1], nbytes=nbytes[1], flops=flops[1], unit="matrix"),
        ),
        name=spec.name(call.inputs, outputs),
        kind=spec.name(call.inputs, outputs),
        ours=api.conv3x3,
        reference=reference.conv3x3,
        wins=partial(spec.wins, call, dtype),
    )


def _with_norm(conv: Case, outputs: int) -> tuple[Case, ...]:
    """With a batch norm behind it."""
    n, inputs, h, w = conv.shape
    wins = partial(spec.moments_win, inputs, outputs)
    return moments_cases.cases(conv, api.conv3x3_moments, (n, outputs, h, w), wins)


_ALONE = tuple(_case((n, inputs, side, side), outputs) for n, inputs, outputs, side in spec.TRAINED)
BENCHMARK = (
    *_ALONE,
    _case((256, 64, 56, 56), 64, "float16"),
    *(
        case
        for n, inputs, outputs, side in spec.TRAINED_WITH_NORM
        for case in _with_norm(_case((n, inputs, side, side), outputs), outputs)
    ),
)
# One to three pixels, odd sizes, one image, several tiles a block and an image, all pairs of channels, both weights' dtypes and formats.
VERIFICATION = (
    _case((1, 64, 1, 1), 64),
    _case((2, 64, 3, 2), 64, "float16", weight_dtype="float16"),
    _case((3, 64, 9, 13), 64),
    _case((1, 64, 8, 33), 64, weight_dtype="bfloat16", weight_format=torch.contiguous_format),
    _case((2, 128, 7, 9), 32),
    _case((1, 32, 5, 8), 128, "float16"),
    _case((2, 32, 4, 10), 64, weight_format=torch.contiguous_format),
    _case((2, 128, 6, 11), 64, weight_dtype="bfloat16"),
    _case((1, 64, 10, 5), 128),
    _case((2, 64, 3, 7), 32),
    *(
        _with_norm(_case(shape, outputs, dtype), outputs)[0]
        for shape, outputs, dtype in (
            ((3, 64, 9, 13), 64, "bfloat16"),
            ((2, 64, 5, 9), 128, "float16"),
            ((2, 128, 7, 9), 32, "bfloat16"),
        )
    ),
)
