"""Shapes at which the kernels for large depthwise taps are measured and verified."""

from __future__ import annotations

from functools import partial

from advisor.ops.convolution_cases import Tensors, case
from advisor.ops.family import Case, Work
from advisor.ops.large_depthwise import api, reference, spec
from advisor.ops.storage import STORAGE, itemsize


def _case(
    shape: tuple[int, ...],
    taps: tuple[int, int],
    dtype: str,
    *,
    padding: tuple[int, int] | None = None,
    bias: bool = False,
    weight_dtype: str = "float32",
    layout: str = "nchw",
) -> Case:
    padding = (taps[0] // 2, taps[1] // 2) if padding is None else padding
    call = spec.call(shape, taps, padding)
    nbytes, flops = spec.bytes_moved(call, itemsize(dtype)), spec.flops(call)
    unit = "matrix" if dtype != "float32" else "vector"
    if dtype == "float32":
        flops = (0, 0)  # three products on the tensor cores: fewer operations than the fp32 pipes' limit would have it
    turned = (spec.PLANES,) if layout == "nhwc" else ()
    return case(
        api.CONVOLUTION,
        Tensors(
            shape, (shape[1], 1, *taps), (padding,), dtype=dtype, weight_dtype=weight_dtype, layout=layout, bias=bias
        ),
        passes=(
            Work(kernels=(spec.CONV, *turned), nbytes=nbytes[0], flops=flops[0], unit=unit),
            Work(kernels=(spec.CONV, spec.BACKWARD_WEIGHT, *turned), nbytes=nbytes[1], flops=flops[1], unit=unit),
        ),
        name=spec.name(taps, bias=bias) + ("" if layout == "nchw" else " nhwc"),
        kind=spec.kind(taps),
        ours=api.large_depthwise_conv2d,
        reference=reference.large_depthwise_conv2d,
        wins=partial(spec.wins, taps, dtype),
    )


BENCHMARK = (
    *(_case((n, c, side, side), taps, "bfloat16") for n, c, side, taps in spec.TRAINED),
    *(_case((n, c, side, side), taps, "bfloat16", layout="nhwc") for n, c, side, taps in spec.TRAINED),
    *(_case((n, c, side, side), taps, "float32") for n, c, side, taps in spec.TRAINED[:5]),
    _case((64, 128, 56, 56), (31, 31), "float16"),
)
# Odd sizes, one pixel, no padding and unequal padding, several tiles of rows and columns, one image and many, strips.
VERIFICATION = tuple(
    case
    for dtype in STORAGE
    for case in (
        _case((2, 2, 1, 1), (11, 11), dtype),
        _case((9, 1, 7, 7), (13, 13), dtype, bias=True, layout="nhwc"),
        _case((1, 2, 19, 70), (13, 13), dtype, bias=True),
        _case((1, 1, 70, 12), (1, 11), dtype, weight_dtype=dtype),
        _case((2, 1, 17, 20), (15, 5), dtype, padding=(0, 4)),
        _case((1, 1, 12, 20), (31, 31), dtype),
        _case((2, 24, 4, 12), (11, 11), dtype, layout="nhwc"),
    )
    if dtype != "float16" or case.shape[0] == 2
)
