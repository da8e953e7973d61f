"""1 x 1 convolution of stride 2 as one operation: the bundled kernels, or PyTorch's own convolution.

Two entries over the same kernels: `strided_pointwise_conv2d`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.strided_pointwise_conv2d`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
Forward, gradient of the input and gradient of the weight are dispatched each by itself, where it is measured to win.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import alignment, convolution, differentiable, dispatch, storage
from advisor.ops.first_conv.api import computed_in
from advisor.ops.function import Function
from advisor.ops.strided_pointwise import cuda, spec

engaged, fell_back = dispatch.counters("strided_pointwise")


def unsupported(x: torch.Tensor, weight: torch.Tensor) -> str:
    """Why the kernels cannot take these tensors; empty when they can."""
    return convolution.unsupported(spec, x, weight, stride=spec.STRIDE, padding=0)


def _refusal(x: torch.Tensor, weight: torch.Tensor) -> str:
    reason = unsupported(x, weight)
    return reason or dispatch.refusal("", spec.wins(spec.call(tuple(x.shape), weight.shape[0]), storage.name(x.dtype)))


def _pytorch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, weight, None, spec.STRIDE)


def _forward(x: torch.Tensor, weight: torch.Tensor, call: spec.Call) -> torch.Tensor:
    """y, channels_last, from the kernel or, where that is faster, PyTorch's own. Nothing is recorded for a backward."""
    if not spec.product_left(call, spec.FORWARD):
        return cuda.forward(x, alignment.aligned(weight), call)
    return _pytorch(x, weight).contiguous(memory_format=torch.channels_last)


def _pytorch_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: Sequence[bool], stride: int = spec.STRIDE
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dx and dweight in PyTorch's own operation, which can be differentiated again."""
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        *(dy, x, weight, None, [stride, stride], [0, 0], [1, 1], False, [0, 0], 1), [wanted[0], wanted[1], False]
    )
    return dx, dweight


def _gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, call: spec.Call, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dx and dweight, where wanted, each from the kernels or PyTorch's own."""
    dy = alignment.nhwc(dy.to(x.dtype))
    dx = dweight = None
    # The gathered pixels are freed before the larger gradient is allocated.
    if wanted[1] and not spec.product_left(call, spec.WEIGHT):
        _, dweight = _pytorch_backward(dy, cuda.gather(x, call), weight, (False, True), stride=1)
    elif wanted[1]:
        _, dweight = _pytorch_backward(dy, x, weight, (False, True))
    if wanted[0] and not spec.product_left(call, spec.GRADIENT):
        dx = cuda.backward_data(dy, alignment.aligned(weight), call)
    elif wanted[0]:
        dx, _ = _pytorch_backward(dy, x, weight, (True, False))
    return dx, dweight


class _StridedPointwise(Function):
    replays = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, call: spec.Call) -> torch.Tensor:
        read = weight.to(x.dtype)
        Function.keep(ctx, x, weight, read)
        ctx.call = call
        return _forward(x, read, call)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        x, weight, read = Function.kept(ctx)
        wanted = ctx.needs_input_grad[:2]
        if differentiable.wanted(dy):
            dx, dweight = _pytorch_backward(dy, x, weight.to(x.dtype), wanted)
        else:
            dx, dweight = _gradients(dy, x, read, ctx.call, wanted)
        return dx, None if dweight is None else dweight.to(weight.dtype), None


def strided_pointwise_conv2d(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Every other pixel of every other row times the weights (`conv2d` with 1 x 1 taps, stride 2, no padding and no bias).

    Args:
        x: [N, I, H, W]; the kernels take channels_last fp16 or bf16 on CUDA, everything else runs PyTorch's own. Under
            autocast it is cast as for a convolution.
        weight: [O, I, 1, 1], cast to x's dtype where it has another, as autocast does.

    Returns:
        A new tensor [N, O, ceil(H / 2), ceil(W / 2)] in x's dtype (autocast's, if that is on).
    """
    x = x.to(computed_in(x))
    reason = _refusal(x, weight)
    if reason:
        fell_back[reason] += 1
        return _pytorch(x, weight.to(x.dtype))
    call = spec.call(tuple(x.shape), weight.shape[0])
    engaged[spec.name(call.inputs, call.outputs)] += 1
    found: torch.Tensor = _StridedPointwise.apply(x, weight, call)
    return found


def _compiled_forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    reason = _refusal(x, weight)
    if reason:
        fell_back[reason] += 1
        return _pytorch(x, weight)
    call = spec.call(tuple(x.shape), weight.shape[0])
    engaged[spec.name(call.inputs, call.outputs)] += 1
    return _forward(x, weight, call)


def _compiled_gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if _refusal(x, weight):
        return _pytorch_backward(dy.to(x.dtype), x, weight, wanted)
    return _gradients(dy, x, weight, spec.call(tuple(x.shape), weight.shape[0]), wanted)


# As `strided_pointwise_conv2d`, x and weight in one dtype.
strided_pointwise_conv2d_op = convolution.compiled_operation(
    "strided_pointwise_conv2d", _compiled_forward, _compiled_gradients, stride=spec.STRIDE
)
