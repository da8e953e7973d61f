"""3 x 3 convolution of stride 1 between many channels as one operation: Winograd's F(4x4, 3x3), or PyTorch's own convolution.

Forward and gradients are dispatched each by itself, where it is measured to win: both gradients together. The weight stays the user's parameter, [O, I, 3, 3]: kernels read it as it lies, in its own dtype and strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from advisor.ops import alignment, dispatch, nvrtc, storage
from advisor.ops.convolution import ConvGeometry, Convolution, Gradients, cast
from advisor.ops.winograd import cuda, spec

engaged, fell_back = dispatch.counters("winograd")


def _call(x: torch.Tensor, weight: torch.Tensor, _bias: None, padding: int) -> spec.WinogradConv:
    return spec.call(tuple(x.shape), weight.shape[0], padding)


def _wins(x: torch.Tensor, weight: torch.Tensor, _bias: None, padding: int) -> str:
    call = _call(x, weight, None, padding)
    return spec.wins(call, storage.name(x.dtype)) or spec.wins_on(call, nvrtc.arch(x.device.index or 0))


def _forward(
    x: torch.Tensor, weight: torch.Tensor, _bias: None, call: spec.WinogradConv, *, moments: bool
) -> tuple[Any, ...]:
    """y from the kernels or, where that is faster, PyTorch's own; no moments."""
    if spec.product_left(call):
        return _CONVOLUTION.pytorch(x, weight, None, call.padding).contiguous(memory_format=torch.channels_last), None
    return cuda.forward(x, weight, call), None


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    _bias: None,
    call: spec.WinogradConv,
    wanted: Sequence[bool],
) -> Gradients:
    """dx, from the kernels or PyTorch's own, and dweight, each where wanted."""
    dy = alignment.nhwc(dy.to(x.dtype))
    if not wanted[0] or spec.product_left(call.gradient()):
        return _CONVOLUTION.pytorch_backward(dy, x, weight, None, wanted, call.padding)
    if wanted[1] and cuda.sums_in_fp32():
        return *cuda.backward(dy, alignment.nhwc(x), weight, call), None
    dweight = None
    if wanted[1]:  # for its own gradient only the weight's sizes are asked for, so none is cast
        sized = torch.empty_like(weight, dtype=x.dtype)
        _, found, _ = _CONVOLUTION.pytorch_backward(dy, x, sized, None, (False, True, False), call.padding)
        dweight = None if found is None else found.to(weight.dtype)
    return cuda.backward_data(dy, weight, call), dweight, None


_CONVOLUTION = Convolution(
    name="winograd",
    family="winograd",
    supports=spec.SUPPORTS,
    numbers="SymInt padding",
    geometry=lambda x, padding: ConvGeometry(padding=(padding, padding)),
    call=_call,
    wins=_wins,
    label=lambda call: spec.name(call.inputs, call.outputs),
    forward=_forward,
    gradients=_gradients,
    replays=False,
)

unsupported = _CONVOLUTION.unsupported


def winograd(x: torch.Tensor, weight: torch.Tensor, padding: int = 1) -> torch.Tensor:
    """`conv2d` with 3 x 3 taps, stride 1, one group and no bias; the kernels take a padding of 0 and of 1.

    Args:
        x: [N, I, H, W]; the kernels take channels_last bf16 on CUDA, everything else runs PyTorch's own. Under autocast it is cast as for a
            convolution.
        weight: [O, I, 3, 3] in bf16 or, as under autocast, in fp32: read as it is, in any memory format.

    Returns:
        A new tensor [N, O, OH, OW] in x's dtype (autocast's, if that is on).
    """
    return _CONVOLUTION(cast(x), weight, None, padding)
