"""The first 2-D convolution of a network, over three channels, as one operation: the bundled kernels, or PyTorch's own.

Two entries over the same kernels: `first_conv2d`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.first_conv2d`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
Input and parameters are read as they lie, in their own dtypes, and parameters get their gradients in theirs: under autocast
nothing is cast, and the image itself is what is kept for the backward. Images need no gradient; where one is wanted, PyTorch's
own operation runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import alignment, differentiable, dispatch, nvrtc, storage
from advisor.ops.first_conv import cuda, spec
from advisor.ops.function import Function

engaged, fell_back = dispatch.counters("first_conv")

Pair = tuple[int, int]


@lru_cache(maxsize=4096)
def _unsupported(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    compute: torch.dtype,
    weight_shape: tuple[int, ...],
    weight_dtype: torch.dtype,
    stride: int,
    padding: Pair,
    arch: int,
) -> str:
    return spec.unsupported(
        shape=shape,
        dtype=storage.name(dtype),
        compute=storage.name(compute),
        weight_shape=weight_shape,
        weight_dtype=storage.name(weight_dtype),
        stride=(stride, stride),
        padding=padding,
        dilation=(1, 1),
        groups=1,
        arch=arch,
    )


def unsupported(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int,
    padding: Pair,
    compute: torch.dtype,
) -> str:
    """Why the kernels cannot take these tensors; empty when they can."""
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    if weight.device != x.device:
        return "weight and input are on different devices"
    if bias is not None and bias.dtype != weight.dtype:
        return "bias and weight differ in dtype"
    if x.requires_grad and torch.is_grad_enabled():
        return "the input needs a gradient"
    reason = _unsupported(
        tuple(x.shape),
        x.dtype,
        compute,
        tuple(weight.shape),
        weight.dtype,
        stride,
        padding,
        nvrtc.arch(x.device.index or 0),
    )
    if reason:
        return reason
    if not any(t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight)):
        return "neither input nor weight is channels_last"
    return ""


def _refusal(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int,
    padding: Pair,
    compute: torch.dtype,
) -> str:
    wins = spec.wins(dtype=storage.name(compute), kernel=weight.shape[-1], stride=stride, channels=weight.shape[0])
    return dispatch.refusal(unsupported(x, weight, bias, stride, padding, compute), wins)


def _pytorch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int,
    padding: Pair,
    compute: torch.dtype,
) -> torch.Tensor:
    """PyTorch's own convolution in the dtype `compute`."""
    bias = None if bias is None else bias.to(compute)
    return F.conv2d(x.to(compute), weight.to(compute), bias, stride, padding)


def computed_in(x: torch.Tensor) -> torch.dtype:
    """The dtype in which a convolution of x runs: autocast's where that is on, else x's own."""
    kind = x.device.type
    if (
        torch.amp.is_autocast_available(kind)
        and torch.is_autocast_enabled(kind)
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    ):
        return torch.get_autocast_dtype(kind)
    return x.dtype


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    call: spec.Call,
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dweight and dbias from the kernels."""
    return cuda.backward_weight(alignment.nhwc(dy.to(compute)), x, weight, bias, call)


def _differentiable_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int,
    padding: Pair,
    compute: torch.dtype,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The backward in PyTorch's own operation, which can be differentiated again."""
    dx, dweight, dbias = torch.ops.aten.convolution_backward(
        dy.to(compute),
        x.to(compute),
        weight.to(compute),
        [weight.shape[0]],
        [stride] * 2,
        list(padding),
        [1, 1],
        False,
        [0, 0],
        1,
        list(wanted),
    )
    return (
        dx.to(x.dtype) if wanted[0] else None,
        dweight.to(weight.dtype) if wanted[1] else None,
        dbias.to(bias.dtype) if wanted[2] and bias is not None else None,
    )


class _FirstConv2d(Function):
    replays = True

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        call: spec.Call,
        compute: torch.dtype,
        moments: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        Function.keep(ctx, x, weight, bias)
        ctx.call, ctx.compute = call, compute
        bias = None if bias is None else bias.contiguous()
        y, parts = cuda.forward(x, weight, bias, call, compute, moments=moments)
        if parts is not None:
            ctx.mark_non_differentiable(parts)
        return y, parts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        dy, _ = gradients
        if dy is None:  # nobody used the result
            return (None,) * 6
        x, weight, bias = Function.kept(ctx)
        call, compute = ctx.call, ctx.compute
        if differentiable.wanted(dy):
            wanted = (False, *ctx.needs_input_grad[1:3])
            found = _differentiable_backward(dy, x, weight, bias, call.stride, call.padding, compute, wanted)
            return (*found, None, None, None)
        return (None, *_gradients(dy, x, weight, bias, call, compute), None, None, None)


def first_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: Pair = (0, 0),
) -> torch.Tensor:
    """`conv2d` of three channels.

    Args:
        x: [N, 3, H, W]; the kernels take fp16, bf16 and, under autocast, fp32 on CUDA, of any strides where the weight is
            channels_last, without a gradient; everything else runs PyTorch's own. Under autocast it is rounded as for a
            convolution.
        weight: [C, 3, k, k]; bias: [C] or None; in x's dtype or, as under autocast, in fp32: read as they are.

    Returns:
        A new tensor [N, C, OH, OW] in x's dtype (autocast's, if that is on); channels_last where the kernels ran.
    """
    return _first_conv2d(x, weight, bias, stride, padding, moments=False)[0]


def first_conv2d_moments(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: Pair = (0, 0),
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `first_conv2d`, and the result's moments for a batch norm (ops/moments.py); None where PyTorch's own ran."""
    return _first_conv2d(x, weight, bias, stride, padding, moments=True)


def _first_conv2d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int, padding: Pair, *, moments: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    compute = computed_in(x)
    reason = _refusal(x, weight, bias, stride, padding, compute)
    if reason:
        fell_back[reason] += 1
        return _pytorch(x, weight, bias, stride, padding, compute), None
    channels, kernel = weight.shape[0], weight.shape[-1]
    engaged[spec.name(kernel, stride, channels)] += 1
    call = spec.call(tuple(x.shape), channels, kernel, stride, padding, bias is not None)
    found: tuple[torch.Tensor, torch.Tensor | None]
    found = _FirstConv2d.apply(x, weight, bias, call, compute, moments)
    return found


@torch.library.custom_op("advisor::first_conv2d", mutates_args=())
def first_conv2d_op(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int,
    padding: Sequence[int],
    compute: torch.dtype,
) -> torch.Tensor:
    """As `first_conv2d`, for compiled graphs: the result is in the dtype `compute` and channels_last."""
    pads = (padding[0], padding[1])
    reason = _refusal(x, weight, bias, stride, pads, compute)
    if reason:
        fell_back[reason] += 1
        result = _pytorch(x, weight, bias, stride, pads, compute)
        return result.contiguous(memory_format=torch.channels_last)
    channels, kernel = weight.shape[0], weight.shape[-1]
    engaged[spec.name(kernel, stride, channels)] += 1
    call = spec.call(tuple(x.shape), channels, kernel, stride, pads, bias is not None)
    return cuda.forward(x, weight, None if bias is None else bias.contiguous(), call, compute)[0]


@first_conv2d_op.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int,
    padding: Sequence[int],
    compute: torch.dtype,
) -> torch.Tensor:
    n, _, h, w = x.shape
    channels, kernel = weight.shape[0], weight.shape[-1]
    rows, columns = ((size + 2 * pad - kernel) // stride + 1 for size, pad in ((h, padding[0]), (w, padding[1])))
    return alignment.empty_nhwc((n, channels, rows, columns), x, compute)


@torch.library.custom_op("advisor::first_conv2d_backward", mutates_args=())
def first_conv2d_backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int,
    padding: Sequence[int],
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `advisor::first_conv2d`: dweight like weight, and dbias, empty without a bias."""
    pads = (padding[0], padding[1])
    if _refusal(x.detach(), weight, bias, stride, pads, compute):
        wanted = (False, True, bias is not None)
        _, dweight, dbias = _differentiable_backward(dy, x, weight, bias, stride, pads, compute, wanted)
        assert dweight is not None  # it was asked for
        dweight = torch.empty_like(weight).copy_(dweight)
    else:
        call = spec.call(tuple(x.shape), weight.shape[0], weight.shape[-1], stride, pads, bias is not None)
        dweight, dbias = _gradients(dy, x, weight, bias, call, compute)
    return dweight, weight.new_empty(0) if dbias is None else dbias


@first_conv2d_backward_op.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int,
    padding: Sequence[int],
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(weight), weight.new_empty(0) if bias is None else torch.empty_like(bias)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, ctx.stride, ctx.padding, ctx.compute = inputs
    ctx.save_for_backward(x, weight, bias)


def _op_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:3]
    if wanted[0]:
        found = _differentiable_backward(dy, x, weight, bias, ctx.stride, ctx.padding, ctx.compute, wanted)
        return (*found, None, None, None)
    dweight, dbias = first_conv2d_backward_op(dy, x, weight, bias, ctx.stride, ctx.padding, ctx.compute)
    return None, dweight, None if bias is None else dbias, None, None, None


first_conv2d_op.register_autograd(_op_backward, setup_context=_setup)
