"""1 x 1 convolutions beside batch norms: the bundled kernels, or PyTorch's own convolution.

Before a norm (`pointwise_conv2d`) the forward is the kernel's and leaves the moments of its result; both gradients are PyTorch's own
(cuDNN's), with the same calls as those of its convolution. Behind a norm (`batchnorm_act_pointwise`, the two as one operation) the
gradient with regard to the norm's result is the kernel's, which leaves the sums that the norm's own gradient needs. For eager code
alone: what the kernels win is the norm's pass over a tensor, and Inductor's graphs take neither moments nor sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import alignment, differentiable, dispatch, nvrtc, storage
from advisor.ops.batchnorm_act import api as batchnorm_act
from advisor.ops.batchnorm_act import cuda as batchnorm_cuda
from advisor.ops.batchnorm_act.norm import Norm
from advisor.ops.convolution import ConvGeometry, Convolution, Gradients, Made, cast, computed_in, dense_gradients
from advisor.ops.function import Function
from advisor.ops.pointwise import cuda, spec

engaged, fell_back = dispatch.counters("pointwise")


def _wins(x: torch.Tensor, weight: torch.Tensor, _bias: None) -> str:
    n, c, h, w = x.shape
    return spec.wins(dtype=storage.name(x.dtype), rows=n * h * w, in_channels=c, out_channels=weight.shape[0])


def _forward(x: torch.Tensor, weight: torch.Tensor, _bias: None, _call: object, *, moments: bool) -> tuple[Any, ...]:
    read = weight.to(x.dtype)
    return *cuda.forward(x, alignment.aligned(read), moments=moments), read


def _gradients(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    _bias: None,
    _call: object,
    wanted: Sequence[bool],
    read: torch.Tensor,
) -> Gradients:
    dx, dweight = dense_gradients(dy, x, read, wanted)
    return dx, None if dweight is None else dweight.to(weight.dtype), None


CONVOLUTION = Convolution(
    name="pointwise_conv2d",
    family="pointwise",
    supports=spec.SUPPORTS,
    geometry=lambda x: ConvGeometry(),
    call=lambda x, weight, bias: (x.shape[1], weight.shape[0]),
    wins=_wins,
    label=lambda call: spec.name(*call),
    forward=_forward,
    gradients=_gradients,
    compiles=False,
)


def pointwise_conv2d(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Every pixel's channels times the weights (`conv2d` with 1 x 1 taps, stride 1, no bias).

    Args:
        x: [N, CI, H, W]; the kernel takes channels_last fp16 or bf16 on CUDA, everything else runs PyTorch's own. Under
            autocast it is cast as for a convolution.
        weight: [CO, CI, 1, 1], cast to x's dtype where it has another, as autocast does.

    Returns:
        A new tensor [N, CO, H, W] in x's dtype (autocast's, if that is on).
    """
    return CONVOLUTION(cast(x), weight, None)


def pointwise_conv2d_moments(x: torch.Tensor, weight: torch.Tensor) -> Made:
    """As `pointwise_conv2d`, and the result's moments for a batch norm, as Convolution's `with_moments`."""
    return CONVOLUTION.with_moments(cast(x), weight, None)


class _BatchNormActPointwise(Function):
    replays = releases = True

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        conv_weight: torch.Tensor,
        moments: torch.Tensor | None,
        leaving: bool,
        *norm_fields: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        ctx.set_materialize_grads(False)
        given = Norm(*norm_fields)
        ctx.affine = given.weight is not None, given.bias is not None
        norm, residual_there = given.filled(x), residual is not None
        read = alignment.aligned(conv_weight.to(x.dtype))
        if _one_pass(x, residual, read, norm.activation):
            lined = norm.aligned()
            saved = batchnorm_cuda.statistics(x, lined, residual_there, moments)
            of = (saved, *lined.affine), read, norm.activation, norm.slope
            y, mask, z, parts = cuda.norm_forward(x, residual, *of, moments=leaving)
        else:
            y, saved, mask = batchnorm_cuda.forward(x, residual, norm, moments=moments)
            z, parts = _convolved(y, read, moments=leaving)
        if parts is not None:
            ctx.mark_non_differentiable(parts)
        Function.keep(ctx, x, *norm.affine, saved, mask, y, conv_weight, read)
        ctx.residual, ctx.rest = residual_there, norm[4:]
        return y, z, parts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        dy, dz, _ = gradients
        given = dz if dy is None else dy
        if given is None:  # nobody used the results
            return (None,) * (5 + len(Norm._fields))
        x, weight, bias, saved, mask, y, conv_weight, read = Function.kept(ctx)
        norm = Norm(None, None, weight, bias, *ctx.rest)
        twice = differentiable.wanted(given)
        if twice:
            read = conv_weight.to(x.dtype)  # of which autograd knows
        through = dconv = None
        if dz is not None:
            if not twice:
                dz = alignment.nhwc(dz)
            wanted = twice, ctx.needs_input_grad[2]
            through, dconv = dense_gradients(dz, y, read, wanted)
            dconv = None if dconv is None else dconv.to(conv_weight.dtype)
        if not twice:
            # The norm's backward needs no y: PyTorch's own pair frees it here, too, before dx is made.
            ctx.maybe_clear_saved_tensors()
            del y
        if twice:
            above = given if through is None else through if dy is None else dy + through
            found = batchnorm_act.differentiable_backward(above, x, norm, mask, ctx.residual)
        elif dz is None:
            found = batchnorm_cuda.backward(alignment.nhwc(given), None, x, saved, mask, norm, ctx.residual)
        else:
            dy = None if dy is None else alignment.nhwc(dy)
            of = (saved, *norm.aligned().affine), norm.activation, norm.slope, ctx.residual
            g, sums = cuda.norm_gradient(dz, read, dy, x, mask, *of)
            dx, dweight, dbias = batchnorm_cuda.backward_of_sums(g, sums, x, saved, weight, bias)
            found = dx, g, dweight, dbias
        dx, dresidual, dweight, dbias = found
        has_weight, has_bias = ctx.affine
        affine = dweight if has_weight else None, dbias if has_bias else None
        return dx, dresidual if ctx.residual else None, dconv, None, None, None, None, *affine, *[None] * 4


def _one_pass(x: torch.Tensor, residual: torch.Tensor | None, conv_weight: torch.Tensor, activation: str) -> bool:
    """Whether the norm's second pass makes the convolution's result too."""
    dtype, channels, out_channels = storage.name(x.dtype), x.shape[1], conv_weight.shape[0]
    arch = nvrtc.arch(x.device.index or 0)
    reason = spec.unsupported_norm_forward(dtype=dtype, channels=channels, out_channels=out_channels, arch=arch)
    wins = spec.norm_forward_wins(
        activation=activation, residual=residual is not None, dtype=dtype, channels=channels, out_channels=out_channels
    )
    return not dispatch.refusal(reason, wins)


def _convolved(
    y: torch.Tensor, conv_weight: torch.Tensor, *, moments: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The convolution and, if asked for and the kernel is what makes it, its moments; without gradients."""
    reason = CONVOLUTION.refusal(y, conv_weight, None) if moments else "its moments are not asked for"
    if reason:
        return F.conv2d(y, conv_weight), None
    engaged[spec.name(y.shape[1], conv_weight.shape[0])] += 1
    return cuda.forward(y, conv_weight, moments=True)


def _behind_norm_refusal(
    x: torch.Tensor, residual: torch.Tensor | None, conv_weight: torch.Tensor, activation: str
) -> str:
    reason = batchnorm_act.unsupported(x, residual, activation)
    if reason:
        return reason
    if computed_in(x) != x.dtype or conv_weight.device != x.device:
        return "the convolution is not computed in the norm's dtype, on its device"
    n, c, h, w = x.shape
    dtype, out_channels = storage.name(x.dtype), conv_weight.shape[0]
    reason = spec.unsupported_gradient(rows=n * h * w, dtype=dtype, channels=c, out_channels=out_channels)
    wins = spec.gradient_wins(
        activation=activation,
        residual=residual is not None,
        forked=None,
        dtype=dtype,
        rows=n * h * w,
        channels=c,
        out_channels=out_channels,
    )
    return dispatch.refusal(reason, wins)


def batchnorm_act_pointwise(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    *norm: Any,
    conv_weight: torch.Tensor,
    moments: torch.Tensor | None = None,
    leaving: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A batch norm with what `batchnorm_act` does behind it, and a 1 x 1 convolution of its result, as one operation.

    The convolution's data gradient is added to the gradient that the result has from elsewhere, goes through the activation, and is
    summed up for the norm's gradient in the kernel that makes it: it is written once, where apart it is written, read and
    written again.

    Args: as of `batchnorm_act`.
        conv_weight: [CO, C, 1, 1], cast to x's dtype where it has another, as autocast does.
        leaving: whether moments of the convolution's result are wanted.

    Returns:
        The norm's result like x, the convolution's [N, CO, H, W], and the latter's moments (ops/moments.py) or None.
    """
    of = Norm(*norm)
    reason = _behind_norm_refusal(x, residual, conv_weight, of.activation)
    if reason:
        fell_back[reason] += 1
        y, again = batchnorm_act.forked_batchnorm_act(x, residual, *of, moments=moments)
        if leaving:
            return again, *pointwise_conv2d_moments(y, conv_weight)
        z, parts = pointwise_conv2d(y, conv_weight), None
        return again, z, parts
    engaged[spec.behind_norm(of.activation, residual is not None, x.shape[1], conv_weight.shape[0])] += 1
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
    found = _BatchNormActPointwise.apply(x, residual, conv_weight, moments, leaving, *of)
    return found
