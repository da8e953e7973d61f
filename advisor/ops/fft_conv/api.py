"""Dense convolution with large taps as one operation: by Fourier transforms, or PyTorch's own convolution.

In fp32 alone: transforms in half precision lose more than they save.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from advisor.ops import alignment, dispatch, storage
from advisor.ops.convolution import ConvGeometry, Convolution, Gradients, Pair, cast
from advisor.ops.fft_conv import cuda, spec

engaged, fell_back = dispatch.counters("fft_conv")


def _call(x: torch.Tensor, weight: torch.Tensor, _bias: None, padding: Pair) -> spec.FftConv:
    return spec.call(tuple(x.shape), tuple(weight.shape), padding)


def _forward(
    x: torch.Tensor, weight: torch.Tensor, _bias: None, call: spec.FftConv, *, moments: bool
) -> tuple[Any, ...]:
    return alignment.lying_as(cuda.forward(x.contiguous(), weight.contiguous(), call), x), None


def _gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, _bias: None, call: spec.FftConv, wanted: Sequence[bool]
) -> Gradients:
    """dx, in x's format, and dweight, each where wanted."""
    dy = dy.to(x.dtype).contiguous()
    dx, dweight = cuda.backward(dy, x.contiguous(), weight.contiguous(), call, (wanted[0], wanted[1]))
    return None if dx is None else alignment.lying_as(dx, x), dweight, None


CONVOLUTION = Convolution(
    name="fft_conv2d",
    family="fft_conv",
    supports=spec.SUPPORTS,
    numbers="SymInt[] padding",
    geometry=lambda x, padding: ConvGeometry(padding=padding),
    call=_call,
    wins=lambda x, *others: spec.wins(_call(x, *others), storage.name(x.dtype)),
    label=lambda call: spec.name((call.taps_h, call.taps_w)),
    forward=_forward,
    gradients=_gradients,
    nhwc=False,
    replays=False,
)


def fft_conv2d(x: torch.Tensor, weight: torch.Tensor, padding: Pair = (0, 0)) -> torch.Tensor:
    """`conv2d` with one group, stride 1, not dilated, without bias, and 11 taps or more along either side.

    Args:
        x: [N, I, H, W]; transforms take fp32 on CUDA, fastest contiguous (NCHW); everything else runs PyTorch's own. Under autocast it is
            cast as for a convolution.
        weight: [O, I, R, S].

    Returns:
        A new tensor [N, O, OH, OW] in x's dtype (autocast's, if that is on) and its memory format.
    """
    return CONVOLUTION(cast(x), weight, None, padding)
