"""Grouped 3 x 3 convolution as one operation: the bundled kernels, or PyTorch's own convolution.

At a few shapes (`spec.forward_wins`) the forward is PyTorch's own and the backward the kernels': each is then counted as what it
is, in `fell_back` and `engaged`. The weight stays the user's parameter, [C, C / groups, 3, 3]: kernels read it as it lies, in its own
dtype and strides, and give its gradient in both, so under autocast neither is cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from advisor.ops import alignment, dispatch, storage
from advisor.ops.convolution import ConvGeometry, Convolution, Gradients, Made, cast
from advisor.ops.grouped import cuda, spec
from advisor.ops.grouped.conv import GroupedConv, grouped_conv

engaged, fell_back = dispatch.counters("grouped")


def _wins(x: torch.Tensor, weight: torch.Tensor, _bias: None, stride: int, _groups: int) -> str:
    wins = spec.wins(dtype=storage.name(x.dtype), group=weight.shape[1], stride=stride)
    if not wins and cuda.hopper_lacks(x.device.index or 0):
        wins = spec.wins_elsewhere(weight.shape[1], stride)
    return wins


def _forward(
    x: torch.Tensor, weight: torch.Tensor, _bias: None, call: GroupedConv, *, moments: bool
) -> tuple[Any, ...]:
    """y from the kernel or, where that is faster, PyTorch's own; and the kernel's moments, if asked for."""
    reason = spec.forward_wins(call.group, call.stride)
    if reason:
        fell_back[reason] += 1
        y = CONVOLUTION.pytorch(x, weight, None, call.stride, call.channels // call.group)
        return y.contiguous(memory_format=torch.channels_last), None
    engaged[spec.name(call.group, call.stride)] += 1
    return cuda.forward(x, weight, call, moments=moments and not spec.leaves_moments(call.group, call.stride))


def _gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, _bias: None, call: GroupedConv, wanted: Sequence[bool]
) -> Gradients:
    if spec.forward_wins(call.group, call.stride):  # else the forward counted
        engaged[spec.name(call.group, call.stride)] += 1
    dy = alignment.nhwc(dy.to(x.dtype))
    # The weight's partial sums are freed before the larger gradient is allocated.
    dweight = cuda.backward_weight(dy, x, weight, call) if wanted[1] else None
    return cuda.backward_data(dy, weight, call) if wanted[0] else None, dweight, None


CONVOLUTION = Convolution(
    name="grouped_conv2d",
    family="grouped",
    supports=spec.SUPPORTS,
    numbers="SymInt stride, SymInt groups",
    geometry=lambda x, stride, groups: ConvGeometry(stride, (1, 1), groups=groups),
    call=lambda x, weight, bias, stride, groups: grouped_conv(tuple(x.shape), groups, stride),
    wins=_wins,
    label=None,
    forward=_forward,
    gradients=_gradients,
)
unsupported = CONVOLUTION.unsupported


def grouped_conv2d(x: torch.Tensor, weight: torch.Tensor, stride: int, groups: int) -> torch.Tensor:
    """Each group's channels convolved with its own 3 x 3 taps (`conv2d` with padding 1, no bias, as many channels out as in).

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16 or bf16 on CUDA, everything else runs PyTorch's own. Under
            autocast it is cast as for a convolution.
        weight: [C, C / groups, 3, 3] in x's dtype or, as under autocast, in fp32: read as it is, in any memory format.

    Returns:
        A new tensor [N, C, OH, OW] in x's dtype (autocast's, if that is on).
    """
    return CONVOLUTION(cast(x), weight, None, stride, groups)


def grouped_conv2d_moments(x: torch.Tensor, weight: torch.Tensor, stride: int, groups: int) -> Made:
    """As `grouped_conv2d`, and the result's moments for a batch norm, as Convolution's `with_moments`."""
    return CONVOLUTION.with_moments(cast(x), weight, None, stride, groups)
