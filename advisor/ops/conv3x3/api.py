"""3 x 3 convolution of stride 1 as one operation: the bundled kernels, or PyTorch's own convolution.

Forward, gradient of the input and gradient of the weight are dispatched each by itself, where its kernel is measured to win; a call is
counted in `engaged` when one of its products ran, and in `fell_back` when none did. The weight stays the user's parameter, [O, I, 3, 3]:
kernels read it as it lies, in its own dtype and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from advisor.ops import alignment, dispatch, nvrtc, storage, tensor_map
from advisor.ops.conv3x3 import cuda, spec
from advisor.ops.convolution import ConvGeometry, Convolution, Gradients, Made, cast

engaged, fell_back = dispatch.counters("conv3x3")


def _call(x: torch.Tensor, weight: torch.Tensor, _bias: None) -> spec.Conv3x3:
    return spec.call(tuple(x.shape), weight.shape[0])


def _forward(
    x: torch.Tensor, weight: torch.Tensor, _bias: None, call: spec.Conv3x3, *, moments: bool
) -> tuple[Any, ...]:
    """y from the kernel or, where that is faster, PyTorch's own; the kernel's moments, if asked for; the weight as PyTorch's own read it."""
    if not spec.product_left(call):
        return *cuda.forward(x, weight, call, moments=moments), None
    read = weight.to(x.dtype)
    y = CONVOLUTION.pytorch(x, read, None).contiguous(memory_format=torch.channels_last)
    return y, None, read if spec.product_left(call.gradient()) else None


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    _bias: None,
    call: spec.Conv3x3,
    wanted: Sequence[bool],
    read: torch.Tensor | None = None,
) -> Gradients:
    """dx and dweight, where wanted, each from the kernels or PyTorch's own. `read`: the weight in x's dtype, where there is one."""
    dy = alignment.nhwc(dy.to(x.dtype))
    dx = dweight = None
    # The weight's partial sums are freed before the larger gradient is allocated.
    if wanted[1] and not spec.weight_left(call):
        dweight = cuda.backward_weight(dy, x, weight, call)
    elif wanted[1]:
        # For its own gradient only the weight's sizes are asked for, so none is cast.
        sized = read if read is not None else torch.empty_like(weight, dtype=x.dtype)
        _, dweight, _ = CONVOLUTION.pytorch_backward(dy, x, sized, None, (False, True))
        dweight = None if dweight is None else dweight.to(weight.dtype)
    if wanted[0] and not spec.product_left(call.gradient()):
        dx = cuda.backward_data(dy, weight, call)
    elif wanted[0]:
        dx = CONVOLUTION.pytorch_backward(dy, x, weight if read is None else read, None, (True, False))[0]
    return dx, dweight, None


CONVOLUTION = Convolution(
    name="conv3x3",
    family="conv3x3",
    supports=spec.SUPPORTS,
    geometry=lambda x: ConvGeometry(padding=(1, 1)),
    call=_call,
    wins=lambda x, *others: spec.wins(_call(x, *others), storage.name(x.dtype)),
    label=lambda call: spec.name(call.inputs, call.outputs),
    forward=_forward,
    gradients=_gradients,
    also=lambda x, weight: tensor_map.unavailable() or nvrtc.refused(spec.CONV),
)
unsupported = CONVOLUTION.unsupported


def conv3x3(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`conv2d` with 3 x 3 taps, padding 1, stride 1, one group and no bias.

    Args:
        x: [N, I, H, W]; the kernels take channels_last fp16 or bf16 on a CUDA device of sm_90, everything else runs PyTorch's own.
            Under autocast it is cast as for a convolution.
        weight: [O, I, 3, 3] in x's dtype or, as under autocast, in fp32: read as it is, in any memory format.

    Returns:
        A new tensor [N, O, H, W] in x's dtype (autocast's, if that is on).
    """
    return CONVOLUTION(cast(x), weight, None)


def conv3x3_moments(x: torch.Tensor, weight: torch.Tensor) -> Made:
    """As `conv3x3`, and the result's moments for a batch norm, as Convolution's `with_moments`."""
    return CONVOLUTION.with_moments(cast(x), weight, None)
