"""Padding with an image's own values: the bundled kernels, or PyTorch's own operations.

Two entries over the same kernels: a plain function for eager code (thin: an autograd.Function) and an operation in
torch.library (fake kernel, autograd) for graphs that Inductor compiles.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from advisor.ops import alignment, differentiable, dispatch, nvrtc, storage
from advisor.ops.function import Function
from advisor.ops.padding import cuda, reference, spec
from advisor.ops.padding.spec import Amounts

engaged, fell_back = dispatch.counters("padding")


def unsupported(x: torch.Tensor, amounts: Amounts, mode: str) -> str:
    """Why the kernels cannot take this call; empty when they can."""
    reason = nvrtc.on_device(x)
    return reason or _unsupported(tuple(x.shape), amounts, mode, alignment.is_nhwc(x), x.dtype, x.device.index or 0)


@lru_cache(maxsize=4096)
def _unsupported(
    shape: tuple[int, ...], amounts: Amounts, mode: str, channels_last: bool, dtype: torch.dtype, device: int
) -> str:
    return spec.unsupported(
        shape=shape,
        amounts=amounts,
        mode=mode,
        channels_last=channels_last,
        dtype=storage.name(dtype),
        arch=nvrtc.arch(device),
    )


class _Pad(Function):
    replays = True

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, amounts: Amounts, mode: str) -> torch.Tensor:
        ctx.shape, ctx.amounts, ctx.mode = tuple(x.shape), amounts, mode
        return cuda.forward(x, amounts, mode)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        if differentiable.wanted(dy):
            like = torch.zeros((), dtype=dy.dtype, device=dy.device).expand(
                ctx.shape
            )  # only its shape is read; dy may be a batch
            return differentiable.gradient(lambda x: reference.pad(x, ctx.amounts, ctx.mode), dy, like), None, None
        return cuda.backward(alignment.nhwc(dy), ctx.shape, ctx.amounts, ctx.mode), None, None


def pad2d(x: torch.Tensor, amounts: Amounts, mode: str) -> torch.Tensor:
    """x padded with its own values.

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's operation.
        amounts: (left, right, top, bottom), in pixels.
        mode: one of `spec.MODES`.

    Returns:
        [N, C, H + top + bottom, W + left + right], channels_last from the kernels.
    """
    reason = dispatch.refusal(unsupported(x, amounts, mode), spec.wins(mode, storage.name(x.dtype)))
    if reason:
        fell_back[reason] += 1
        return reference.pad(x, amounts, mode)
    engaged[mode] += 1
    result: torch.Tensor = _Pad.apply(x, amounts, mode)
    return result


def _four(amounts: list[int]) -> Amounts:
    """From the list that torch.library passes."""
    return amounts[0], amounts[1], amounts[2], amounts[3]


@torch.library.custom_op("advisor::pad2d", mutates_args=())
def pad2d_op(x: torch.Tensor, amounts: list[int], mode: str) -> torch.Tensor:
    """As `pad2d`, for compiled graphs. CUDA only."""
    engaged[mode] += 1
    return cuda.forward(alignment.nhwc(x), _four(amounts), mode)


@pad2d_op.register_fake
def _(x: torch.Tensor, amounts: list[int], mode: str) -> torch.Tensor:
    n, c, h, w = x.shape
    return alignment.empty_nhwc(cuda.padded((n, c, h, w), _four(amounts)), x)


@torch.library.custom_op("advisor::pad2d_backward", mutates_args=())
def pad2d_backward_op(dy: torch.Tensor, shape: list[int], amounts: list[int], mode: str) -> torch.Tensor:
    """The gradient of `advisor::pad2d`."""
    n, c, h, w = shape
    return cuda.backward(alignment.nhwc(dy), (n, c, h, w), _four(amounts), mode)


@pad2d_backward_op.register_fake
def _(dy: torch.Tensor, shape: list[int], amounts: list[int], mode: str) -> torch.Tensor:
    n, c, h, w = shape
    return alignment.empty_nhwc((n, c, h, w), dy)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, ctx.amounts, ctx.mode = inputs
    ctx.shape = list(x.shape)


def _op_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    return pad2d_backward_op(dy, ctx.shape, ctx.amounts, ctx.mode), None, None


pad2d_op.register_autograd(_op_backward, setup_context=_setup)
