"""Bias (+ residual add) of a convolution: the bundled kernels, or PyTorch's own operations. For eager code; Inductor fuses it itself."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import dispatch, nvrtc, storage
from advisor.ops.alignment import aligned, is_nhwc, nhwc
from advisor.ops.bias_add import cuda, reference, spec
from advisor.ops.operation import Arguments, Gradients, Operation


def _refusal(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None, _in_place: bool) -> str:
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
    """What `spec.TENSORS` and `spec.wins` say: looked up once for all calls alike."""
    unsupported = spec.TENSORS.refusal(
        shape=tuple(shape), channels_last=channels_last, dtype=storage.name(dtype), arch=nvrtc.arch(device)
    )
    return unsupported, spec.wins(residual=residual, dtype=storage.name(dtype))


def _forward(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None, in_place: bool) -> torch.Tensor:
    y = x if in_place else torch.empty_like(x)
    cuda.forward(x, aligned(bias.float()), residual, y)
    return y


def _gradients(dy: torch.Tensor, dbias: torch.Tensor, arguments: Arguments) -> Gradients:
    _, bias, residual, _ = arguments
    return dy, dbias.to(bias.dtype), None if residual is None else dy


_BIAS_ADD = Operation(
    name="bias_add",
    forward=_forward,
    backward=lambda dy, arguments, _saved: _gradients(dy, cuda.backward(nhwc(dy)), arguments),
    reads=lambda *_: (False, False, False),
    twice=lambda dy, arguments, _saved: _gradients(dy, dy.float().sum((0, 2, 3)), arguments),
    pytorch=lambda x, bias, residual, _in_place: reference.bias_add(x, bias, residual),
    refusal=_refusal,
    label=lambda x, bias, residual, in_place: spec.name(residual=residual is not None),
    compiles=False,
)


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
    return _BIAS_ADD(x, bias, residual, in_place)
