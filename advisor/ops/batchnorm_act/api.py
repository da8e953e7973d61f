"""BatchNorm in training mode (+ residual add) + activation as one operation: the bundled kernels, or PyTorch's own ops.

Two entries over the same kernels: `batchnorm_act`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.batchnorm_act`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
"""

from __future__ import annotations

from typing import Any

import torch

from advisor.ops import dispatch, nvrtc, storage
from advisor.ops.alignment import is_nhwc, nhwc, realigned
from advisor.ops.batchnorm_act import cuda, reference, spec

engaged, fell_back = dispatch.counters("batchnorm_act")


def unsupported(x: torch.Tensor, residual: torch.Tensor | None, activation: str) -> str:
    """Why the kernels cannot take these tensors; empty when they can."""
    reason = nvrtc.on_device(x)
    if reason:
        return reason
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype or not is_nhwc(residual)):
        return "residual differs in shape, dtype or layout"
    return spec.unsupported(
        shape=tuple(x.shape),
        channels_last=is_nhwc(x),
        dtype=storage.name(x.dtype),
        activation=activation,
        residual=residual is not None,
        arch=nvrtc.arch(x.device.index or 0),
    )


class _BatchNormAct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor,
        running_mean: torch.Tensor,
        running_var: torch.Tensor,
        momentum: float,
        eps: float,
        activation: str,
        slope: float,
    ) -> torch.Tensor:
        y, saved, mask = cuda.forward(
            x, residual, running_mean, running_var, weight, bias, momentum, eps, activation, slope
        )
        ctx.save_for_backward(x, weight, bias, saved, mask)
        # Only a second derivative needs the residual again; the bit mask serves the first.
        ctx.residual, ctx.eps, ctx.activation, ctx.slope = residual is not None, eps, activation, slope
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        x, weight, bias, saved, mask = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: a second derivative is wanted
            return _differentiable_backward(ctx, dy, x, weight, bias, mask)
        dx, dresidual, dweight, dbias = cuda.backward(
            nhwc(dy),
            x,
            saved,
            mask,
            weight,
            bias,
            ctx.activation,
            ctx.slope,
            ctx.residual,
        )
        return (dx, dresidual if ctx.residual else None, dweight, dbias, None, None, None, None, None, None)


def _differentiable_backward(
    ctx: Any, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The backward in differentiable torch ops, so that it can be differentiated again. fp32 statistics.

    The activation's slope is taken as constant where the forward kept a bit mask: it is 0 or 1 there.
    """
    wide = x.float()
    mean = wide.mean((0, 2, 3), keepdim=True)
    centred = wide - mean
    invstd = torch.rsqrt(centred.square().mean((0, 2, 3), keepdim=True) + ctx.eps)
    normal = centred * invstd
    scale = weight.view(1, -1, 1, 1)
    if ctx.residual and ctx.activation != "none":
        width = storage.vector_width(storage.name(x.dtype))
        bits = (mask.unsqueeze(-1) >> torch.arange(width, device=x.device)) & 1
        n, c, h, w = x.shape
        g = dy.float() * bits.view(n, h, w, c).permute(0, 3, 1, 2)
    else:
        z = normal * scale + bias.view(1, -1, 1, 1)
        (slope,) = (
            torch.autograd.grad(reference.activate(z, ctx.activation, ctx.slope).sum(), z, create_graph=True)
            if ctx.activation != "none"
            else (torch.ones_like(z),)
        )
        g = dy.float() * slope
    dbias = g.sum((0, 2, 3))
    dweight = (g * normal).sum((0, 2, 3))
    count = x.numel() // x.shape[1]
    dx = scale * invstd * (g - dbias.view(1, -1, 1, 1) / count - normal * dweight.view(1, -1, 1, 1) / count)
    dresidual = g.to(x.dtype) if ctx.residual else None
    return (dx.to(x.dtype), dresidual, dweight, dbias, None, None, None, None, None, None)


def batchnorm_act(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str = "none",
    slope: float = 0.01,
) -> torch.Tensor:
    """act(batch_norm(x) + residual) in training mode; running statistics are updated in place.

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's ops.
        residual: like x, or None. running_mean, running_var, weight, bias: [C] fp32.
        activation: a key of `spec.ACTIVATIONS`; `slope` is LeakyReLU's.

    Returns:
        A new tensor like x.
    """
    x, residual = realigned(x), realigned(residual)
    wins = spec.wins(activation=activation, residual=residual is not None, dtype=storage.name(x.dtype))
    reason = dispatch.refusal(unsupported(x, residual, activation), wins)
    if reason:
        fell_back[reason] += 1
        return reference.batchnorm_act(
            x, residual, running_mean, running_var, weight, bias, momentum, eps, activation, slope
        )
    engaged[activation if residual is None else f"add+{activation}"] += 1
    result: torch.Tensor = _BatchNormAct.apply(  # type: ignore[no-untyped-call]
        x, residual, weight, bias, running_mean, running_var, momentum, eps, activation, slope
    )
    return result


@torch.library.custom_op("advisor::batchnorm_act", mutates_args=())
def batchnorm_act_op(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `batchnorm_act`, for compiled graphs, without side effects. CUDA only.

    Returns y, statistics [4, C] (mean, inverse standard deviation, new running mean, new running variance) and mask. The
    caller copies the running statistics back.
    """
    x = nhwc(x)
    if residual is not None:
        residual = nhwc(residual)
    engaged[activation if residual is None else f"add+{activation}"] += 1
    return cuda.forward(
        x, residual, running_mean, running_var, weight, bias, momentum, eps, activation, slope, in_place=False
    )


@batchnorm_act_op.register_fake
def _(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    masked = residual is not None and activation != "none"
    width = storage.vector_width(storage.name(x.dtype))
    return (
        torch.empty_like(x, memory_format=torch.channels_last),
        x.new_empty((4, x.shape[1]), dtype=torch.float32),
        x.new_empty(x.numel() // width if masked else 0, dtype=torch.uint8),
    )


@torch.library.custom_op("advisor::batchnorm_act_backward", mutates_args=())
def batchnorm_act_backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    saved: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    activation: str,
    slope: float,
    residual: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `advisor::batchnorm_act`: dx, dresidual (empty without one), dweight, dbias."""
    dy = nhwc(dy)
    x = nhwc(x)
    dx, dresidual, dweight, dbias = cuda.backward(dy, x, saved, mask, weight, bias, activation, slope, residual)
    return dx, dresidual, dweight.clone(), dbias.clone()  # an op may not return two views of one tensor


@batchnorm_act_backward_op.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    saved: torch.Tensor,
    mask: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    activation: str,
    slope: float,
    residual: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dx = torch.empty_like(x, memory_format=torch.channels_last)
    return dx, torch.empty_like(dx) if residual else x.new_empty(0), torch.empty_like(weight), torch.empty_like(bias)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    x, residual, _, _, weight, bias, _, _, activation, slope = inputs
    _, saved, mask = output
    ctx.save_for_backward(x, weight, bias, saved, mask)
    ctx.mark_non_differentiable(saved, mask)
    ctx.residual, ctx.activation, ctx.slope = residual is not None, activation, slope


def _op_backward(ctx: Any, dy: torch.Tensor, _saved: Any, _mask: Any) -> tuple[Any, ...]:
    x, weight, bias, saved, mask = ctx.saved_tensors
    dx, dresidual, dweight, dbias = batchnorm_act_backward_op(
        dy, x, saved, mask, weight, bias, ctx.activation, ctx.slope, ctx.residual
    )
    return dx, dresidual if ctx.residual else None, None, None, dweight, dbias, None, None, None, None


batchnorm_act_op.register_autograd(_op_backward, setup_context=_setup)
