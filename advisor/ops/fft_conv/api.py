"""Dense convolution with large taps as one operation: by Fourier transforms, or PyTorch's own convolution.

Two entries over the same transforms: `fft_conv2d`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.fft_conv2d`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles. In fp32 alone:
transforms in half precision lose more than they save.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import alignment, differentiable, dispatch, nvrtc, storage
from advisor.ops.fft_conv import cuda, spec
from advisor.ops.first_conv.api import computed_in
from advisor.ops.function import Function

engaged, fell_back = dispatch.counters("fft_conv")

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
        groups=shape[1] // max(1, weight_shape[1]),
        arch=arch,
    )


def unsupported(x: torch.Tensor, weight: torch.Tensor, padding: Pair) -> str:
    """Why transforms cannot take these tensors; empty when they can."""
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    if weight.device != x.device:
        return "weight and input are on different devices"
    arch = nvrtc.arch(x.device.index or 0)
    return _unsupported(tuple(x.shape), x.dtype, tuple(weight.shape), weight.dtype, padding, arch)


def _call(x: torch.Tensor, weight: torch.Tensor, padding: Pair) -> spec.Call:
    return spec.call(tuple(x.shape), tuple(weight.shape), padding)


def _refusal(x: torch.Tensor, weight: torch.Tensor, padding: Pair) -> str:
    reason = unsupported(x, weight, padding)
    return reason or dispatch.refusal("", spec.wins(_call(x, weight, padding), storage.name(x.dtype)))


def _pytorch(x: torch.Tensor, weight: torch.Tensor, padding: Pair) -> torch.Tensor:
    """PyTorch's own convolution in x's dtype."""
    return F.conv2d(x, weight.to(x.dtype), None, 1, padding)


def _pytorch_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, padding: Pair, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dx and dweight in PyTorch's own operation, which can be differentiated again."""
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        *(dy, x, weight.to(x.dtype), None, [1, 1], list(padding), [1, 1], False, [0, 0], 1),
        [wanted[0], wanted[1], False],
    )
    return dx, dweight.to(weight.dtype) if wanted[1] else None


def _like(found: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`found` in x's memory format."""
    nhwc = alignment.is_nhwc(x) and not x.is_contiguous()
    return found.contiguous(memory_format=torch.channels_last) if nhwc else found


def _gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, call: spec.Call, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dx, in x's format, and dweight, each where wanted."""
    dy = dy.to(x.dtype).contiguous()
    dx, dweight = cuda.backward(dy, x.contiguous(), weight.contiguous(), call, (wanted[0], wanted[1]))
    return None if dx is None else _like(dx, x), dweight


class _FftConv2d(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, call: spec.Call) -> torch.Tensor:
        Function.keep(ctx, x, weight)
        ctx.call = call
        return _like(cuda.forward(x.contiguous(), weight.contiguous(), call), x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        x, weight = Function.kept(ctx)
        call, wanted = ctx.call, ctx.needs_input_grad[:2]
        if differentiable.wanted(dy):
            return (*_pytorch_backward(dy, x, weight, (call.pad_h, call.pad_w), wanted), None)
        return (*_gradients(dy, x, weight, call, wanted), None)


def fft_conv2d(x: torch.Tensor, weight: torch.Tensor, padding: Pair = (0, 0)) -> torch.Tensor:
    """`conv2d` with one group, stride 1, not dilated, without bias, and 11 taps or more along either side.

    Args:
        x: [N, I, H, W]; transforms take fp32 on CUDA, fastest contiguous (NCHW); everything else runs PyTorch's own. Under autocast it is
            cast as for a convolution.
        weight: [O, I, R, S].

    Returns:
        A new tensor [N, O, OH, OW] in x's dtype (autocast's, if that is on) and its memory format.
    """
    x = (
        x if x.dtype == computed_in(x) else x.to(computed_in(x))
    )  # `to` gives a tensor that outlived a transform memory of its own
    reason = _refusal(x, weight, padding)
    if reason:
        fell_back[reason] += 1
        return _pytorch(x, weight, padding)
    engaged[spec.name((weight.shape[2], weight.shape[3]))] += 1
    found: torch.Tensor = _FftConv2d.apply(x, weight, _call(x, weight, padding))
    return found


@torch.library.custom_op("advisor::fft_conv2d", mutates_args=())
def fft_conv2d_op(x: torch.Tensor, weight: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    """As `fft_conv2d`, for compiled graphs: x in the dtype of the result, which is channels_last."""
    pads = (padding[0], padding[1])
    reason = _refusal(x, weight, pads)
    if reason:
        fell_back[reason] += 1
        return _pytorch(x, weight, pads).contiguous(memory_format=torch.channels_last)
    engaged[spec.name((weight.shape[2], weight.shape[3]))] += 1
    found = cuda.forward(x.contiguous(), weight.contiguous(), _call(x, weight, pads))
    return found.contiguous(memory_format=torch.channels_last)


@fft_conv2d_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, padding: Sequence[int]) -> torch.Tensor:
    n, _, h, w = x.shape
    rows, columns = h + 2 * padding[0] - weight.shape[2] + 1, w + 2 * padding[1] - weight.shape[3] + 1
    return alignment.empty_nhwc((n, weight.shape[0], rows, columns), x)


@torch.library.custom_op("advisor::fft_conv2d_backward", mutates_args=())
def fft_conv2d_backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    padding: Sequence[int],
    dx_wanted: bool,
    dweight_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `advisor::fft_conv2d`: dx, channels_last, and dweight; empty where not wanted."""
    pads, wanted = (padding[0], padding[1]), (dx_wanted, dweight_wanted)
    if _refusal(x, weight, pads):
        dx, dweight = _pytorch_backward(dy.to(x.dtype), x, weight, pads, wanted)
    else:
        dx, dweight = _gradients(dy, x, weight, _call(x, weight, pads), wanted)
    return (
        x.new_empty(0) if dx is None else dx.contiguous(memory_format=torch.channels_last),
        weight.new_empty(0) if dweight is None else dweight.contiguous(),
    )


@fft_conv2d_backward_op.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    padding: Sequence[int],
    dx_wanted: bool,
    dweight_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.channels_last) if dx_wanted else x.new_empty(0),
        weight.new_empty(weight.shape) if dweight_wanted else weight.new_empty(0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.padding = inputs
    ctx.save_for_backward(x, weight)


def _op_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    wanted = ctx.needs_input_grad[:2]
    found = fft_conv2d_backward_op(dy, x, weight, ctx.padding, *wanted)
    return (*(gradient if want else None for gradient, want in zip(found, wanted, strict=True)), None)


fft_conv2d_op.register_autograd(_op_backward, setup_context=_setup)
