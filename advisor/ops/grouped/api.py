"""Grouped 3 x 3 convolution as one operation: the bundled kernels, or PyTorch's own convolution.

Two entries over the same kernels: `grouped_conv2d`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.grouped_conv2d`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
At a few shapes (`spec.forward_wins`) the forward is PyTorch's own and the backward the kernels': each is then counted as what it
is, in `fell_back` and `engaged`. The weight stays the user's parameter, [C, C / groups, 3, 3]: kernels read it as it lies, in its own dtype and strides, and give
its gradient in both, so under autocast neither is cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import alignment, convolution, differentiable, dispatch, storage
from advisor.ops.function import Function
from advisor.ops.grouped import cuda, spec

engaged, fell_back = dispatch.counters("grouped")


def unsupported(x: torch.Tensor, weight: torch.Tensor, stride: int, groups: int) -> str:
    """Why the kernels cannot take these tensors; empty when they can."""
    return convolution.unsupported(spec, x, weight, stride=stride, padding=1, groups=groups)


def _refusal(x: torch.Tensor, weight: torch.Tensor, stride: int, groups: int) -> str:
    reason = unsupported(x, weight, stride, groups)
    if reason:
        return reason
    wins = spec.wins(dtype=storage.name(x.dtype), group=weight.shape[1], stride=stride)
    if not wins and cuda.hopper_lacks(x.device.index or 0):
        wins = spec.wins_elsewhere(weight.shape[1], stride)
    return dispatch.refusal("", wins)


def _pytorch(x: torch.Tensor, weight: torch.Tensor, stride: int, groups: int) -> torch.Tensor:
    """PyTorch's own convolution in x's dtype."""
    return F.conv2d(x, weight.to(x.dtype), None, stride, 1, 1, groups)


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


def _forward(
    x: torch.Tensor, weight: torch.Tensor, call: spec.Call, *, moments: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """y, channels_last: from the kernel or, where that is faster, PyTorch's own; and the kernel's moments, if asked for.

    Nothing is recorded for a backward.
    """
    reason = spec.forward_wins(call.group, call.stride)
    if reason:
        fell_back[reason] += 1
        y = _pytorch(x, weight, call.stride, call.channels // call.group)
        return y.contiguous(memory_format=torch.channels_last), None
    engaged[spec.name(call.group, call.stride)] += 1
    return cuda.forward(x, weight, call, moments=moments and not spec.leaves_moments(call.group, call.stride))


def _gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, call: spec.Call, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dx and dweight from the kernels, where wanted."""
    if spec.forward_wins(call.group, call.stride):  # else the forward counted
        engaged[spec.name(call.group, call.stride)] += 1
    dy = alignment.nhwc(dy.to(x.dtype))
    # The weight's partial sums are freed before the larger gradient is allocated.
    dweight = cuda.backward_weight(dy, x, weight, call) if wanted[1] else None
    return cuda.backward_data(dy, weight, call) if wanted[0] else None, dweight


def _differentiable_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, stride: int, groups: int, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The backward in PyTorch's own operation, which can be differentiated again."""
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        *(dy, x, weight.to(x.dtype), None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], groups),
        [wanted[0], wanted[1], False],
    )
    return dx, dweight.to(weight.dtype) if wanted[1] else None


class _GroupedConv2d(Function):
    replays = True

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, call: spec.Call, moments: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        Function.keep(ctx, x, weight)
        ctx.call = call
        y, parts = _forward(x, weight, call, moments=moments)  # without grad mode, as all of this function
        if parts is not None:
            ctx.mark_non_differentiable(parts)
        return y, parts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        dy, _ = gradients
        if dy is None:  # nobody used the result
            return None, None, None, None
        x, weight = Function.kept(ctx)
        call: spec.Call = ctx.call
        wanted = ctx.needs_input_grad[:2]
        if differentiable.wanted(dy):
            groups = call.channels // call.group
            return (*_differentiable_backward(dy, x, weight, call.stride, groups, wanted), None, None)
        return (*_gradients(dy, x, weight, call, wanted), None, None)


def grouped_conv2d(x: torch.Tensor, weight: torch.Tensor, stride: int, groups: int) -> torch.Tensor:
    """Each group's channels convolved with its own 3 x 3 taps (`conv2d` with padding 1, no bias, as many channels out as in).

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16 or bf16 on CUDA, everything else runs PyTorch's own. Under
            autocast it is cast as for a convolution.
        weight: [C, C / groups, 3, 3] in x's dtype or, as under autocast, in fp32: read as it is, in any memory format.

    Returns:
        A new tensor [N, C, OH, OW] in x's dtype (autocast's, if that is on).
    """
    return _grouped_conv2d(x, weight, stride, groups, moments=False)[0]


def grouped_conv2d_moments(
    x: torch.Tensor, weight: torch.Tensor, stride: int, groups: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `grouped_conv2d`, and the result's moments for a batch norm (ops/moments.py); None where the forward that ran leaves none."""
    return _grouped_conv2d(x, weight, stride, groups, moments=True)


def _grouped_conv2d(
    x: torch.Tensor, weight: torch.Tensor, stride: int, groups: int, *, moments: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = _autocast(x)
    reason = _refusal(x, weight, stride, groups)
    if reason:
        fell_back[reason] += 1
        return _pytorch(x, weight, stride, groups), None
    call = spec.call(tuple(x.shape), groups, stride)
    found: tuple[torch.Tensor, torch.Tensor | None]
    found = _GroupedConv2d.apply(x, weight, call, moments)
    return found


@torch.library.custom_op("advisor::grouped_conv2d", mutates_args=())
def grouped_conv2d_op(x: torch.Tensor, weight: torch.Tensor, stride: int, groups: int) -> torch.Tensor:
    """As `grouped_conv2d`, for compiled graphs: x in the dtype of the result, which is channels_last."""
    x = x.contiguous(memory_format=torch.channels_last)
    reason = _refusal(x, weight, stride, groups)
    if reason:
        fell_back[reason] += 1
        return _pytorch(x, weight, stride, groups).contiguous(memory_format=torch.channels_last)
    return _forward(x, weight, spec.call(tuple(x.shape), groups, stride))[0]


@grouped_conv2d_op.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, stride: int, groups: int) -> torch.Tensor:
    n, c, h, w = x.shape
    rows, columns = ((size - 1) // stride + 1 for size in (h, w))
    return alignment.empty_nhwc((n, c, rows, columns), x)


@torch.library.custom_op("advisor::grouped_conv2d_backward", mutates_args=())
def grouped_conv2d_backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: int,
    groups: int,
    dx_wanted: bool,
    dweight_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `advisor::grouped_conv2d`: dx, dweight; empty where not wanted. dweight is contiguous."""
    x = x.contiguous(memory_format=torch.channels_last)
    wanted = (dx_wanted, dweight_wanted)
    if _refusal(x, weight, stride, groups):
        dx, dweight = _differentiable_backward(dy.to(x.dtype), x, weight, stride, groups, wanted)
        dx = None if dx is None else dx.contiguous(memory_format=torch.channels_last)
    else:
        dx, dweight = _gradients(dy, x, weight, spec.call(tuple(x.shape), groups, stride), wanted)
    return (
        x.new_empty(0) if dx is None else dx,
        weight.new_empty(0) if dweight is None else dweight.contiguous(),
    )


@grouped_conv2d_backward_op.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: int,
    groups: int,
    dx_wanted: bool,
    dweight_wanted: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.channels_last) if dx_wanted else x.new_empty(0),
        weight.new_empty(weight.shape) if dweight_wanted else weight.new_empty(0),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.stride, ctx.groups = inputs
    ctx.save_for_backward(x, weight)


def _op_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    dx_wanted, dweight_wanted = ctx.needs_input_grad[:2]
    dx, dweight = grouped_conv2d_backward_op(dy, x, weight, ctx.stride, ctx.groups, dx_wanted, dweight_wanted)
    return dx if dx_wanted else None, dweight if dweight_wanted else None, None, None


grouped_conv2d_op.register_autograd(_op_backward, setup_context=_setup)
