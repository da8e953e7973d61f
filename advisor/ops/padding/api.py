"""Padding with an image's own values: the bundled kernels, or PyTorch's own operations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from advisor.ops import alignment, differentiable, dispatch, nvrtc, storage
from advisor.ops.operation import Arguments, Gradients, Operation, Saved, shape_alone
from advisor.ops.padding import cuda, reference, spec
from advisor.ops.padding.spec import Amounts


def _refusal(x: torch.Tensor, amounts: Amounts, mode: str) -> str:
    """Why PyTorch's own operation runs; empty when the kernels do."""
    reason = nvrtc.on_device(x)
    reason = reason or _unsupported(x.shape, amounts, mode, alignment.is_nhwc(x), x.dtype, x.device.index or 0)
    return dispatch.refusal(reason, spec.wins(mode, storage.name(x.dtype)))


@lru_cache(maxsize=4096)
def _unsupported(
    shape: torch.Size, amounts: Amounts, mode: str, channels_last: bool, dtype: torch.dtype, device: int
) -> str:
    return spec.unsupported(
        shape=tuple(shape),
        amounts=amounts,
        mode=mode,
        channels_last=channels_last,
        dtype=storage.name(dtype),
        arch=nvrtc.arch(device),
    )


def _forward(x: torch.Tensor, amounts: Sequence[int], mode: str) -> torch.Tensor:
    left, right, top, bottom = amounts
    return cuda.forward(x, (left, right, top, bottom), mode)


def _backward(dy: torch.Tensor, arguments: Arguments, _saved: Saved) -> Gradients:
    x, *how = arguments
    return (cuda.backward(alignment.nhwc(dy), x.shape, *how),)


_PAD = Operation(
    name="pad2d",
    family="padding",
    forward=_forward,
    backward=_backward,
    reads=shape_alone,
    twice=lambda dy, arguments, _saved: differentiable.shaped(dy, reference.pad, arguments[0].shape, *arguments[1:]),
    pytorch=reference.pad,
    refusal=_refusal,
    label=lambda x, amounts, mode: mode,
    readable=lambda x, amounts, mode: (alignment.nhwc(x), amounts, mode),
    fake=lambda x, amounts, mode: alignment.empty_nhwc(cuda.padded(x.shape, amounts), x),
)
pad2d_op = _PAD.compiled


def pad2d(x: torch.Tensor, amounts: Amounts, mode: str) -> torch.Tensor:
    """x padded with its own values.

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's operation.
        amounts: (left, right, top, bottom), in pixels.
        mode: one of `spec.MODES`.

    Returns:
        [N, C, H + top + bottom, W + left + right], channels_last from the kernels.
    """
    return _PAD(x, amounts, mode)
