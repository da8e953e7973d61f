"""BatchNorm (+ residual add) + activation as one operation: the bundled kernels, or PyTorch's own ops.

Two entries over the same kernels: `batchnorm_act`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.batchnorm_act`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
`frozen_batchnorm_act` normalises by the running statistics; it is for eager code alone, since Inductor fuses that itself.
`forked_batchnorm_act`, for eager code too, gives out its result twice, so that the two gradients are added up in its kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from advisor.ops import differentiable, dispatch, nvrtc, storage
from advisor.ops.alignment import is_nhwc, nhwc, realigned
from advisor.ops.batchnorm_act import cuda, joined, reference, spec
from advisor.ops.function import Function

engaged, fell_back = dispatch.counters("batchnorm_act")


def unsupported(x: torch.Tensor, residual: torch.Tensor | None, activation: str, *, joins: bool = False) -> str:
    """Why the kernels cannot take these tensors; empty when they can. `joins`: rows may be taken for one."""
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
        joins=joins,
    )


def _joined(x: torch.Tensor) -> bool:
    """Whether rows of x are taken for one."""
    return x.shape[1] % 8 != 0 and spec.joined(x.shape[1], storage.name(x.dtype)) > 1


class _BatchNormAct(Function):
    replays = True

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor | None,
        running_var: torch.Tensor | None,
        momentum: float,
        eps: float,
        activation: str,
        slope: float,
        way: str | None,
        forked: bool,
        moments: torch.Tensor | None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        ctx.affine = weight is not None, bias is not None
        weight, bias = affine(x, weight, bias)
        tensors = (x, residual, running_mean, running_var, weight, bias)
        ctx.joined = _joined(x)
        if ctx.joined:
            y, saved, mask = joined.forward(*tensors, momentum, eps, activation, slope)
        else:
            y, saved, mask = cuda.forward(*tensors, momentum, eps, activation, slope, way=way, moments=moments)
        Function.keep(ctx, x, weight, bias, saved, mask)
        # Only a second derivative needs the residual again; the bit mask serves the first.
        ctx.residual, ctx.eps, ctx.activation, ctx.slope = residual is not None, eps, activation, slope
        ctx.way = way
        # A second tensor over the same memory. To autograd no view of the first, but with its version: a change in place of
        # either is seen by whoever has saved the other.
        return (y, y.detach()) if forked else y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        given = [dy for dy in gradients if dy is not None]
        if not given:  # nobody used the result
            return (None,) * 13
        x, weight, bias, saved, mask = Function.kept(ctx)
        twice = differentiable.wanted(given[0])
        # To make a slice, as a concatenation's gradient has it, dense for the kernels would cost what the sum does.
        if len(given) == 2 and (twice or not all(map(is_nhwc, given))):
            given = [given[0] + given[1]]
        if twice:
            dx, dresidual, dweight, dbias = differentiable_backward(ctx, given[0], x, weight, bias, mask)
        elif ctx.joined:
            above = nhwc(given[0])
            found = joined.backward(above, x, saved, mask, weight, bias, ctx.activation, ctx.slope, ctx.residual)
            dx, dresidual, dweight, dbias = found
        else:
            dx, dresidual, dweight, dbias = cuda.backward(
                nhwc(given[0]),
                nhwc(given[1]) if len(given) == 2 else None,
                x,
                saved,
                mask,
                weight,
                bias,
                ctx.activation,
                ctx.slope,
                ctx.residual,
                way=ctx.way,
            )
        has_weight, has_bias = ctx.affine
        return (
            dx,
            dresidual if ctx.residual else None,
            dweight if has_weight else None,
            dbias if has_bias else None,
            *[None] * 9,
        )


def affine(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weight and bias as the kernels read them, 1 and 0 where the norm has none."""
    channels = x.shape[1]
    if weight is None:
        weight = torch.ones(channels, dtype=torch.float32, device=x.device)
    if bias is None:
        bias = torch.zeros(channels, dtype=torch.float32, device=x.device)
    return weight, bias


def _kept(mask: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """dy [N, C, H, W] in fp32 where the forward's bits are set, else zero."""
    return dy.float().where(differentiable.bits(mask, dy), 0.0)


def _through(dy: torch.Tensor, z: torch.Tensor, activation: str, slope: float) -> torch.Tensor:
    """The gradient at z in fp32, where dy is the activation's, differentiable itself."""
    if activation == "none":
        return dy.float()
    return differentiable.gradient(lambda z: reference.activate(z, activation, slope), dy.float(), z)


def differentiable_backward(
    ctx: Any, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """The backward in differentiable torch ops, so that it can be differentiated again. fp32 statistics.

    `ctx` has the norm's eps, activation and slope, and whether there is a residual.

    The activation's slope is taken as constant where the forward kept a bit mask: it is 0 or 1 there.
    """
    wide = x.float()
    mean = wide.mean((0, 2, 3), keepdim=True)
    centred = wide - mean
    invstd = torch.rsqrt(centred.square().mean((0, 2, 3), keepdim=True) + ctx.eps)
    normal = centred * invstd
    scale = weight.view(1, -1, 1, 1)
    if mask is not None:
        g = _kept(mask, dy)
    else:
        g = _through(dy, normal * scale + bias.view(1, -1, 1, 1), ctx.activation, ctx.slope)
    dbias = g.sum((0, 2, 3))
    dweight = (g * normal).sum((0, 2, 3))
    count = x.numel() // x.shape[1]
    dx = scale * invstd * (g - dbias.view(1, -1, 1, 1) / count - normal * dweight.view(1, -1, 1, 1) / count)
    dresidual = g.to(x.dtype) if ctx.residual else None
    return dx.to(x.dtype), dresidual, dweight, dbias


def batchnorm_act(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
    activation: str = "none",
    slope: float = 0.01,
    *,
    way: str | None = None,
    moments: torch.Tensor | None = None,
) -> torch.Tensor:
    """act(batch_norm(x) + residual) in training mode; running statistics are updated in place.

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's ops.
        residual: like x, or None. running_mean, running_var, weight, bias: [C] fp32; None where the norm has none.
        activation: a key of `spec.ACTIVATIONS`; `slope` is LeakyReLU's.
        way: one of spec.WAYS, how each pass is launched where that can be; None for the one that is measured to be fastest.
        moments: of x, as the kernel that made it left them (ops/moments.py), in place of a pass over x; None for that pass.

    Where channels are no multiple of a vector's values, some rows are taken for one, and `way` and `moments` mean nothing.

    Returns:
        A new tensor like x.
    """
    x, residual = realigned(x), realigned(residual)
    wins = spec.wins(
        activation=activation,
        residual=residual is not None,
        dtype=storage.name(x.dtype),
        variant=_variant(x, running_mean, weight, bias),
    )
    reason = dispatch.refusal(unsupported(x, residual, activation, joins=True), wins)
    if reason:
        fell_back[reason] += 1
        return reference.batchnorm_act(
            x, residual, running_mean, running_var, weight, bias, momentum, eps, activation, slope
        )
    engaged[activation if residual is None else f"add+{activation}"] += 1
    common = (x, residual, weight, bias, running_mean, running_var, momentum, eps, activation, slope, way)
    result: torch.Tensor = _BatchNormAct.apply(*common, False, moments)
    return result


def forked_batchnorm_act(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
    activation: str = "none",
    slope: float = 0.01,
    *,
    way: str | None = None,
    moments: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `batchnorm_act`, for a result that is used twice: two tensors over one memory, each to be used in one place.

    The backward takes a gradient for each and adds them up in its kernels, in fp32; autograd's own sum, a launch that reads both
    and writes a third, falls away. Where the kernels do not run, or only one of the two gets a gradient, it is as with one.
    """
    x, residual = realigned(x), realigned(residual)
    wins = spec.wins(
        activation=activation, residual=residual is not None, dtype=storage.name(x.dtype), variant=spec.FORKED
    )
    if dispatch.refusal(unsupported(x, residual, activation), wins):
        y = batchnorm_act(
            x,
            residual,
            running_mean,
            running_var,
            weight,
            bias,
            momentum,
            eps,
            activation,
            slope,
            way=way,
            moments=moments,
        )
        return y, y
    engaged[f"{activation if residual is None else f'add+{activation}'} {spec.FORKED}"] += 1
    common = (x, residual, weight, bias, running_mean, running_var, momentum, eps, activation, slope, way)
    both: tuple[torch.Tensor, torch.Tensor]
    both = _BatchNormAct.apply(*common, True, moments)
    return both


def _variant(x: torch.Tensor, running_mean: object, weight: object, bias: object) -> str:
    if x.dim() == 4 and _joined(x):
        return spec.JOINED
    if running_mean is None:
        return spec.NO_STATISTICS
    return spec.NO_AFFINE if weight is None or bias is None else ""


class _FrozenBatchNormAct(Function):
    replays = True

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        running_mean: torch.Tensor,
        running_var: torch.Tensor,
        eps: float,
        activation: str,
        slope: float,
    ) -> torch.Tensor:
        ctx.affine_gradients = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        weight, bias = affine(x, weight, bias)
        ctx.variant = eps, activation, slope, residual is not None, ctx.affine_gradients
        y, mask = cuda.frozen_forward(
            x, residual, running_mean, running_var, weight, bias, eps, activation, slope, ctx.affine_gradients
        )
        keeps_input = spec.frozen_keeps_input(activation, residual is not None, ctx.affine_gradients)
        Function.keep(ctx, x if keeps_input else None, mask, running_mean, running_var, weight, bias)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        if differentiable.wanted(dy):
            found = _frozen_differentiable_backward(dy, *Function.kept(ctx), *ctx.variant)
        else:
            found = cuda.frozen_backward(nhwc(dy), *Function.kept(ctx), *ctx.variant)
        wanted = ctx.needs_input_grad[:4]
        return (*(t if want else None for t, want in zip(found, wanted, strict=True)), *[None] * 5)


def _frozen_differentiable_backward(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    mask: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    activation: str,
    slope: float,
    residual: bool,
    affine_gradients: bool,
) -> tuple[torch.Tensor | None, ...]:
    """As `_differentiable_backward`, by running statistics."""
    invstd = torch.rsqrt(running_var + eps).view(1, -1, 1, 1)
    scale = weight.view(1, -1, 1, 1)
    normal = None if x is None else (x.float() - running_mean.view(1, -1, 1, 1)) * invstd
    if spec.frozen_masked(activation, residual, affine_gradients):
        g = _kept(mask, dy)
    elif normal is not None:
        g = _through(dy, normal * scale + bias.view(1, -1, 1, 1), activation, slope)
    else:
        g = dy.float()
    dweight = (g * normal).sum((0, 2, 3)) if affine_gradients and normal is not None else None
    dbias = g.sum((0, 2, 3)) if affine_gradients else None
    return (g * scale * invstd).to(dy.dtype), g.to(dy.dtype), dweight, dbias


def frozen_batchnorm_act(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str = "none",
    slope: float = 0.01,
) -> torch.Tensor:
    """act(batch_norm(x) + residual) in evaluation mode, by the running statistics, with gradients.

    Args: as of `batchnorm_act`. Where weight and bias want no gradient and the activation's slope is 0 or 1, x is not kept for
        the backward: a bit an element is.
    """
    x, residual = realigned(x), realigned(residual)
    wins = spec.wins(
        activation=activation, residual=residual is not None, dtype=storage.name(x.dtype), variant=spec.FROZEN
    )
    reason = dispatch.refusal(unsupported(x, residual, activation), wins)
    if reason:
        fell_back[reason] += 1
        return reference.frozen_batchnorm_act(
            x, residual, running_mean, running_var, weight, bias, eps, activation, slope
        )
    engaged[f"frozen {activation}" if residual is None else f"frozen add+{activation}"] += 1
    result: torch.Tensor = _FrozenBatchNormAct.apply(
        x, residual, weight, bias, running_mean, running_var, eps, activation, slope
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
    y, saved, mask = cuda.forward(
        x, residual, running_mean, running_var, weight, bias, momentum, eps, activation, slope, in_place=False
    )
    return y, saved, x.new_empty(0, dtype=torch.uint8) if mask is None else mask


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
    """Gradients of `advisor::batchnorm_act`: dx, dresidual (empty without one, and where it is dy itself), dweight, dbias."""
    dy = nhwc(dy)
    x = nhwc(x)
    dx, dresidual, dweight, dbias = cuda.backward(dy, None, x, saved, mask, weight, bias, activation, slope, residual)
    if dresidual is None or dresidual is dy:
        dresidual = x.new_empty(0)
    return dx, dresidual, dweight, dbias


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
    written = spec.writes_residual_gradient(activation, residual, forked=False)
    return dx, torch.empty_like(dx) if written else x.new_empty(0), torch.empty_like(weight), torch.empty_like(bias)


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
    if not ctx.residual:
        dresidual = None
    elif not spec.writes_residual_gradient(ctx.activation, True, forked=False):
        dresidual = dy
    return dx, dresidual, None, None, dweight, dbias, None, None, None, None


batchnorm_act_op.register_autograd(_op_backward, setup_context=_setup)
