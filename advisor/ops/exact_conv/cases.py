"""Shapes at which the kernels for convolutions in strict fp32 are measured and verified."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops.convolution_cases import Tensors, case
from advisor.ops.exact_conv import api, linear, reference, spec, tf32
from advisor.ops.family import Arguments, Case, Work


class _Strict(torch.autograd.Function):
    """PyTorch's own in strict fp32 in both directions, whatever the process allows."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *numbers: Any
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.numbers = numbers
        with tf32.forbidden():
            return reference.exact_conv2d(x, weight, bias, *numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight, bias = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.numbers
        sizes = None if bias is None else list(bias.shape)
        with tf32.forbidden():
            found = torch.ops.aten.convolution_backward(
                *(gradients[0], x, weight, sizes, [stride] * 2, list(padding), [dilation] * 2, False, [0, 0], groups),
                list(ctx.needs_input_grad[:3]),
            )
        return (*found, *(None,) * 4)


def _eager(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """As a script with TF32 off runs it. A CPU has no TF32, and there torch.func's transforms take the convolution itself."""
    if not x.is_cuda:
        return reference.exact_conv2d(x, *arguments)
    found: torch.Tensor = _Strict.apply(x, *arguments)  # type: ignore[no-untyped-call]  # torch's own, without types
    return found


def _case(
    shape: tuple[int, ...],
    outputs: int,
    taps: tuple[int, int],
    stride: int = 1,
    *,
    padding: tuple[int, int] | None = None,
    dilation: int = 1,
    groups: int = 1,
    bias: bool = False,
    scale: float = 1.0,
) -> Case:
    padding = (taps[0] // 2 * dilation, taps[1] // 2 * dilation) if padding is None else padding
    call = spec.call(shape, (outputs, shape[1] // groups, *taps), stride, padding, dilation, groups)
    nbytes, flops = spec.bytes_moved(call), spec.flops(call)
    return case(
        api.CONVOLUTION,
        Tensors(
            shape,
            (outputs, shape[1] // groups, *taps),
            (stride, padding, dilation, groups),
            dtype="float32",
            weight_format=torch.channels_last,
            bias=bias,
            scale=scale,
        ),
        passes=(  # three fp16 products make one of fp32
            Work(kernels=spec.SOURCES, nbytes=nbytes[0], flops=3 * flops[0], unit="float16"),
            Work(kernels=spec.SOURCES, nbytes=nbytes[1], flops=3 * flops[1], unit="float16"),
        ),  # three fp16 products make one of fp32
        name=spec.name(call) + (" bias" if bias else ""),
        kind=spec.KIND,
        ours=api.exact_conv2d,
        eager=_eager,
        reference=reference.exact_conv2d,
        wins=partial(spec.wins, call),
    )


class _StrictLinear(torch.autograd.Function):
    """PyTorch's own in strict fp32 in both directions, whatever the process allows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        with tf32.forbidden():
            return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy = gradients[0].flatten(0, -2)
        with tf32.forbidden():
            dx = (dy @ weight).view_as(x)
            return dx, dy.mT @ x.flatten(0, -2), dy.sum(0) if ctx.biased else None


def _eager_linear(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    if not x.is_cuda:
        return F.linear(x, *arguments)
    found: torch.Tensor = _StrictLinear.apply(x, *arguments)  # type: ignore[no-untyped-call]  # torch's own, without types
    return found


def _linear_inputs(generator: torch.Generator, n: int, *, inputs: int, outputs: int, scale: float) -> Arguments:
    """x [n, I], weight [O, I] of a deviation that keeps the result's near x's, bias [O]: leaves."""

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=generator.device, generator=generator)

    weight = drawn(outputs, inputs) / inputs**0.5
    return tuple(t.requires_grad_() for t in (drawn(n, inputs) * scale, weight, drawn(outputs) * scale))


def _linear_case(rows: int, inputs: int, outputs: int, *, scale: float = 1.0) -> Case:
    call = spec.linear_call((rows, inputs), outputs)
    passes = zip(("forward", "backward"), spec.bytes_moved(call), spec.flops(call), strict=True)
    return Case(
        name=spec.linear_name(inputs, outputs),
        kind=spec.LINEAR,
        shape=(rows, inputs),
        dtype="float32",
        passes={
            name: Work(kernels=spec.SOURCES, nbytes=nbytes, flops=3 * flops, unit="float16")
            for name, nbytes, flops in passes
        },
        inputs=partial(_linear_inputs, inputs=inputs, outputs=outputs, scale=scale),
        ours=linear.exact_linear,
        eager=_eager_linear,
        reference=F.linear,
        wins=partial(spec.wins, call, spec.LINEAR),
    )


BENCHMARK = (
    *(_case((n, inputs, side, side), outputs, (k, k), stride) for n, inputs, outputs, side, k, stride in spec.TRAINED),
    *(_case((n, c, side, side), c, (3, 3), dilation=dilation) for n, c, side, dilation in spec.TRAINED_APART),
    *(_linear_case(*sizes) for sizes in spec.TRAINED_LINEAR),
)
# Few channels and channels that fill no tile, strides with taps that reach no pixel, groups, dilation, strips of taps, magnitudes near both
# ends of fp32's range.
VERIFICATION = (
    _case((2, 16, 9, 11), 24, (3, 3), bias=True),
    _case((1, 3, 13, 12), 70, (7, 7), 2),
    _case((2, 8, 6, 6), 130, (1, 1), 2, scale=1e25),
    _case((1, 16, 9, 9), 16, (3, 3), dilation=2, groups=2),
    _case((1, 40, 5, 7), 7, (1, 5), bias=True, scale=1e-25),
    _case((1, 24, 10, 9), 8, (3, 3), 2, padding=(0, 1)),
    _linear_case(70, 40, 24),
    _linear_case(5, 7, 130, scale=1e-25),
)
