"""Bias (+ residual add) of a convolution: the bundled kernels, or PyTorch's own operations. For eager code; Inductor fuses it itself."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from advisor.ops import differentiable, dispatch, nvrtc, storage
from advisor.ops.alignment import aligned, is_nhwc, nhwc
from advisor.ops.bias_add import cuda, reference, spec
from advisor.ops.function import Function

engaged, fell_back = dispatch.counters("bias_add")


def _refusal(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None) -> str:
    """Why PyTorch's own operations run; empty when the kernels do."""
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    if bias.device != x.device:
        return "not all on one device"
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or not is_nhwc(residual)):
        return "residual differs in shape, dtype or layout"
    return dispatch.refusal(*_standing(x.shape, is_nhwc(x), x.dtype, residual is not None, x.device.index or 0))


@lru_cache(maxsize=4096)
def _standing(
    shape: torch.Size, channels_last: bool, dtype: torch.dtype, residual: bool, device: int
) -> tuple[str, str]:
    """What `spec.unsupported` and `spec.wins` say: looked up once for all calls alike."""
    unsupported = spec.unsupported(
        shape=tuple(shape), channels_last=channels_last, dtype=storage.name(dtype), arch=nvrtc.arch(device)
    )
    return unsupported, spec.wins(residual=residual, dtype=storage.name(dtype))


class _BiasAdd(Function):
    replays = True

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None, in_place: bool
    ) -> torch.Tensor:
        y = x if in_place else torch.empty_like(x)
        cuda.forward(x, aligned(bias.float()), residual, y)
        if y is x:
            ctx.mark_dirty(x)
        ctx.dtype, ctx.residual = bias.dtype, residual is not None
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        dbias = dy.float().sum((0, 2, 3)) if differentiable.wanted(dy) else cuda.backward(nhwc(dy))
        return dy, dbias.to(ctx.dtype), dy if ctx.residual else None, None


def bias_add(
    x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None = None, in_place: bool = False
) -> torch.Tensor:
    """x + bias (+ residual).

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's ops.
        bias: [C]. residual: like x, or None.
        in_place: x's memory may become the result's, as it does in a convolution.

    Returns:
        A tensor like x.
    """
    reason = _refusal(x, bias, residual)
    if reason:
        fell_back[reason] += 1
        return reference.bias_add(x, bias, residual)
    engaged[spec.name(residual=residual is not None)] += 1
    result: torch.Tensor = _BiasAdd.apply(x, bias, residual, in_place)
    return result
