"""GroupNorm (or InstanceNorm) + activation as one operation in NHWC: the bundled kernels, or PyTorch's own ops.

Two entries over the same kernels: `group_norm`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.group_norm`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from advisor.ops import differentiable, dispatch, nvrtc, storage
from advisor.ops.alignment import aligned, misplaced, nhwc
from advisor.ops.function import Function
from advisor.ops.group_norm import cuda, reference, spec

engaged, fell_back = dispatch.counters("group_norm")


def _refusal(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    activation: str,
    dtype: torch.dtype,
) -> str:
    """Why PyTorch's own operations run; empty when the kernels do."""
    reason = nvrtc.on_device(x) or misplaced(x, weight, bias)
    if reason:
        return reason
    channels_last = x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and x.data_ptr() % 16 == 0
    parameters = tuple(p.dtype for p in (weight, bias) if p is not None)
    return dispatch.refusal(
        *_standing(x.shape, channels_last, groups, x.dtype, dtype, parameters, activation, x.device.index or 0)
    )


@lru_cache(maxsize=4096)
def _standing(
    shape: torch.Size,
    channels_last: bool,
    groups: int,
    dtype: torch.dtype,
    result: torch.dtype,
    parameters: tuple[torch.dtype, ...],
    activation: str,
    device: int,
) -> tuple[str, str]:
    """What `spec.unsupported` and `spec.wins` say: looked up once for all calls alike."""
    types = {"dtype": storage.name(dtype), "result": storage.name(result)}
    given = tuple(storage.name(p) for p in parameters)
    unsupported = spec.unsupported(
        shape=tuple(shape),
        channels_last=channels_last,
        groups=groups,
        parameters=given,
        activation=activation,
        arch=nvrtc.arch(device),
        **types,
    )
    wins = spec.wins(channels=shape[1], groups=groups, activation=activation, **types)
    return unsupported, wins or spec.narrow(given)


def _fp32(parameter: torch.Tensor | None) -> torch.Tensor | None:
    """A parameter as the kernels read it: no copy when it is that already."""
    return None if parameter is None else parameter.float()


@lru_cache(maxsize=256)
def _name(groups: int, channels: int, activation: str, dtype: torch.dtype, result: torch.dtype) -> str:
    return spec.name(groups, channels, activation, storage.name(dtype), storage.name(result))


def _differentiable(
    dy: torch.Tensor,
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor | None, ...]:
    """dx, dweight, dbias through PyTorch's own operations: these can be differentiated again."""
    return differentiable.gradients(
        lambda x, weight, bias: reference.group_norm(x, groups, weight, bias, eps, activation, dy.dtype, slope),
        dy,
        (x, weight, bias),
    )


class _GroupNorm(Function):
    replays = True

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        groups: int,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        activation: str,
        dtype: torch.dtype,
        slope: float,
    ) -> torch.Tensor:
        y, saved = cuda.forward(x, groups, _fp32(weight), _fp32(bias), eps, activation, dtype, slope)
        Function.keep(ctx, x, weight, bias, saved)
        ctx.groups, ctx.eps, ctx.activation, ctx.slope = groups, eps, activation, slope
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        x, weight, bias, saved = Function.kept(ctx)
        if differentiable.wanted(dy):
            dx, dweight, dbias = _differentiable(dy, x, ctx.groups, weight, bias, ctx.eps, ctx.activation, ctx.slope)
            return dx, None, dweight, dbias, None, None, None, None
        dy = nhwc(dy)
        dx, dweight, dbias = cuda.backward(
            dy, x, saved, _fp32(weight), _fp32(bias), ctx.groups, ctx.activation, ctx.slope
        )
        return (
            dx,
            None,
            None if weight is None else dweight.to(weight.dtype),
            None if bias is None else dbias.to(bias.dtype),
            *[None] * 4,
        )


def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str = "none",
    dtype: torch.dtype | None = None,
    slope: float = 0.01,
) -> torch.Tensor:
    """act(group_norm(x)): statistics over the pixels and the channels of a group, per sample, in training as in evaluation.

    Args:
        x: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's ops.
        groups: a divisor of C; as many groups as channels is instance normalisation.
        weight, bias: [C] fp32, fp16 or bf16, or None.
        activation: a key of `spec.ACTIVATIONS`; `slope` is LeakyReLU's.
        dtype: of the result; None: x's own. Under autocast PyTorch's own result is fp32.

    Returns:
        A new tensor of x's shape; channels_last from the kernels.
    """
    result_dtype = dtype or x.dtype
    reason = _refusal(x, groups, weight, bias, activation, result_dtype)
    if reason:
        fell_back[reason] += 1
        return reference.group_norm(x, groups, weight, bias, eps, activation, result_dtype, slope)
    engaged[_name(groups, x.shape[1], activation, x.dtype, result_dtype)] += 1
    result: torch.Tensor = _GroupNorm.apply(x, groups, weight, bias, eps, activation, result_dtype, slope)
    return result


@torch.library.custom_op("advisor::group_norm", mutates_args=())
def group_norm_op(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    dtype: torch.dtype,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `group_norm`, for compiled graphs, where `spec.unsupported` has nothing against it. CUDA only.

    Returns y, channels_last, and saved [N, G, 2] fp32: mean and inverse standard deviation.
    """
    x = nhwc(x)
    weight, bias = aligned(_fp32(weight)), aligned(_fp32(bias))
    engaged[_name(groups, x.shape[1], activation, x.dtype, dtype)] += 1
    return cuda.forward(x, groups, weight, bias, eps, activation, dtype, slope)


@group_norm_op.register_fake
def _(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    activation: str,
    dtype: torch.dtype,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty_like(x, dtype=dtype, memory_format=torch.channels_last),
        x.new_empty((x.shape[0], groups, 2), dtype=torch.float32),
    )


@torch.library.custom_op("advisor::group_norm_backward", mutates_args=())
def group_norm_backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    saved: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `advisor::group_norm`: dx, dweight, dbias (empty where there is no such parameter)."""
    dy = nhwc(dy)
    x = nhwc(x)
    parameters = aligned(_fp32(weight)), aligned(_fp32(bias))
    dx, dweight, dbias = cuda.backward(dy, x, saved, *parameters, groups, activation, slope)
    return (
        dx,
        x.new_empty(0) if weight is None else dweight.to(weight.dtype),
        x.new_empty(0) if bias is None else dbias.to(bias.dtype),
    )


@group_norm_backward_op.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    saved: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    groups: int,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dweight, dbias = (x.new_empty(0) if t is None else torch.empty_like(t) for t in (weight, bias))
    return torch.empty_like(x, memory_format=torch.channels_last), dweight, dbias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, groups, weight, bias, _, activation, _, slope = inputs
    _, saved = output
    ctx.save_for_backward(x, weight, bias, saved)
    ctx.mark_non_differentiable(saved)
    ctx.groups, ctx.activation, ctx.slope = groups, activation, slope


def _op_backward(ctx: Any, dy: torch.Tensor, _saved: Any) -> tuple[Any, ...]:
    x, weight, bias, saved = ctx.saved_tensors
    dx, dweight, dbias = group_norm_backward_op(dy, x, saved, weight, bias, ctx.groups, ctx.activation, ctx.slope)
    return dx, None, None if weight is None else dweight, None if bias is None else dbias, *[None] * 4


group_norm_op.register_autograd(_op_backward, setup_context=_setup)
