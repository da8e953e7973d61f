"""Shapes at which convolution by transforms is measured and verified."""

from __future__ import annotations

from functools import partial

import torch

from advisor.ops.family import Arguments, Case, Work
from advisor.ops.fft_conv import api, reference, spec


def _inputs(generator: torch.Generator, n: int, *, call: spec.Call, layout: torch.memory_format) -> Arguments:
    """x [n, I, H, W]; weight [O, I, R, S] of a deviation that keeps y's near 1."""
    device = generator.device
    x = torch.randn(n, call.inputs, call.height, call.width, device=device, generator=generator)
    weight = torch.randn(call.outputs, call.inputs, call.taps_h, call.taps_w, device=device, generator=generator)
    weight = weight / (call.inputs * call.taps_h * call.taps_w) ** 0.5
    return x.contiguous(memory_format=layout).requires_grad_(), weight.requires_grad_(), (call.pad_h, call.pad_w)


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
    memory_format = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    return Case(
        name=spec.name(taps) + ("" if layout == "nchw" else " nhwc"),
        kind=spec.KIND,
        shape=shape,
        dtype="float32",
        passes={
            "forward": Work(kernels=(spec.TURN, spec.REPAIR), nbytes=nbytes[0], flops=flops[0]),
            "backward": Work(kernels=(spec.TURN, spec.REPAIR), nbytes=nbytes[1], flops=flops[1]),
        },
        inputs=partial(_inputs, call=call, layout=memory_format),
        ours=api.fft_conv2d,
        eager=reference.fft_conv2d,
        reference=reference.fft_conv2d,
        wins=partial(spec.wins, call, "float32"),
        layout=layout,
    )


BENCHMARK = tuple(_case((n, c, side, side), c, (k, k)) for n, c, side, k in spec.TRAINED)
# Unequal sides, taps and padding, none and the most of it, taps that reach over the whole image.
VERIFICATION = (
    _case((2, 3, 20, 17), 4, (11, 11)),
    _case((1, 2, 14, 30), 3, (13, 11), (0, 10)),
    _case((2, 2, 9, 40), 2, (15, 11), (14, 3), layout="nhwc"),
    _case((1, 1, 31, 31), 2, (31, 31)),
)
