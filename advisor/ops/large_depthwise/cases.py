"""Shapes at which the kernels for large depthwise taps are measured and verified."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from advisor.ops.family import Arguments, Case, Work
from advisor.ops.large_depthwise import api, reference, spec
from advisor.ops.storage import STORAGE, itemsize


def _inputs(
    generator: torch.Generator,
    n: int,
    *,
    call: spec.Call,
    dtype: str,
    weight_dtype: str,
    bias: bool,
    layout: torch.memory_format,
) -> Arguments:
    """x [n, C, H, W]; weight [C, 1, KH, KW] of a deviation that keeps y's near 1; bias [C]."""
    device, kind = generator.device, getattr(torch, weight_dtype)
    x = torch.randn(n, call.channels, call.height, call.width, device=device, generator=generator)
    weight = torch.randn(call.channels, 1, call.kernel_h, call.kernel_w, device=device, generator=generator)
    weight = weight / (call.kernel_h * call.kernel_w) ** 0.5
    return (
        x.to(getattr(torch, dtype)).contiguous(memory_format=layout).requires_grad_(),
        weight.to(kind).requires_grad_(),
        torch.randn(call.channels, device=device, generator=generator).to(kind).requires_grad_() if bias else None,
        (call.pad_h, call.pad_w),
    )


def _eager(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: tuple[int, int]) -> torch.Tensor:
    """As autocast runs it: parameters cast to x's dtype."""
    bias = None if bias is None else bias.to(x.dtype)
    return F.conv2d(x, weight.to(x.dtype), bias, 1, padding, groups=x.shape[1])


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
    memory_format = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    return Case(
        name=spec.name(taps, bias=bias) + ("" if layout == "nchw" else " nhwc"),
        kind=spec.KIND,
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.CONV,), nbytes=nbytes[0], flops=flops[0], unit=unit),
            "backward": Work(kernels=(spec.CONV, spec.BACKWARD_WEIGHT), nbytes=nbytes[1], flops=flops[1], unit=unit),
        },
        inputs=partial(_inputs, call=call, dtype=dtype, weight_dtype=weight_dtype, bias=bias, layout=memory_format),
        ours=api.large_depthwise_conv2d,
        eager=_eager,
        reference=reference.large_depthwise_conv2d,
        wins=partial(spec.wins, taps, dtype),
        layout=layout,
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
    )
    if dtype != "float16" or case.shape[0] == 2
)
