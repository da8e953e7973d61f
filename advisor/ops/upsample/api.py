"""Upsampling (bilinear, nearest), and the concatenation that follows it in place: the bundled kernels, or PyTorch's own.

Two entries over the same kernels: a plain function for eager code (thin: an autograd.Function) and an operation in
torch.library (fake kernel, autograd) for graphs that Inductor compiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import alignment, differentiable, dispatch, nvrtc, storage
from advisor.ops.function import Function
from advisor.ops.pooling.spec import Pair
from advisor.ops.upsample import cuda, spec
from advisor.ops.upsample.cuda import Resize

engaged, fell_back = dispatch.counters("upsample")


@lru_cache(maxsize=4096)
def _resize(size: Pair, factors: tuple[float, float] | None, mode: str, align_corners: bool) -> Resize:
    return Resize(size=size, factors=factors, mode=mode, align_corners=align_corners)


def unsupported(tensors: Sequence[torch.Tensor], position: int, resize: Resize) -> str:
    """Why the kernels cannot take these tensors; empty when they can."""
    x = tensors[position]
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    if any(t.dtype != x.dtype or t.device != x.device for t in tensors):
        return "concatenated tensors differ in dtype or device"
    return _unsupported(
        tuple(tuple(t.shape) for t in tensors),
        position,
        resize,
        all(map(alignment.is_nhwc, tensors)),
        x.dtype,
        x.device.index or 0,
    )


@lru_cache(maxsize=4096)
def _unsupported(
    shapes: tuple[tuple[int, ...], ...],
    position: int,
    resize: Resize,
    channels_last: bool,
    dtype: torch.dtype,
    device: int,
) -> str:
    return spec.unsupported(
        shape=shapes[position],
        others=shapes[:position] + shapes[position + 1 :],
        size=resize.size,
        factors=resize.factors,
        mode=resize.mode,
        align_corners=resize.align_corners,
        channels_last=channels_last,
        dtype=storage.name(dtype),
        arch=nvrtc.arch(device),
    )


def _label(resize: Resize, count: int) -> str:
    return resize.mode + ("+cat" if count > 1 else "")


def _plain(tensors: Sequence[torch.Tensor], position: int, resize: Resize) -> torch.Tensor:
    """PyTorch's own operations; in the dtype of the tensors under autocast too."""
    x = tensors[position]
    y = F.interpolate(
        x,
        None if resize.factors else resize.size,
        resize.factors,
        resize.mode,
        resize.align_corners if resize.mode == "bilinear" else None,
    ).to(x.dtype)
    return y if len(tensors) == 1 else torch.cat([y if i == position else t for i, t in enumerate(tensors)], 1)


def _differentiable_backward(dy: torch.Tensor, shape: tuple[int, ...], resize: Resize) -> torch.Tensor:
    """The gradient by PyTorch's own operation, which can be differentiated again."""
    factors = resize.factors or (None, None)
    if resize.mode == "bilinear":
        dx = torch.ops.aten.upsample_bilinear2d_backward(dy, resize.size, shape, resize.align_corners, *factors)
    elif resize.mode == "nearest":
        dx = torch.ops.aten.upsample_nearest2d_backward(dy, resize.size, shape, *factors)
    else:
        dx = torch.ops.aten._upsample_nearest_exact2d_backward(dy, resize.size, shape, *factors)
    result: torch.Tensor = dx
    return result


class _UpsampleConcat(Function):
    replays = True

    @staticmethod
    def forward(ctx: Any, position: int, resize: Resize, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.position, ctx.resize, ctx.shapes = position, resize, [tuple(t.shape) for t in tensors]
        return cuda.forward(tensors, position, resize)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        twice = differentiable.wanted(dy)
        if not twice:
            dy = alignment.nhwc(dy)
        given: list[torch.Tensor | None] = []
        first = 0
        for number, shape in enumerate(ctx.shapes):
            if not ctx.needs_input_grad[2 + number]:
                given.append(None)
            elif number != ctx.position:
                given.append(dy.narrow(1, first, shape[1]))
            elif twice:
                given.append(_differentiable_backward(dy.narrow(1, first, shape[1]), shape, ctx.resize))
            else:
                given.append(cuda.backward(dy, first, shape, ctx.resize))
            first += shape[1]
        return None, None, *given


def upsample_concat(
    tensors: Sequence[torch.Tensor],
    position: int,
    size: Pair,
    factors: tuple[float, float] | None,
    mode: str,
    align_corners: bool = False,
) -> torch.Tensor:
    """`tensors` concatenated along C, the one at `position` upsampled to `size` first; with one tensor, upsampling alone.

    Args:
        tensors: [N, C, H, W] each and of one dtype; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else
            runs PyTorch's operations.
        factors: the scale factors that the caller gave instead of a size, which decide rounding; else None.
        mode: one of `spec.MODES`.

    Returns:
        [N, sum of C, *size] in the dtype of `tensors`, under autocast too.
    """
    resize = _resize(size, factors, mode, align_corners)
    wins = spec.wins(
        mode, align_corners=align_corners, concatenates=len(tensors) > 1, dtype=storage.name(tensors[0].dtype)
    )
    reason = dispatch.refusal(unsupported(tensors, position, resize), wins)
    if reason:
        fell_back[reason] += 1
        return _plain(tensors, position, resize)
    engaged[_label(resize, len(tensors))] += 1
    result: torch.Tensor = _UpsampleConcat.apply(position, resize, *tensors)
    return result


def _listed(size: list[int], factors: list[float] | None, mode: str, align_corners: bool) -> Resize:
    """From the lists that torch.library passes."""
    return _resize((size[0], size[1]), (factors[0], factors[1]) if factors else None, mode, align_corners)


@torch.library.custom_op("advisor::upsample_concat", mutates_args=())
def upsample_concat_op(
    tensors: list[torch.Tensor],
    position: int,
    size: list[int],
    factors: list[float] | None,
    mode: str,
    align_corners: bool,
) -> torch.Tensor:
    """As `upsample_concat`, for compiled graphs. CUDA only."""
    resize = _listed(size, factors, mode, align_corners)
    engaged[_label(resize, len(tensors))] += 1
    return cuda.forward([alignment.nhwc(t) for t in tensors], position, resize)


@upsample_concat_op.register_fake
def _(
    tensors: list[torch.Tensor],
    position: int,
    size: list[int],
    factors: list[float] | None,
    mode: str,
    align_corners: bool,
) -> torch.Tensor:
    x = tensors[position]
    return alignment.empty_nhwc((x.shape[0], sum(t.shape[1] for t in tensors), size[0], size[1]), x)


@torch.library.custom_op("advisor::upsample_backward", mutates_args=())
def upsample_backward_op(
    dy: torch.Tensor,
    first: int,
    shape: list[int],
    size: list[int],
    factors: list[float] | None,
    mode: str,
    align_corners: bool,
) -> torch.Tensor:
    """The gradient of the upsampled tensor, from its channels of the concatenation's."""
    n, c, h, w = shape
    return cuda.backward(alignment.nhwc(dy), first, (n, c, h, w), _listed(size, factors, mode, align_corners))


@upsample_backward_op.register_fake
def _(
    dy: torch.Tensor,
    first: int,
    shape: list[int],
    size: list[int],
    factors: list[float] | None,
    mode: str,
    align_corners: bool,
) -> torch.Tensor:
    n, c, h, w = shape
    return alignment.empty_nhwc((n, c, h, w), dy)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    tensors, ctx.position, *ctx.resize = inputs
    ctx.shapes = [list(t.shape) for t in tensors]


def _op_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    given = []
    first = 0
    for number, shape in enumerate(ctx.shapes):
        if number == ctx.position:
            given.append(upsample_backward_op(dy, first, shape, *ctx.resize))
        else:
            given.append(dy.narrow(1, first, shape[1]))
        first += shape[1]
    return given, None, None, None, None, None


upsample_concat_op.register_autograd(_op_backward, setup_context=_setup)
