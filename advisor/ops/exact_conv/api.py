"""Convolution in strict fp32 as one operation: on tensor cores with fp32's own error, or PyTorch's own convolution.

Forward, gradient of the input and gradient of the weight are dispatched each by itself, where its kernel is measured to win. Where TF32
is allowed PyTorch's own runs: it is faster, and its error is what the script has asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from advisor.ops import alignment, dispatch
from advisor.ops.convolution import ConvGeometry, Convolution, Gradients, Pair, cast
from advisor.ops.exact_conv import cuda, spec
from advisor.ops.exact_conv.tf32 import ALLOWED, allowed

engaged, fell_back = dispatch.counters("exact_conv")


def _call(x: torch.Tensor, weight: torch.Tensor, _bias: torch.Tensor | None, *numbers: Any) -> spec.ExactConv:
    return spec.call(tuple(x.shape), tuple(weight.shape), *numbers)


def _numbers(call: spec.ExactConv) -> tuple[int, Pair, int, int]:
    return call.stride, (call.pad_h, call.pad_w), call.dilation, call.groups


def _wins(x: torch.Tensor, *others: Any) -> str:
    return ALLOWED if allowed() else spec.wins(_call(x, *others)) or cuda.unmeasured(x.device.index or 0)


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: spec.ExactConv, *, moments: bool
) -> tuple[Any, ...]:
    """y from the kernels or, where that is faster, PyTorch's own."""
    if spec.product_left(call, spec.FORWARD):
        y = CONVOLUTION.pytorch(x, weight, bias, *_numbers(call))
        return y.contiguous(memory_format=torch.channels_last), None
    parts = cuda.split_weight(_dense(weight), call.groups, gradient=False)
    return cuda.forward(cuda.split(x), parts, alignment.aligned(bias), x, call), None


def _dense(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself where its values are dense in memory, in whatever order, else a copy."""
    dense = weight.is_contiguous() or weight.is_contiguous(memory_format=torch.channels_last)
    return weight if dense and weight.data_ptr() % 16 == 0 else weight.clone(memory_format=torch.contiguous_format)


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    call: spec.ExactConv,
    wanted: Sequence[bool],
) -> Gradients:
    """dx, dweight and dbias, each where wanted, each from the kernels or PyTorch's own."""
    dy = alignment.nhwc(dy.to(x.dtype))
    of_input, of_weight = (
        wanted[i] and not spec.product_left(call, product) for i, product in enumerate(spec.GRADIENTS)
    )
    others = (wanted[0] and not of_input, wanted[1] and not of_weight, False)
    dx = dweight = None
    if any(others):
        dx, dweight, _ = CONVOLUTION.pytorch_backward(dy, x, weight, bias, others, *_numbers(call))
    dbias = dy.sum((0, 2, 3)) if wanted[2] and bias is not None else None
    if of_input or of_weight:
        parts = cuda.split(dy)
        if of_weight:  # x's parts are freed before the input's gradient is allocated
            dweight = cuda.backward_weight(parts, cuda.split(x), weight, call)
        if of_input:
            turned = cuda.split_weight(_dense(weight), call.groups, gradient=True)
            dx = cuda.backward_data(parts, turned, x, call)
    return dx, dweight, dbias


CONVOLUTION = Convolution(
    name="exact_conv2d",
    family="exact_conv",
    supports=spec.SUPPORTS,
    numbers="SymInt stride, SymInt[] padding, SymInt dilation, SymInt groups",
    biased=True,
    geometry=lambda x, *numbers: ConvGeometry(*numbers),
    call=_call,
    wins=_wins,
    label=spec.name,
    forward=_forward,
    gradients=_gradients,
    replays=False,
)


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
    x = alignment.realigned(cast(x))
    return CONVOLUTION(x, weight, bias, stride, padding, dilation, groups)
