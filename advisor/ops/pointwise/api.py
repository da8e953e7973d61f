"""1 x 1 convolution with the moments of its result as one operation: the bundled kernel, or PyTorch's own convolution.

The forward is the kernel's; both gradients are PyTorch's own (cuDNN's), with the same calls as those of its convolution. For
eager code alone: what the kernel wins is the batch norm's pass over the result, and Inductor's graphs take no moments.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import alignment, dispatch, nvrtc, storage
from advisor.ops.first_conv.api import computed_in
from advisor.ops.function import Function
from advisor.ops.pointwise import cuda, spec

engaged, fell_back = dispatch.counters("pointwise")


@lru_cache(maxsize=4096)
def _unsupported(
    shape: tuple[int, ...], dtype: torch.dtype, weight_shape: tuple[int, ...], weight_dtype: torch.dtype, arch: int
) -> str:
    return spec.unsupported(
        shape=shape,
        channels_last=True,
        dtype=storage.name(dtype),
        weight_shape=weight_shape,
        weight_dtype=storage.name(weight_dtype),
        stride=(1, 1),
        padding=(0, 0),
        dilation=(1, 1),
        groups=1,
        arch=arch,
    )


def unsupported(x: torch.Tensor, weight: torch.Tensor) -> str:
    """Why the kernel cannot take these tensors; empty when it can."""
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    arch = nvrtc.arch(x.device.index or 0)
    reason = _unsupported(tuple(x.shape), x.dtype, tuple(weight.shape), weight.dtype, arch)
    if reason:
        return reason
    if weight.device != x.device:
        return "weight and input are on different devices"
    return "" if alignment.is_nhwc(x) else "input is not channels_last and aligned"


def _refusal(x: torch.Tensor, weight: torch.Tensor) -> str:
    reason = unsupported(x, weight)
    if reason:
        return reason
    n, c, h, w = x.shape
    wins = spec.wins(dtype=storage.name(x.dtype), rows=n * h * w, in_channels=c, out_channels=weight.shape[0])
    return dispatch.refusal("", wins)


class _PointwiseConv2d(Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, moments: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        y, parts = cuda.forward(x, alignment.aligned(weight), moments=moments)
        if parts is not None:
            ctx.mark_non_differentiable(parts)
        return y, parts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        dy, _ = gradients
        if dy is None:  # nobody used the result
            return None, None, None
        x, weight = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[:2], False]
        dx, dweight, _ = torch.ops.aten.convolution_backward(
            dy, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, wanted
        )
        return dx, dweight, None


def pointwise_conv2d(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Every pixel's channels times the weights (`conv2d` with 1 x 1 taps, stride 1, no bias).

    Args:
        x: [N, CI, H, W]; the kernel takes channels_last fp16 or bf16 on CUDA, everything else runs PyTorch's own. Under
            autocast it is cast as for a convolution.
        weight: [CO, CI, 1, 1], cast to x's dtype where it has another, as autocast does.

    Returns:
        A new tensor [N, CO, H, W] in x's dtype (autocast's, if that is on).
    """
    return _pointwise_conv2d(x, weight, moments=False)[0]


def pointwise_conv2d_moments(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `pointwise_conv2d`, and the result's moments for a batch norm (ops/moments.py); None where PyTorch's own forward ran."""
    return _pointwise_conv2d(x, weight, moments=True)


def _pointwise_conv2d(
    x: torch.Tensor, weight: torch.Tensor, *, moments: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    compute = computed_in(x)
    x, weight = x.to(compute), weight.to(compute)
    reason = _refusal(x, weight)
    if reason:
        fell_back[reason] += 1
        return F.conv2d(x, weight), None
    engaged[spec.name(x.shape[1], weight.shape[0])] += 1
    found: tuple[torch.Tensor, torch.Tensor | None]
    found = _PointwiseConv2d.apply(x, weight, moments)
    return found
