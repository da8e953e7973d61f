"""Depthwise convolution with large taps as one operation: the bundled kernels, or PyTorch's own convolution.

Kernels work on planes (NCHW); a channels_last input is copied, and so is its result, back: two passes over memory for thousands of
operations a value. The weight stays the user's parameter, [C, 1, KH, KW]: kernels read it in its own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from advisor.ops import alignment, dispatch, storage
from advisor.ops.convolution import ConvGeometry, Convolution, Gradients, Pair, cast
from advisor.ops.large_depthwise import cuda, spec

engaged, fell_back = dispatch.counters("large_depthwise")


def _taps(weight: torch.Tensor) -> Pair:
    return weight.shape[2], weight.shape[3]


def _planes(x: torch.Tensor) -> torch.Tensor:
    """x as contiguous planes that begin at a multiple of 16 bytes."""
    if _is_nhwc(x) and spec.turns(x.shape[2] * x.shape[3], storage.name(x.dtype)):
        return cuda.planes(x)
    return alignment.dense(x, torch.contiguous_format)


def _lying_as(found: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """`found`, planes, in the memory format of x."""
    return cuda.images(found) if _is_nhwc(x) else found


def _is_nhwc(x: torch.Tensor) -> bool:
    return alignment.is_nhwc(x) and not x.is_contiguous()


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: spec.LargeConv, *, moments: bool
) -> tuple[Any, ...]:
    return _lying_as(cuda.forward(_planes(x), weight.contiguous(), bias, call), x), None


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    call: spec.LargeConv,
    wanted: Sequence[bool],
) -> Gradients:
    """dx, in x's format, dweight and dbias, each where wanted."""
    dy = _planes(dy.to(x.dtype))
    dx = dweight = dbias = None
    if wanted[1]:
        dweight = cuda.backward_weight(dy, _planes(x), weight, call)
    if wanted[2] and bias is not None:
        dbias = dy.sum((0, 2, 3), dtype=torch.float32).to(bias.dtype)
    if wanted[0]:
        dx = _lying_as(cuda.backward_data(dy, weight.contiguous(), call), x)
    return dx, dweight, dbias


CONVOLUTION = Convolution(
    name="large_depthwise_conv2d",
    family="large_depthwise",
    supports=spec.SUPPORTS,
    numbers="SymInt[] padding",
    biased=True,
    geometry=lambda x, padding: ConvGeometry(padding=padding, groups=x.shape[1]),
    call=lambda x, weight, bias, padding: spec.call(tuple(x.shape), _taps(weight), padding),
    wins=lambda x, weight, bias, padding: spec.wins(_taps(weight), storage.name(x.dtype)),
    label=lambda call: spec.name((call.kernel_h, call.kernel_w)),
    forward=_forward,
    gradients=_gradients,
    nhwc=False,
    replays=False,
)
unsupported = CONVOLUTION.unsupported


def large_depthwise_conv2d(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, padding: Pair = (0, 0)
) -> torch.Tensor:
    """`conv2d` with as many groups as channels, stride 1, not dilated, and 11 to 63 taps along the longer side.

    Args:
        x: [N, C, H, W]; the kernels take fp16, bf16 or fp32 on CUDA, fastest contiguous (NCHW); everything else runs PyTorch's own. Under
            autocast it is cast as for a convolution.
        weight: [C, 1, KH, KW]; bias: [C] or None; in x's dtype or, as under autocast, in fp32: read as they are.

    Returns:
        A new tensor [N, C, OH, OW] in x's dtype (autocast's, if that is on) and its memory format.
    """
    return CONVOLUTION(cast(x), weight, bias, padding)
