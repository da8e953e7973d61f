"""LayerNorm over the channels as one operation without permutes: the bundled kernels, or PyTorch's own.

Two entries over the same kernels: `layer_norm`, a plain function for eager code (thin: an autograd.Function), and
`torch.ops.advisor.layer_norm`, registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from advisor.ops import differentiable, dispatch, nvrtc, storage
from advisor.ops.alignment import aligned, dense, misplaced
from advisor.ops.function import Function
from advisor.ops.layer_norm import cuda, reference, spec

engaged, fell_back = dispatch.counters("layer_norm")


def _format(dim: int) -> torch.memory_format:
    return torch.contiguous_format if dim == -1 else torch.channels_last


@lru_cache(maxsize=64)
def _name(dtype: torch.dtype, result: torch.dtype) -> str:
    return spec.name(storage.name(dtype), storage.name(result))


def _refusal(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, dim: int, dtype: torch.dtype
) -> str:
    """Why PyTorch's own operation runs; empty when the kernels do."""
    reason = nvrtc.on_device(x) or misplaced(x, weight, bias)
    if reason:
        return reason
    if dim == 1 and x.dim() != 4:
        return f"{x.dim()}-D input"
    contiguous = x.is_contiguous(memory_format=_format(dim)) and x.data_ptr() % 16 == 0
    parameters = tuple(p.dtype for p in (weight, bias) if p is not None)
    return dispatch.refusal(*_standing(x.shape, dim, contiguous, x.dtype, dtype, parameters, x.device.index or 0))


@lru_cache(maxsize=4096)
def _standing(
    shape: torch.Size,
    dim: int,
    contiguous: bool,
    dtype: torch.dtype,
    result: torch.dtype,
    parameters: tuple[torch.dtype, ...],
    device: int,
) -> tuple[str, str]:
    """What `spec.unsupported` and `spec.wins` say: looked up once for all calls alike."""
    types = {"dtype": storage.name(dtype), "result": storage.name(result)}
    channels = shape[dim]
    unsupported = spec.unsupported(
        rows=shape.numel() // max(channels, 1),
        channels=channels,
        contiguous=contiguous,
        parameters=tuple(storage.name(p) for p in parameters),
        arch=nvrtc.arch(device),
        **types,
    )
    return unsupported, spec.wins(channels=channels, **types)


def _differentiable(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dim: int,
) -> tuple[torch.Tensor | None, ...]:
    """dx, dweight, dbias through PyTorch's own operations: these can be differentiated again."""
    return differentiable.gradients(
        lambda x, weight, bias: reference.layer_norm(x, weight, bias, eps, dim, dy.dtype), dy, (x, weight, bias)
    )


class _LayerNorm(Function):
    replays = True

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        dim: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        Function.keep(ctx, x, weight, bias)
        ctx.eps, ctx.dim = eps, dim
        return cuda.forward(x, weight, bias, eps, dim, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        x, weight, bias = Function.kept(ctx)
        if differentiable.wanted(dy):
            return (*_differentiable(dy, x, weight, bias, ctx.eps, ctx.dim), None, None, None)
        dy = dense(dy, _format(ctx.dim))
        dx, dweight, dbias = cuda.backward(dy, x, weight, ctx.eps, ctx.dim)
        return dx, None if weight is None else dweight, None if bias is None else dbias, None, None, None


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dim: int = -1,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Layer normalisation over `dim`: the last one, or dimension 1 of an [N, C, H, W] tensor.

    Args:
        x: the kernels take fp16, bf16 or fp32 on CUDA with the channels contiguous in memory (channels_last for dim 1);
            everything else runs PyTorch's own operation.
        weight, bias: [C] fp32, or None.
        dtype: of the result; None: x's own. Under autocast PyTorch's own result is fp32.

    Returns:
        A new tensor of x's shape and layout.
    """
    result_dtype = dtype or x.dtype
    reason = _refusal(x, weight, bias, dim, result_dtype)
    if reason:
        fell_back[reason] += 1
        return reference.layer_norm(x, weight, bias, eps, dim, result_dtype)
    engaged[_name(x.dtype, result_dtype)] += 1
    result: torch.Tensor = _LayerNorm.apply(x, weight, bias, eps, dim, result_dtype)
    return result


@torch.library.custom_op("advisor::layer_norm", mutates_args=())
def layer_norm_op(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """As `layer_norm`, for compiled graphs, where `spec.unsupported` has nothing against it. CUDA only."""
    x = dense(x, _format(dim))
    weight, bias = aligned(weight), aligned(bias)
    engaged[_name(x.dtype, dtype)] += 1
    return cuda.forward(x, weight, bias, eps, dim, dtype)


@layer_norm_op.register_fake
def _(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return torch.empty_like(x, dtype=dtype, memory_format=_format(dim))


@torch.library.custom_op("advisor::layer_norm_backward", mutates_args=())
def layer_norm_backward_op(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `advisor::layer_norm`: dx, dweight, dbias (empty where there is no such parameter)."""
    dy = dense(dy, _format(dim))
    x = dense(x, _format(dim))
    dx, dweight, dbias = cuda.backward(dy, x, aligned(weight), eps, dim)
    return (
        dx,
        x.new_empty(0) if weight is None else dweight,
        x.new_empty(0) if bias is None else dbias,
    )


@layer_norm_backward_op.register_fake
def _(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dim: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dweight, dbias = (x.new_empty(0) if t is None else torch.empty_like(t) for t in (weight, bias))
    return torch.empty_like(x, memory_format=_format(dim)), dweight, dbias


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, bias, eps, dim, _ = inputs
    ctx.save_for_backward(x, weight, bias)
    ctx.eps, ctx.dim = eps, dim


def _op_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    x, weight, bias = ctx.saved_tensors
    dx, dweight, dbias = layer_norm_backward_op(dy, x, weight, bias, ctx.eps, ctx.dim)
    return dx, None if weight is None else dweight, None if bias is None else dbias, None, None, None


layer_norm_op.register_autograd(_op_backward, setup_context=_setup)
