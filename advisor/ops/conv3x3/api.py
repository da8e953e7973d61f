"""3 x 3 convolution of stride 1 as one operation: the bundled kernels, or PyTorch's own convolution.

Two entries over the same kernels: `conv3x3`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.conv3x3`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles. Forward, gradient
of the input and gradient of the weight are dispatched each by itself, where its kernel is measured to win; a call is counted in
`engaged` when one of its products ran, and in `fell_back` when none did. The weight stays the user's parameter, [O, I, 3, 3]: kernels read
it as it lies, in its own dtype and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import alignment, convolution, differentiable, dispatch, nvrtc, storage, tensor_map
from advisor.ops.conv3x3 import cuda, spec
from advisor.ops.first_conv.api import computed_in
from advisor.ops.function import Function

engaged, fell_back = dispatch.counters("conv3x3")


def unsupported(x: torch.Tensor, weight: torch.Tensor) -> str:
    """Why the kernels cannot take these tensors; empty when they can."""
    reason = convolution.unsupported(spec, x, weight, stride=1, padding=1)
    return reason or tensor_map.unavailable() or nvrtc.refused(spec.CONV)


def _refusal(x: torch.Tensor, weight: torch.Tensor) -> str:
    reason = unsupported(x, weight)
    return reason or dispatch.refusal("", spec.wins(spec.call(tuple(x.shape), weight.shape[0]), storage.name(x.dtype)))


def _pytorch(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """PyTorch's own convolution in x's dtype."""
    return F.conv2d(x, weight.to(x.dtype), None, 1, 1)


def _forward(
    x: torch.Tensor, weight: torch.Tensor, call: spec.Call, *, moments: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """y, channels_last, from the kernel or, where that is faster, PyTorch's own; the kernel's moments, if asked for; and the weight as
    PyTorch's own read it.

    Nothing is recorded for a backward.
    """
    if not spec.product_left(call):
        return *cuda.forward(x, weight, call, moments=moments), None
    read = weight.to(x.dtype)
    return _pytorch(x, read).contiguous(memory_format=torch.channels_last), None, read


def _pytorch_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dx and dweight in PyTorch's own operation, which can be differentiated again."""
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        *(dy, x, weight.to(x.dtype), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), [wanted[0], wanted[1], False]
    )
    return dx, dweight.to(weight.dtype) if wanted[1] else None


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    call: spec.Call,
    wanted: Sequence[bool],
    read: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dx and dweight, where wanted, each from the kernels or PyTorch's own. `read`: the weight in x's dtype, where there is one."""
    dy = alignment.nhwc(dy.to(x.dtype))
    dx = dweight = None
    # The weight's partial sums are freed before the larger gradient is allocated.
    if wanted[1] and not spec.weight_left(call):
        dweight = cuda.backward_weight(dy, x, weight, call)
    elif wanted[1]:
        # For its own gradient only the weight's sizes are asked for, so none is cast.
        sized = read if read is not None else torch.empty_like(weight, dtype=x.dtype)
        _, dweight = _pytorch_backward(dy, x, sized, (False, True))
        dweight = None if dweight is None else dweight.to(weight.dtype)
    if wanted[0] and not spec.product_left(call.gradient()):
        dx = cuda.backward_data(dy, weight, call)
    elif wanted[0]:
        dx, _ = _pytorch_backward(dy, x, weight if read is None else read, (True, False))
    return dx, dweight


class _Conv3x3(Function):
    replays = True

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, call: spec.Call, moments: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        y, parts, read = _forward(x, weight, call, moments=moments)  # without grad mode, as all of this function
        Function.keep(ctx, x, weight, read if spec.product_left(call.gradient()) else None)
        ctx.call = call
        if parts is not None:
            ctx.mark_non_differentiable(parts)
        return y, parts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        dy, _ = gradients
        if dy is None:  # nobody used the result
            return None, None, None, None
        x, weight, read = Function.kept(ctx)
        wanted = ctx.needs_input_grad[:2]
        if differentiable.wanted(dy):
            return (*_pytorch_backward(dy, x, weight, wanted), None, None)
        return (*_gradients(dy, x, weight, ctx.call, wanted, read), None, None)


def conv3x3(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`conv2d` with 3 x 3 taps, padding 1, stride 1, one group and no bias.

    Args:
        x: [N, I, H, W]; the kernels take channels_last fp16 or bf16 on a CUDA device of sm_90, everything else runs PyTorch's own.
            Under autocast it is cast as for a convolution.
        weight: [O, I, 3, 3] in x's dtype or, as under autocast, in fp32: read as it is, in any memory format.

    Returns:
        A new tensor [N, O, H, W] in x's dtype (autocast's, if that is on).
    """
    return _conv3x3(x, weight, moments=False)[0]


def conv3x3_moments(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `conv3x3`, and the result's moments for a batch norm (ops/moments.py); None where PyTorch's own forward ran."""
    return _conv3x3(x, weight, moments=True)


def _conv3x3(x: torch.Tensor, weight: torch.Tensor, *, moments: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    x = x.to(computed_in(x))
    reason = _refusal(x, weight)
    if reason:
        fell_back[reason] += 1
        return _pytorch(x, weight), None
    call = spec.call(tuple(x.shape), weight.shape[0])
    engaged[spec.name(call.inputs, call.outputs)] += 1
    found: tuple[torch.Tensor, torch.Tensor | None]
    found = _Conv3x3.apply(x, weight, call, moments)
    return found


def _compiled_forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    reason = _refusal(x, weight)
    if reason:
        fell_back[reason] += 1
        return _pytorch(x, weight)
    call = spec.call(tuple(x.shape), weight.shape[0])
    engaged[spec.name(call.inputs, call.outputs)] += 1
    return _forward(x, weight, call)[0]


def _compiled_gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: Sequence[bool]
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if _refusal(x, weight):
        return _pytorch_backward(dy.to(x.dtype), x, weight, wanted)
    return _gradients(dy, x, weight, spec.call(tuple(x.shape), weight.shape[0]), wanted)


# As `conv3x3`, x in the dtype of the result.
conv3x3_op = convolution.compiled_operation("conv3x3", _compiled_forward, _compiled_gradients, stride=1)
