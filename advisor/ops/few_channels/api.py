"""Convolutions of a few input channels in half precision, computed with eight, or PyTorch's own. For eager code.

cuDNN has no kernels for tensor cores that read two or three channels of an NHWC tensor; in three dimensions it takes single-precision
pipes. The input is cast and laid out with eight channels in one pass, the weight is padded with zeros, which its gradient leaves out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F

from advisor.ops import dispatch, nvrtc, storage
from advisor.ops.convolution import computed_in
from advisor.ops.few_channels import cuda, reference, spec

engaged, fell_back = dispatch.counters("few_channels")
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def _refusal(x: torch.Tensor, compute: torch.dtype) -> str:
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    if x.requires_grad and torch.is_grad_enabled():
        return "the input needs a gradient"
    dense = x.is_contiguous() or (x.dim() in _FORMATS and x.is_contiguous(memory_format=_FORMATS[x.dim()]))
    unsupported = spec.unsupported(
        shape=tuple(x.shape),
        dense=dense,
        dtype=storage.name(x.dtype),
        compute=storage.name(compute),
        groups=1,
        arch=nvrtc.arch(x.device.index or 0),
    )
    return dispatch.refusal(
        unsupported, spec.wins(dims=x.dim() - 2, channels=x.shape[1], compute=storage.name(compute))
    )


def few_channels_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """The convolution of x [N, C, ...] in two or three dimensions, in one group, as F.conv2d or F.conv3d; C below eight.

    Args:
        x: without a gradient; NCHW or NHWC.
        weight: [O, C, ...]; bias: [O] or None.

    Returns:
        [N, O, ...] in autocast's dtype, or x's.
    """
    compute = computed_in(x)
    reason = _refusal(x, compute)
    if reason:
        fell_back[reason] += 1
        return reference.convolution(x, weight, bias, stride, padding, dilation, compute)
    engaged[f"{x.shape[1]} of {spec.CHANNELS} channels"] += 1
    missing = [0, 0] * (x.dim() - 2) + [0, spec.CHANNELS - x.shape[1]]
    wide = F.pad(weight.to(compute), missing).contiguous(memory_format=_FORMATS[x.dim()])
    return reference.convolution(cuda.pad_channels(x, compute), wide, bias, stride, padding, dilation, compute)
