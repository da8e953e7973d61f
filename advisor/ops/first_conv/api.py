"""The first 2-D convolution of a network, over three channels, as one operation: the bundled kernels, or PyTorch's own.

Input and parameters are read as they lie, in their own dtypes, and parameters get their gradients in theirs: under autocast
nothing is cast, and the image itself is what is kept for the backward. Images need no gradient; where one is wanted, PyTorch's
own operation runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from advisor.ops import alignment, dispatch, storage
from advisor.ops.convolution import ConvGeometry, Convolution, Gradients, Made, Pair, computed_in
from advisor.ops.first_conv import cuda, spec

engaged, fell_back = dispatch.counters("first_conv")
Call = tuple[spec.FirstConv, torch.dtype]  # and the dtype in which it is computed


def _call(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: int,
    padding: Pair,
    compute: torch.dtype,
) -> Call:
    return spec.call(tuple(x.shape), weight.shape[0], weight.shape[-1], stride, padding, bias is not None), compute


def _wins(
    _x: torch.Tensor, weight: torch.Tensor, _bias: torch.Tensor | None, stride: int, _: Pair, compute: torch.dtype
) -> str:
    return spec.wins(dtype=storage.name(compute), kernel=weight.shape[-1], stride=stride, channels=weight.shape[0])


def _also(x: torch.Tensor, weight: torch.Tensor) -> str:
    if x.requires_grad and torch.is_grad_enabled():
        return "the input needs a gradient"
    if not any(t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight)):
        return "neither input nor weight is channels_last"
    return ""


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: Call, *, moments: bool
) -> tuple[Any, ...]:
    return cuda.forward(x, weight, None if bias is None else bias.contiguous(), *call, moments=moments)


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    call: Call,
    wanted: Sequence[bool],
) -> Gradients:
    """dweight and dbias from the kernels, unless the image's is wanted too, in a compiled graph."""
    sizes, compute = call
    if wanted[0]:
        numbers = sizes.stride, sizes.padding, compute
        return CONVOLUTION.pytorch_backward(dy, x, weight, bias, wanted, *numbers)
    return None, *cuda.backward_weight(alignment.nhwc(dy.to(compute)), x, weight, bias, sizes)


CONVOLUTION = Convolution(
    name="first_conv2d",
    family="first_conv",
    supports=spec.SUPPORTS,
    numbers="SymInt stride, SymInt[] padding, ScalarType compute",
    biased=True,
    geometry=lambda x, stride, padding, compute: ConvGeometry(stride, padding, compute=compute),
    call=_call,
    wins=_wins,
    label=lambda call: spec.name(call[0].kernel, call[0].stride, call[0].channels),
    forward=_forward,
    gradients=_gradients,
    also=_also,
    nhwc=False,
    weight_format=torch.preserve_format,
)
unsupported = CONVOLUTION.unsupported


def first_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: Pair = (0, 0),
) -> torch.Tensor:
    """`conv2d` of three channels.

    Args:
        x: [N, 3, H, W]; the kernels take fp16, bf16 and, under autocast, fp32 on CUDA, of any strides where the weight is
            channels_last, without a gradient; everything else runs PyTorch's own. Under autocast it is rounded as for a
            convolution.
        weight: [C, 3, k, k]; bias: [C] or None; in x's dtype or, as under autocast, in fp32: read as they are.

    Returns:
        A new tensor [N, C, OH, OW] in x's dtype (autocast's, if that is on); channels_last where the kernels ran.
    """
    return CONVOLUTION(x, weight, bias, stride, padding, computed_in(x))


def first_conv2d_moments(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int = 1,
    padding: Pair = (0, 0),
) -> Made:
    """As `first_conv2d`, and the result's moments for a batch norm, as Convolution's `with_moments`."""
    return CONVOLUTION.with_moments(x, weight, bias, stride, padding, computed_in(x))
