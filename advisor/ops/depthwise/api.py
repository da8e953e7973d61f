"""Depthwise 2-D convolution as one operation: the bundled kernels, or PyTorch's own convolution.

The weight stays the user's parameter, [C, 1, k, k]: kernels read it as it lies, in its own dtype, and give its gradient in that
dtype, so under autocast neither is cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from advisor.ops import alignment, dispatch, storage
from advisor.ops.convolution import ConvGeometry, Convolution, Gradients, Made, Pair, cast
from advisor.ops.depthwise import cuda, spec

engaged, fell_back = dispatch.counters("depthwise")


def _wins(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: int, _: Pair, dilation: int) -> str:
    channels, *_taps, kernel = weight.shape
    sizes = {"channels": channels, "kernel": kernel, "stride": stride, "dilation": dilation, "image": min(x.shape[2:])}
    return spec.wins(**sizes, bias=bias is not None, dtype=storage.name(x.dtype))


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    call: spec.DepthwiseConv,
    wanted: Sequence[bool],
) -> Gradients:
    """dx, dweight and dbias from the kernels; those of the parameters together."""
    dy, weight = alignment.nhwc(dy.to(x.dtype)), weight.contiguous()
    parameters = wanted[1] or wanted[2]
    if wanted[0] and parameters and spec.ringed(call, storage.name(x.dtype), "backward"):
        return cuda.backward(dy, x, weight, bias, call)
    dx = cuda.backward_data(dy, weight, call) if wanted[0] else None
    return dx, *(cuda.backward_weight(dy, x, weight, bias, call) if parameters else (None, None))


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: spec.DepthwiseConv, *, moments: bool
) -> tuple[Any, ...]:
    return cuda.forward(x, weight.contiguous(), bias, call, moments=moments)


CONVOLUTION = Convolution(
    name="depthwise_conv2d",
    family="depthwise",
    supports=spec.SUPPORTS,
    numbers="SymInt stride, SymInt[] padding, SymInt dilation",
    biased=True,
    geometry=lambda x, stride, padding, dilation: ConvGeometry(stride, padding, dilation, x.shape[1]),
    call=lambda x, weight, bias, stride, padding, dilation: spec.call(
        tuple(x.shape), weight.shape[-1], stride, padding, dilation
    ),
    wins=_wins,
    label=lambda call: spec.name(call.kernel, call.stride, call.dilation),
    forward=_forward,
    gradients=_gradients,
)
unsupported = CONVOLUTION.unsupported


def depthwise_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: Pair = (0, 0),
    dilation: int = 1,
) -> torch.Tensor:
    """Each channel convolved with its own k x k taps (`conv2d` with as many groups as channels).

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's own. Under
            autocast it is cast as for a convolution.
        weight: [C, 1, k, k]; bias: [C] or None; in x's dtype or, as under autocast, in fp32: read as they are.

    Returns:
        A new tensor [N, C, OH, OW] in x's dtype (autocast's, if that is on).
    """
    return CONVOLUTION(cast(x), weight, bias, stride, padding, dilation)


def depthwise_conv2d_moments(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: Pair = (0, 0),
    dilation: int = 1,
) -> Made:
    """As `depthwise_conv2d`, and the result's moments for a batch norm (ops/moments.py), as Convolution's `with_moments`."""
    return CONVOLUTION.with_moments(cast(x), weight, bias, stride, padding, dilation)
