"""Depthwise convolution with large taps as one operation: the bundled kernels, or PyTorch's own convolution.

Two entries over the same kernels: `large_depthwise_conv2d`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.large_depthwise_conv2d`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
Kernels work on planes (NCHW); a channels_last input is copied, and so is its result, back: two passes over memory for thousands of
operations a value. The weight stays the user's parameter, [C, 1, KH, KW]: kernels read it in its own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import alignment, differentiable, dispatch, nvrtc, storage
from advisor.ops.first_conv.api import computed_in
from advisor.ops.function import Function
from advisor.ops.large_depthwise import cuda, spec

engaged, fell_back = dispatch.counters("large_depthwise")

Pair = tuple[int, int]


@lru_cache(maxsize=4096)
def _unsupported(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    weight_shape: tuple[int, ...],
    weight_dtype: torch.dtype,
    padding: Pair,
    arch: int,
) -> str:
    return spec.unsupported(
        shape=shape,
        dtype=storage.name(dtype),
        weight_shape=weight_shape,
        weight_dtype=storage.name(weight_dtype),
        stride=(1, 1),
        padding=padding,
        dilation=(1, 1),
        groups=weight_shape[0],
        arch=arch,
    )


def unsupported(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: Pair) -> str:
    """Why the kernels cannot take these tensors; empty when they can."""
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    if weight.device != x.device:
        return "weight and input are on different devices"
    if bias is not None and bias.dtype != weight.dtype:
        return "bias and weight differ in dtype"
    arch = nvrtc.arch(x.device.index or 0)
    return _unsupported(tuple(x.shape), x.dtype, tuple(weight.shape), weight.dtype, padding, arch)


def _taps(weight: torch.Tensor) -> Pair:
    return weight.shape[2], weight.shape[3]


def _refusal(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: Pair) -> str:
    reason = unsupported(x, weight, bias, padding)
    return reason or dispatch.refusal("", spec.wins(_taps(weight), storage.name(x.dtype)))


def _planes(x: torch.Tensor) -> torch.Tensor:
    """x as contiguous planes that begin at a multiple of 16 bytes."""
    return alignment.dense(x, torch.contiguous_format)


def _format(x: torch.Tensor) -> torch.memory_format:
    """The format that the result gets: that of x."""
    return torch.channels_last if alignment.is_nhwc(x) and not x.is_contiguous() else torch.contiguous_format


def _pytorch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: Pair) -> torch.Tensor:
    """PyTorch's own convolution in x's dtype."""
    bias = None if bias is None else bias.to(x.dtype)
    return F.conv2d(x, weight.to(x.dtype), bias, 1, padding, 1, groups=x.shape[1])


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    call: spec.Call,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """dx, in x's format, dweight and dbias, each where wanted."""
    dy = _planes(dy.to(x.dtype))
    dx = dweight = dbias = None
    if wanted[1]:
        dweight = cuda.backward_weight(dy, _planes(x), weight, call)
    if wanted[2] and bias is not None:
        dbias = dy.sum((0, 2, 3), dtype=torch.float32).to(bias.dtype)
    if wanted[0]:
        dx = cuda.backward_data(dy, weight.contiguous(), call).contiguous(memory_format=_format(x))
    return dx, dweight, dbias


def _differentiable_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: Pair,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """The backward in PyTorch's own operation, which can be differentiated again."""
    channels, biased = x.shape[1], wanted[2] and bias is not None
    dx, dweight, dbias = torch.ops.aten.convolution_backward(
        *(dy, x, weight.to(x.dtype), [channels], [1, 1], list(padding), [1, 1], False, [0, 0], channels),
        [wanted[0], wanted[1], biased],
    )
    return (
        dx,
        dweight.to(weight.dtype) if wanted[1] else None,
        dbias.to(bias.dtype) if biased and bias is not None else None,
    )


class _LargeDepthwiseConv2d(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: spec.Call
    ) -> torch.Tensor:
        Function.keep(ctx, x, weight, bias)
        ctx.call = call
        y = cuda.forward(_planes(x), weight.contiguous(), bias, call)
        return y.contiguous(memory_format=_format(x))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        x, weight, bias = Function.kept(ctx)
        call, wanted = ctx.call, ctx.needs_input_grad[:3]
        if differentiable.wanted(dy):
            found = _differentiable_backward(dy, x, weight, bias, (call.pad_h, call.pad_w), wanted)
        else:
            found = _gradients(dy, x, weight, bias, call, wanted)
        return (*found, None)


def large_depthwise_conv2d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, padding: Pair = (0, 0)
) -> torch.Tensor:
    """`conv2d` with as many groups as channels, stride 1, not dilated, and 11 to 63 taps along the longer side.

    Args:
        x: [N, C, H, W]; the kernels take fp16, bf16 or fp32 on CUDA, fastest contiguous (NCHW); everything else runs PyTorch's own. Under
            autocast it is cast as for a convolution.
        weight: [C, 1, KH, KW]; bias: [C] or None; in x's dtype or, as under autocast, in fp32: read as they are.

    Returns:
        A new tensor [N, C, OH, OW] in x's dtype (autocast's, if that is on) and its memory format.
    """
    x = (
        x if x.dtype == computed_in(x) else x.to(computed_in(x))
    )  # `to` gives a tensor that outlived a transform memory of its own
    reason = _refusal(x, weight, bias, padding)
    if reason:
        fell_back[reason] += 1
        return _pytorch(x, weight, bias, padding)
    engaged[spec.name(_taps(weight))] += 1
    call = spec.call(tuple(x.shape), _taps(weight), padding)
    found: torch.Tensor = _LargeDepthwiseConv2d.apply(x, weight, bias, call)
    return found


@torch.library.custom_op("advisor::large_depthwise_conv2d", mutates_args=())
def large_depthwise_conv2d_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: Sequence[int]
) -> torch.Tensor:
    """As `large_depthwise_conv2d`, for compiled graphs: x in the dtype of the result, which is channels_last."""
    pads = (padding[0], padding[1])
    reason = _refusal(x, weight, bias, pads)
    if reason:
        fell_back[reason] += 1
        return _pytorch(x, weight, bias, pads).contiguous(memory_format=torch.channels_last)
    engaged[spec.name(_taps(weight))] += 1
    call = spec.call(tuple(x.shape), _taps(weight), pads)
    y = cuda.forward(_planes(x), weight.contiguous(), bias, call)
    return y.contiguous(memory_format=torch.channels_last)


@large_depthwise_conv2d_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: Sequence[int]) -> torch.Tensor:
    n, c, h, w = x.shape
    rows, columns = h + 2 * padding[0] - weight.shape[2] + 1, w + 2 * padding[1] - weight.shape[3] + 1
    return alignment.empty_nhwc((n, c, rows, columns), x)


@torch.library.custom_op("advisor::large_depthwise_conv2d_backward", mutates_args=())
def large_depthwise_conv2d_backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: Sequence[int],
    dx_wanted: bool,
    dweight_wanted: bool,
    dbias_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `advisor::large_depthwise_conv2d`: dx, channels_last, dweight, dbias; empty where not wanted or without a bias."""
    pads, wanted = (padding[0], padding[1]), (dx_wanted, dweight_wanted, dbias_wanted)
    if _refusal(x, weight, bias, pads):
        dx, dweight, dbias = _differentiable_backward(dy.to(x.dtype), x, weight, bias, pads, wanted)
    else:
        dx, dweight, dbias = _gradients(dy, x, weight, bias, spec.call(tuple(x.shape), _taps(weight), pads), wanted)
    return (
        x.new_empty(0) if dx is None else dx.contiguous(memory_format=torch.channels_last),
        weight.new_empty(0) if dweight is None else dweight.contiguous(),
        weight.new_empty(0) if dbias is None else dbias,
    )


@large_depthwise_conv2d_backward_op.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    padding: Sequence[int],
    dx_wanted: bool,
    dweight_wanted: bool,
    dbias_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.channels_last) if dx_wanted else x.new_empty(0),
        weight.new_empty(weight.shape) if dweight_wanted else weight.new_empty(0),
        torch.empty_like(bias) if dbias_wanted and bias is not None else weight.new_empty(0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, ctx.padding = inputs
    ctx.save_for_backward(x, weight, bias)


def _op_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    wanted = (*ctx.needs_input_grad[:2], bias is not None and ctx.needs_input_grad[2])
    found = large_depthwise_conv2d_backward_op(dy, x, weight, bias, ctx.padding, *wanted)
    return (*(gradient if want else None for gradient, want in zip(found, wanted, strict=True)), None)


large_depthwise_conv2d_op.register_autograd(_op_backward, setup_context=_setup)
