"""BatchNorm in training mode, activation and max-pooling as one operation: the bundled kernels, or PyTorch's own ops.

Two entries over the same kernels: `batchnorm_max_pool`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.batchnorm_max_pool`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from advisor.ops import alignment, differentiable, dispatch, nvrtc, storage
from advisor.ops.batchnorm_act.reference import activate
from advisor.ops.batchnorm_max_pool import cuda, reference, spec
from advisor.ops.function import Function
from advisor.ops.pooling.api import flat_indices
from advisor.ops.pooling.spec import Pair, Window, window

engaged, fell_back = dispatch.counters("batchnorm_max_pool")


def unsupported(x: torch.Tensor, activation: str, slope: float, pool: Window) -> str:
    """Why the kernels cannot take this call; empty when they can."""
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    channels_last = alignment.is_nhwc(x)
    return _unsupported(tuple(x.shape), channels_last, x.dtype, activation, slope, pool, x.device.index or 0)


@lru_cache(maxsize=4096)
def _unsupported(
    shape: tuple[int, ...],
    channels_last: bool,
    dtype: torch.dtype,
    activation: str,
    slope: float,
    pool: Window,
    device: int,
) -> str:
    return spec.unsupported(
        shape=shape,
        window=pool,
        channels_last=channels_last,
        dtype=storage.name(dtype),
        activation=activation,
        slope=slope,
        arch=nvrtc.arch(device),
    )


class _BatchNormMaxPool(Function):
    replays = True

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        running_mean: torch.Tensor,
        running_var: torch.Tensor,
        momentum: float,
        eps: float,
        activation: str,
        slope: float,
        pool: Window,
        moments: torch.Tensor | None,
    ) -> torch.Tensor:
        y, saved, index, chosen = cuda.forward(
            x, running_mean, running_var, weight, bias, momentum, eps, activation, slope, pool, moments=moments
        )
        Function.keep(ctx, x, weight, bias, saved, index, chosen)
        ctx.eps, ctx.variant = eps, (activation, slope, pool)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        x, weight, bias, saved, index, chosen = Function.kept(ctx)
        if differentiable.wanted(dy):
            found = _differentiable_backward(ctx, dy, x, weight, bias, index)
        else:
            found = cuda.backward(alignment.nhwc(dy), x, saved, index, chosen, weight, bias, *ctx.variant)
        return (*found, *[None] * 8)


def _differentiable_backward(
    ctx: Any, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, index: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The backward as the gradient of differentiable torch ops, in fp32; which elements were chosen is taken as constant."""
    activation, slope, pool = ctx.variant
    at = flat_indices(index, tuple(x.shape), pool).flatten(2)

    def pooled(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        centred = wide - wide.mean((0, 2, 3), keepdim=True)
        invstd = torch.rsqrt(centred.square().mean((0, 2, 3), keepdim=True) + ctx.eps)
        z = centred * invstd * weight.view(1, -1, 1, 1) + bias.view(1, -1, 1, 1)
        y = activate(z, activation, slope)
        return y.flatten(2).gather(2, at).view(dy.shape)

    return differentiable.gradients(pooled, dy.float(), (x, weight, bias))


def batchnorm_max_pool(
    x: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
    kernel: Pair,
    stride: Pair,
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    ceil_mode: bool = False,
    *,
    moments: torch.Tensor | None = None,
) -> torch.Tensor:
    """max_pool2d(act(batch_norm(x))) in training mode; running statistics are updated in place.

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's ops.
        running_mean, running_var, weight, bias: [C] fp32.
        activation: one of `spec.ACTIVATIONS`; `slope` is LeakyReLU's.
        moments: of x, as the kernel that made it left them (ops/moments.py), in place of a pass over x; None for that pass.

    Returns:
        A new tensor [N, C, OH, OW] like x.
    """
    pool = window(kernel, stride, padding, dilation, ceil_mode)
    x = alignment.realigned(x)
    reason = dispatch.refusal(unsupported(x, activation, slope, pool), spec.wins(activation, storage.name(x.dtype)))
    if reason:
        fell_back[reason] += 1
        return reference.batchnorm_max_pool(
            x, running_mean, running_var, weight, bias, momentum, eps, activation, slope, *pool.arguments
        )
    engaged[activation] += 1
    result: torch.Tensor = _BatchNormMaxPool.apply(
        x, weight, bias, running_mean, running_var, momentum, eps, activation, slope, pool, moments
    )
    return result


def _listed(kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool) -> Window:
    """A window from the lists that torch.library passes."""
    return window(
        (kernel[0], kernel[1]), (stride[0], stride[1]), (padding[0], padding[1]), (dilation[0], dilation[1]), ceil_mode
    )


@torch.library.custom_op("advisor::batchnorm_max_pool", mutates_args=())
def batchnorm_max_pool_op(
    x: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `batchnorm_max_pool`, for compiled graphs, without side effects. CUDA only.

    Returns y, statistics [4, C] (mean, inverse standard deviation, new running mean, new running variance), positions and
    chosen elements. The caller copies the running statistics back.
    """
    engaged[activation] += 1
    pool = _listed(kernel, stride, padding, dilation, ceil_mode)
    return cuda.forward(
        alignment.nhwc(x),
        running_mean,
        running_var,
        weight,
        bias,
        momentum,
        eps,
        activation,
        slope,
        pool,
        in_place=False,
    )


@batchnorm_max_pool_op.register_fake
def _(
    x: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    n, c, h, w = x.shape
    shape = (n, c, *_listed(kernel, stride, padding, dilation, ceil_mode).output(h, w))
    saved = x.new_empty((4, c), dtype=torch.float32)
    return (
        alignment.empty_nhwc(shape, x),
        saved,
        alignment.empty_nhwc(shape, x, torch.uint8),
        alignment.empty_nhwc(shape, x),
    )


@torch.library.custom_op("advisor::batchnorm_max_pool_backward", mutates_args=())
def batchnorm_max_pool_backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    saved: torch.Tensor,
    index: torch.Tensor,
    chosen: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    activation: str,
    slope: float,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `advisor::batchnorm_max_pool`: dx, dweight, dbias."""
    pool = _listed(kernel, stride, padding, dilation, ceil_mode)
    dx, dweight, dbias = cuda.backward(
        alignment.nhwc(dy),
        alignment.nhwc(x),
        saved,
        alignment.nhwc(index),
        alignment.nhwc(chosen),
        weight,
        bias,
        activation,
        slope,
        pool,
    )
    return dx, dweight, dbias


@batchnorm_max_pool_backward_op.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    saved: torch.Tensor,
    index: torch.Tensor,
    chosen: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    activation: str,
    slope: float,
    kernel: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.channels_last),
        torch.empty_like(weight),
        torch.empty_like(bias),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, _, _, weight, bias, _, _, *ctx.variant = inputs
    _, saved, index, chosen = output
    ctx.save_for_backward(x, saved, index, chosen, weight, bias)
    ctx.mark_non_differentiable(saved, index, chosen)


def _op_backward(ctx: Any, dy: torch.Tensor, *_others: Any) -> tuple[Any, ...]:
    dx, dweight, dbias = batchnorm_max_pool_backward_op(dy, *ctx.saved_tensors, *ctx.variant)
    return dx, None, None, dweight, dbias, *[None] * 9


batchnorm_max_pool_op.register_autograd(_op_backward, setup_context=_setup)
