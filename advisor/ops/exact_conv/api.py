"""Convolution in strict fp32 as one operation: on tensor cores with fp32's own error, or PyTorch's own convolution.

Two entries over the same kernels: `exact_conv2d`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.exact_conv2d`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles. Forward, gradient
of the input and gradient of the weight are dispatched each by itself, where its kernel is measured to win. Where TF32 is allowed PyTorch's
own runs: it is faster, and its error is what the script has asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import alignment, differentiable, dispatch, nvrtc, storage
from advisor.ops.exact_conv import cuda, spec
from advisor.ops.exact_conv.tf32 import ALLOWED, allowed
from advisor.ops.first_conv.api import computed_in
from advisor.ops.function import Function

engaged, fell_back = dispatch.counters("exact_conv")

Pair = tuple[int, int]
Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


@lru_cache(maxsize=4096)
def _unsupported(
    shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    stride: int,
    padding: Pair,
    dilation: int,
    groups: int,
    arch: int,
) -> str:
    return spec.unsupported(
        shape=shape,
        dtype="float32",
        weight_shape=weight_shape,
        weight_dtype="float32",
        stride=(stride, stride),
        padding=padding,
        dilation=(dilation, dilation),
        groups=groups,
        arch=arch,
    )


def unsupported(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: spec.Call) -> str:
    """Why the kernels cannot take these tensors; empty when they can."""
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    if weight.device != x.device:
        return "weight and input are on different devices"
    for tensor in (x, weight, bias):
        if tensor is not None and tensor.dtype != torch.float32:
            return f"dtype {storage.name(tensor.dtype)}"
    if not alignment.is_nhwc(x):
        return "input is not channels_last and aligned"
    arch = nvrtc.arch(x.device.index or 0)
    padding = call.pad_h, call.pad_w
    return _unsupported(tuple(x.shape), tuple(weight.shape), call.stride, padding, call.dilation, call.groups, arch)


def _refusal(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: spec.Call) -> str:
    reason = unsupported(x, weight, bias, call)
    return reason or dispatch.refusal(
        "", ALLOWED if allowed() else spec.wins(call) or cuda.unmeasured(x.device.index or 0)
    )


def _pytorch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: spec.Call) -> torch.Tensor:
    """PyTorch's own convolution in x's dtype."""
    bias = None if bias is None else bias.to(x.dtype)
    return F.conv2d(x, weight.to(x.dtype), bias, call.stride, (call.pad_h, call.pad_w), call.dilation, call.groups)


def _pytorch_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    call: spec.Call,
    wanted: Sequence[bool],
) -> Gradients:
    """The gradients in PyTorch's own operation, which can be differentiated again."""
    sizes = None if bias is None else [call.outputs]
    dx, dweight, dbias = torch.ops.aten.convolution_backward(
        *(dy, x, weight.to(x.dtype), sizes, [call.stride] * 2, [call.pad_h, call.pad_w], [call.dilation] * 2),
        *(False, [0, 0], call.groups, [wanted[0], wanted[1], wanted[2] and bias is not None]),
    )
    return (
        dx,
        None if dweight is None else dweight.to(weight.dtype),
        None if dbias is None or bias is None else dbias.to(bias.dtype),
    )


def _forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: spec.Call) -> torch.Tensor:
    """y, channels_last, from the kernels or, where that is faster, PyTorch's own. Nothing is recorded for a backward."""
    if spec.product_left(call, spec.FORWARD):
        return _pytorch(x, weight, bias, call).contiguous(memory_format=torch.channels_last)
    parts = cuda.split_weight(_dense(weight), call.groups, gradient=False)
    return cuda.forward(cuda.split(x), parts, alignment.aligned(bias), x, call)


def _dense(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself where its values are dense in memory, in whatever order, else a copy."""
    dense = weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)
    return weight if dense and weight.data_ptr() % 16 == 0 else weight.clone(memory_format=torch.contiguous_format)


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    call: spec.Call,
    wanted: Sequence[bool],
) -> Gradients:
    """dx, dweight and dbias, each where wanted, each from the kernels or PyTorch's own."""
    dy = alignment.nhwc(dy)
    of_input, of_weight = (
        wanted[i] and not spec.product_left(call, product) for i, product in enumerate(spec.GRADIENTS)
    )
    others = (wanted[0] and not of_input, wanted[1] and not of_weight, False)
    dx, dweight, _ = _pytorch_backward(dy, x, weight, bias, call, others) if any(others) else (None, None, None)
    dbias = dy.sum((0, 2, 3)) if wanted[2] and bias is not None else None
    if of_input or of_weight:
        parts = cuda.split(dy)
        if of_weight:  # x's parts are freed before the input's gradient is allocated
            dweight = cuda.backward_weight(parts, cuda.split(x), weight, call)
        if of_input:
            turned = cuda.split_weight(_dense(weight), call.groups, gradient=True)
            dx = cuda.backward_data(parts, turned, x, call)
    return dx, dweight, dbias


class _ExactConv2d(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: spec.Call
    ) -> torch.Tensor:
        Function.keep(ctx, x, weight, bias)
        ctx.call = call
        return _forward(x, weight, bias, call)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        x, weight, bias = Function.kept(ctx)
        made = _pytorch_backward if differentiable.wanted(dy) else _gradients
        return (*made(dy, x, weight, bias, ctx.call, ctx.needs_input_grad[:3]), None)


def exact_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: Pair = (0, 0),
    dilation: int = 1,
    groups: int = 1,
) -> torch.Tensor:
    """`conv2d` in fp32, with an error of fp32's own on the tensor cores.

    Args:
        x: [N, I, H, W]; the kernels take channels_last fp32 on CUDA while TF32 is off, everything else runs PyTorch's own. Under autocast
            it is cast as for a convolution.
        weight: [O, I / groups, R, S]; bias: [O] or None.

    Returns:
        A new tensor [N, O, OH, OW] in x's dtype (autocast's, if that is on).
    """
    # cuDNN in strict fp32 ends in a misaligned address where x begins between two vectors, after which the process can use its GPU no more.
    x = alignment.realigned(x if x.dtype == computed_in(x) else x.to(computed_in(x)))
    call = spec.call(tuple(x.shape), tuple(weight.shape), stride, padding, dilation, groups)
    reason = _refusal(x, weight, bias, call)
    if reason:
        fell_back[reason] += 1
        return _pytorch(x, weight, bias, call)
    engaged[spec.name(call)] += 1
    found: torch.Tensor = _ExactConv2d.apply(x, weight, bias, call)
    return found


def _called(x: torch.Tensor, weight: torch.Tensor, numbers: Sequence[int]) -> spec.Call:
    stride, pad_h, pad_w, dilation, groups = numbers
    return spec.call(tuple(x.shape), tuple(weight.shape), stride, (pad_h, pad_w), dilation, groups)


@torch.library.custom_op("advisor::exact_conv2d", mutates_args=())
def exact_conv2d_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, numbers: Sequence[int]
) -> torch.Tensor:
    """As `exact_conv2d`, for compiled graphs: the result is channels_last. `numbers`: stride, padding (2), dilation, groups."""
    x = alignment.nhwc(x)
    call = _called(x, weight, numbers)
    reason = _refusal(x, weight, bias, call)
    if reason:
        fell_back[reason] += 1
        return _pytorch(x, weight, bias, call).contiguous(memory_format=torch.channels_last)
    engaged[spec.name(call)] += 1
    return _forward(x, weight, bias, call)


@exact_conv2d_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, numbers: Sequence[int]) -> torch.Tensor:
    stride, pad_h, pad_w, dilation, _ = numbers
    n, _, h, w = x.shape
    rows, columns = (
        (size + 2 * pad - dilation * (taps - 1) - 1) // stride + 1
        for size, pad, taps in ((h, pad_h, weight.shape[2]), (w, pad_w, weight.shape[3]))
    )
    return alignment.empty_nhwc((n, weight.shape[0], rows, columns), x)


@torch.library.custom_op("advisor::exact_conv2d_backward", mutates_args=())
def exact_conv2d_backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    numbers: Sequence[int],
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `advisor::exact_conv2d`: dx, channels_last, dweight, dbias; empty where not wanted or without a bias."""
    x = alignment.nhwc(x)
    call = _called(x, weight, numbers)
    made = _pytorch_backward if _refusal(x, weight, bias, call) else _gradients
    dx, dweight, dbias = made(dy.to(x.dtype), x, weight, bias, call, wanted)
    return (
        x.new_empty(0) if dx is None else dx.contiguous(memory_format=torch.channels_last),
        weight.new_empty(0) if dweight is None else dweight.contiguous(),
        weight.new_empty(0) if dbias is None else dbias,
    )


@exact_conv2d_backward_op.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    numbers: Sequence[int],
    wanted: Sequence[bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.channels_last) if wanted[0] else x.new_empty(0),
        weight.new_empty(weight.shape) if wanted[1] else weight.new_empty(0),
        torch.empty_like(bias) if wanted[2] and bias is not None else weight.new_empty(0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, ctx.numbers = inputs
    ctx.save_for_backward(x, weight, bias)


def _op_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    wanted = [*ctx.needs_input_grad[:2], bias is not None and ctx.needs_input_grad[2]]
    found = exact_conv2d_backward_op(dy, x, weight, bias, ctx.numbers, wanted)
    return (*(gradient if want else None for gradient, want in zip(found, wanted, strict=True)), None)


exact_conv2d_op.register_autograd(_op_backward, setup_context=_setup)
