"""Shapes at which convolution by transforms is measured and verified."""

from __future__ import annotations

from functools import partial

from advisor.ops.convolution_cases import Tensors, case
from advisor.ops.family import Case, Work
from advisor.ops.fft_conv import api, reference, spec


def _case(
    shape: tuple[int, ...],
    outputs: int,
    taps: tuple[int, int],
    padding: tuple[int, int] | None = None,
    *,
    layout: str = "nchw",
) -> Case:
    padding = (taps[0] // 2, taps[1] // 2) if padding is None else padding
    call = spec.call(shape, (outputs, shape[1], *taps), padding)
    nbytes, flops = spec.bytes_moved(call), spec.flops(call)
    kernels = spec.TURN, spec.REPAIR
    return case(
        api.CONVOLUTION,
        Tensors(shape, (outputs, shape[1], *taps), (padding,), dtype="float32", layout=layout),
        passes=(
            Work(kernels=kernels, nbytes=nbytes[0], flops=flops[0]),
            Work(kernels=kernels, nbytes=nbytes[1], flops=flops[1]),
        ),
        name=spec.name(taps) + ("" if layout == "nchw" else " nhwc"),
        kind=spec.KIND,
        ours=api.fft_conv2d,
        reference=reference.fft_conv2d,
        wins=partial(spec.wins, call, "float32"),
    )


BENCHMARK = tuple(_case((n, c, side, side), c, (k, k)) for n, c, side, k in spec.TRAINED)
# Unequal sides, taps and padding, none and the most of it, taps that reach over the whole image.
VERIFICATION = (
    _case((2, 3, 20, 17), 4, (11, 11)),
    _case((1, 2, 14, 30), 3, (13, 11), (0, 10)),
    _case((2, 2, 9, 40), 2, (15, 11), (14, 3), layout="nhwc"),
    _case((1, 1, 31, 31), 2, (31, 31)),
)
