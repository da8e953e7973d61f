"""Depthwise 2-D convolution as one operation: the bundled kernels, or PyTorch's own convolution.

Two entries over the same kernels: `depthwise_conv2d`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.depthwise_conv2d`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
The weight stays the user's parameter, [C, 1, k, k]: kernels read it as it lies, in its own dtype, and give its gradient in that
dtype, so under autocast neither is cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import alignment, differentiable, dispatch, nvrtc, storage
from advisor.ops.depthwise import cuda, spec
from advisor.ops.function import Function

engaged, fell_back = dispatch.counters("depthwise")

Pair = tuple[int, int]


@lru_cache(maxsize=4096)
def _unsupported(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    weight_shape: tuple[int, ...],
    weight_dtype: torch.dtype,
    stride: int,
    padding: Pair,
    dilation: int,
    arch: int,
) -> str:
    return spec.unsupported(
        shape=shape,
        channels_last=True,
        dtype=storage.name(dtype),
        weight_shape=weight_shape,
        weight_dtype=storage.name(weight_dtype),
        stride=(stride, stride),
        padding=padding,
        dilation=(dilation, dilation),
        groups=weight_shape[0],
        arch=arch,
    )


def _aligned(x: torch.Tensor) -> bool:
    """Whether a thread's channels can be loaded at once."""
    return x.data_ptr() % spec.ALIGNMENT == 0


def unsupported(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int, padding: Pair, dilation: int
) -> str:
    """Why the kernels cannot take these tensors; empty when they can."""
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    if bias is not None and bias.dtype != weight.dtype:
        return "bias and weight differ in dtype"
    reason = _unsupported(
        tuple(x.shape),
        x.dtype,
        tuple(weight.shape),
        weight.dtype,
        stride,
        padding,
        dilation,
        nvrtc.arch(x.device.index or 0),
    )
    if reason:
        return reason
    if not x.is_contiguous(memory_format=torch.channels_last):
        return "input is not channels_last"
    return "" if _aligned(x) else "input is not aligned"


def _refusal(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int, padding: Pair, dilation: int
) -> str:
    channels, *_, kernel = weight.shape
    sizes = {"channels": channels, "kernel": kernel, "stride": stride, "dilation": dilation, "image": min(x.shape[2:])}
    wins = spec.wins(**sizes, bias=bias is not None, dtype=storage.name(x.dtype))
    return dispatch.refusal(unsupported(x, weight, bias, stride, padding, dilation), wins)


def _pytorch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int, padding: Pair, dilation: int
) -> torch.Tensor:
    """PyTorch's own convolution in x's dtype."""
    bias = None if bias is None else bias.to(x.dtype)
    return F.conv2d(x, weight.to(x.dtype), bias, stride, padding, dilation, groups=x.shape[1])


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """x in the dtype in which autocast runs convolutions on its device; as it is when autocast is off or leaves it alone."""
    kind = x.device.type
    if (
        torch.amp.is_autocast_available(kind)
        and torch.is_autocast_enabled(kind)
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
    ):
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    call: spec.Call,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """dx, dweight and dbias from the kernels; `wanted` says whether those of the input and of the parameters."""
    dy = dy.to(x.dtype).contiguous(memory_format=torch.channels_last)
    if not _aligned(dy):
        dy = dy.clone()
    if all(wanted) and spec.ringed(call, storage.name(x.dtype), "backward"):
        return cuda.backward(dy, x, weight, bias, call)
    dx = cuda.backward_data(dy, weight, call) if wanted[0] else None
    dweight, dbias = cuda.backward_weight(dy, x, weight, bias, call) if wanted[1] else (None, None)
    return dx, dweight, dbias


class _DepthwiseConv2d(Function):
    replays = True

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: spec.Call, moments: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        Function.keep(ctx, x, weight, bias)
        ctx.call = call
        y, parts = cuda.forward(x, weight.contiguous(), bias, call, moments=moments)
        if parts is not None:
            ctx.mark_non_differentiable(parts)
        return y, parts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        dy, _ = gradients
        if dy is None:  # nobody used the result
            return (None,) * 5
        x, weight, bias = Function.kept(ctx)
        call = ctx.call
        dx_wanted, dweight_wanted, dbias_wanted, *_ = ctx.needs_input_grad
        if differentiable.wanted(dy):
            return (*_differentiable_backward(dy, x, weight, bias, call, ctx.needs_input_grad[:3]), None, None)
        found = _gradients(dy, x, weight.contiguous(), bias, call, (dx_wanted, dweight_wanted or dbias_wanted))
        return (*found, None, None)


def _differentiable_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    call: spec.Call,
    wanted: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The backward in PyTorch's own operation, which can be differentiated again."""
    dx, dweight, dbias = torch.ops.aten.convolution_backward(
        dy,
        x,
        weight.to(x.dtype),
        [call.channels],
        [call.stride] * 2,
        list(call.padding),
        [call.dilation] * 2,
        False,
        [0, 0],
        call.channels,
        list(wanted),
    )
    return (
        dx,
        dweight.to(weight.dtype) if wanted[1] else None,
        dbias.to(bias.dtype) if wanted[2] and bias is not None else None,
    )


def depthwise_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: Pair = (0, 0),
    dilation: int = 1,
) -> torch.Tensor:
    """Each channel convolved with its own k x k taps (`conv2d` with as many groups as channels).

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's own. Under
            autocast it is cast as for a convolution.
        weight: [C, 1, k, k]; bias: [C] or None; in x's dtype or, as under autocast, in fp32: read as they are.

    Returns:
        A new tensor [N, C, OH, OW] in x's dtype (autocast's, if that is on).
    """
    return _depthwise_conv2d(x, weight, bias, stride, padding, dilation, moments=False)[0]


def depthwise_conv2d_moments(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: Pair = (0, 0),
    dilation: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `depthwise_conv2d`, and the result's moments for a batch norm (ops/moments.py).

    None in their place where PyTorch's own ran, or a kernel that leaves none.
    """
    return _depthwise_conv2d(x, weight, bias, stride, padding, dilation, moments=True)


def _depthwise_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int,
    padding: Pair,
    dilation: int,
    *,
    moments: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = _autocast(x)
    reason = _refusal(x, weight, bias, stride, padding, dilation)
    if reason:
        fell_back[reason] += 1
        return _pytorch(x, weight, bias, stride, padding, dilation), None
    call = spec.call(tuple(x.shape), weight.shape[-1], stride, padding, dilation)
    engaged[spec.name(call.kernel, stride, dilation)] += 1
    found: tuple[torch.Tensor, torch.Tensor | None]
    found = _DepthwiseConv2d.apply(x, weight, bias, call, moments)
    return found


@torch.library.custom_op("advisor::depthwise_conv2d", mutates_args=())
def depthwise_conv2d_op(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int, padding: Sequence[int], dilation: int
) -> torch.Tensor:
    """As `depthwise_conv2d`, for compiled graphs: x in the dtype of the result, which is channels_last."""
    x = x.contiguous(memory_format=torch.channels_last)
    pads = (padding[0], padding[1])
    reason = _refusal(x, weight, bias, stride, pads, dilation)
    if reason:
        fell_back[reason] += 1
        return _pytorch(x, weight, bias, stride, pads, dilation).contiguous(memory_format=torch.channels_last)
    engaged[spec.name(weight.shape[-1], stride, dilation)] += 1
    call = spec.call(tuple(x.shape), weight.shape[-1], stride, pads, dilation)
    return cuda.forward(x, weight.contiguous(), bias, call)[0]


@depthwise_conv2d_op.register_fake
def _(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int, padding: Sequence[int], dilation: int
) -> torch.Tensor:
    n, c, h, w = x.shape
    span = dilation * (weight.shape[-1] - 1) + 1
    rows, columns = ((size + 2 * pad - span) // stride + 1 for size, pad in ((h, padding[0]), (w, padding[1])))
    return alignment.empty_nhwc((n, c, rows, columns), x)


@torch.library.custom_op("advisor::depthwise_conv2d_backward", mutates_args=())
def depthwise_conv2d_backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int,
    padding: Sequence[int],
    dilation: int,
    dx_wanted: bool,
    dweight_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `advisor::depthwise_conv2d`: dx, dweight, dbias; empty where not wanted or without a bias."""
    x = x.contiguous(memory_format=torch.channels_last)
    pads = (padding[0], padding[1])
    call = spec.call(tuple(x.shape), weight.shape[-1], stride, pads, dilation)
    if _refusal(x, weight, bias, stride, pads, dilation):
        wanted = (dx_wanted, dweight_wanted, dweight_wanted and bias is not None)
        dx, dweight, dbias = _differentiable_backward(dy.to(x.dtype), x, weight, bias, call, wanted)
        dx = None if dx is None else dx.contiguous(memory_format=torch.channels_last)
        dweight = None if dweight is None else dweight.contiguous()
    else:
        dx, dweight, dbias = _gradients(dy, x, weight.contiguous(), bias, call, (dx_wanted, dweight_wanted))
    return (
        x.new_empty(0) if dx is None else dx,
        weight.new_empty(0) if dweight is None else dweight,
        weight.new_empty(0) if dbias is None else dbias,
    )


@depthwise_conv2d_backward_op.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int,
    padding: Sequence[int],
    dilation: int,
    dx_wanted: bool,
    dweight_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.channels_last) if dx_wanted else x.new_empty(0),
        weight.new_empty(weight.shape) if dweight_wanted else weight.new_empty(0),
        torch.empty_like(bias) if dweight_wanted and bias is not None else weight.new_empty(0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, ctx.stride, ctx.padding, ctx.dilation = inputs
    ctx.save_for_backward(x, weight, bias)


def _op_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    dx_wanted, dweight_wanted, dbias_wanted = ctx.needs_input_grad[:3]
    dweight_wanted = dweight_wanted or dbias_wanted
    dx, dweight, dbias = depthwise_conv2d_backward_op(
        dy, x, weight, bias, ctx.stride, ctx.padding, ctx.dilation, dx_wanted, dweight_wanted
    )
    return (
        dx if dx_wanted else None,
        dweight if dweight_wanted else None,
        dbias if dweight_wanted and bias is not None else None,
        None,
        None,
        None,
    )


depthwise_conv2d_op.register_autograd(_op_backward, setup_context=_setup)
