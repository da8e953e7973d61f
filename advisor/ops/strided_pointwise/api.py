"""1 x 1 convolution of stride 2 as one operation: the bundled kernels, or PyTorch's own convolution.

Forward, gradient of the input and gradient of the weight are dispatched each by itself, where it is measured to win.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from advisor.ops import alignment, dispatch, storage
from advisor.ops.convolution import ConvGeometry, Convolution, Gradients, cast, dense_gradients
from advisor.ops.strided_pointwise import cuda, spec

engaged, fell_back = dispatch.counters("strided_pointwise")


def _call(x: torch.Tensor, weight: torch.Tensor, _bias: None) -> spec.StridedConv:
    return spec.call(tuple(x.shape), weight.shape[0])


def _forward(
    x: torch.Tensor, weight: torch.Tensor, _bias: None, call: spec.StridedConv, *, moments: bool
) -> tuple[Any, ...]:
    """y from the kernel or, where that is faster, PyTorch's own; and the weight as they read it."""
    read = weight.to(x.dtype)
    if not spec.product_left(call, spec.FORWARD):
        return cuda.forward(x, alignment.aligned(read), call), None, read
    return CONVOLUTION.pytorch(x, read, None).contiguous(memory_format=torch.channels_last), None, read


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    _bias: None,
    call: spec.StridedConv,
    wanted: Sequence[bool],
    read: torch.Tensor | None = None,
) -> Gradients:
    """dx and dweight, where wanted, each from the kernels or PyTorch's own. `read`: the weight in x's dtype, where there is one."""
    read = weight.to(x.dtype) if read is None else read
    dy = alignment.nhwc(dy.to(x.dtype))
    dx = dweight = None
    # The gathered pixels are freed before the larger gradient is allocated.
    if wanted[1] and not spec.product_left(call, spec.WEIGHT):
        _, dweight = dense_gradients(dy, cuda.gather(x, call), read, (False, True))
    elif wanted[1]:
        _, dweight, _ = CONVOLUTION.pytorch_backward(dy, x, read, None, (False, True))
    if wanted[0] and not spec.product_left(call, spec.GRADIENT):
        dx = cuda.backward_data(dy, alignment.aligned(read), call)
    elif wanted[0]:
        dx = CONVOLUTION.pytorch_backward(dy, x, read, None, (True, False))[0]
    return dx, None if dweight is None else dweight.to(weight.dtype), None


CONVOLUTION = Convolution(
    name="strided_pointwise_conv2d",
    family="strided_pointwise",
    supports=spec.SUPPORTS,
    geometry=lambda x: ConvGeometry(spec.STRIDE),
    call=_call,
    wins=lambda x, *others: spec.wins(_call(x, *others), storage.name(x.dtype)),
    label=lambda call: spec.name(call.inputs, call.outputs),
    forward=_forward,
    gradients=_gradients,
)
unsupported = CONVOLUTION.unsupported


def strided_pointwise_conv2d(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Every other pixel of every other row times the weights (`conv2d` with 1 x 1 taps, stride 2, no padding and no bias).

    Args:
        x: [N, I, H, W]; the kernels take channels_last fp16 or bf16 on CUDA, everything else runs PyTorch's own. Under
            autocast it is cast as for a convolution.
        weight: [O, I, 1, 1], cast to x's dtype where it has another, as autocast does.

    Returns:
        A new tensor [N, O, ceil(H / 2), ceil(W / 2)] in x's dtype (autocast's, if that is on).
    """
    return CONVOLUTION(cast(x), weight, None)
