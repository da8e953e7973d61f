"""Bias + residual add + activation, and layer scale + drop path + residual add: the bundled kernels, or PyTorch's own ops.

Two entries over the same kernels each: a plain function for eager code (thin: an autograd.Function), and `torch.ops.advisor.…`,
registered with torch.library (fake kernel, autograd) for graphs that Inductor compiles.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from advisor.ops import differentiable, dispatch, nvrtc, storage
from advisor.ops.alignment import aligned, dense, is_aligned, is_nhwc, nhwc
from advisor.ops.batchnorm_act.reference import activate
from advisor.ops.bias_act import cuda, reference, spec
from advisor.ops.function import Function

engaged, fell_back = dispatch.counters("bias_act")


def _fp32(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """One factor or term a channel, as the kernels take it: no copy when it is that already."""
    return None if tensor is None else aligned(tensor.float())


def _factors(keep: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A drop path's, as the kernels take them: in fp32, or in the branch's `dtype`."""
    return None if keep is None else aligned(keep if keep.dtype in (dtype, torch.float32) else keep.float())


def _elsewhere(x: torch.Tensor, *others: torch.Tensor | None) -> str:
    return "not all on one device" if any(t is not None and t.device != x.device for t in others) else ""


def _is_dense(x: torch.Tensor, dim: int) -> bool:
    return is_nhwc(x) if dim == 1 else is_aligned(x)


def _refusal(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, activation: str, slope: float, dim: int
) -> str:
    """Why PyTorch's own operations run for bias + activation; empty when the kernels do."""
    reason = nvrtc.on_device(x) or _elsewhere(x, bias, residual)
    if reason:
        return reason
    if residual is not None and (
        residual.shape != x.shape or residual.dtype != x.dtype or not _is_dense(residual, dim)
    ):
        return "residual differs in shape, dtype or layout"
    variant = (activation, slope, bias is not None, residual is not None)
    return dispatch.refusal(*_standing(x.shape, dim, _is_dense(x, dim), x.dtype, variant, x.device.index or 0))


@lru_cache(maxsize=4096)
def _standing(
    shape: torch.Size, dim: int, dense: bool, dtype: torch.dtype, variant: tuple[str, float, bool, bool], device: int
) -> tuple[str, str]:
    """What `spec.unsupported` and `spec.wins` say: looked up once for all calls alike."""
    activation, slope, bias, residual = variant
    unsupported = spec.unsupported(
        shape=tuple(shape),
        dim=dim,
        dense=dense,
        dtype=storage.name(dtype),
        activation=activation,
        slope=slope,
        bias=bias,
        residual=residual,
        arch=nvrtc.arch(device),
    )
    return unsupported, spec.wins(spec.name(activation, bias=bias, residual=residual, dim=dim), storage.name(dtype))


def _scale_refusal(
    branch: torch.Tensor,
    scale: torch.Tensor | None,
    keep: torch.Tensor | None,
    residual: torch.Tensor,
    bias: torch.Tensor | None,
    result: torch.dtype,
    variant: spec.Scaled,
) -> str:
    """Why PyTorch's own operations run for factors + add; empty when the kernels do."""
    reason = nvrtc.on_device(branch) or _elsewhere(branch, scale, keep, residual, bias)
    if reason:
        return reason
    if keep is not None and keep.requires_grad:
        return "the drop path's factors need a gradient"
    if residual.shape != branch.shape:
        return "branch and residual differ in shape"
    dense = is_nhwc(branch) and is_nhwc(residual)
    return dispatch.refusal(
        *_scale_standing(branch.shape, dense, branch.dtype, residual.dtype, result, variant, branch.device.index or 0)
    )


@lru_cache(maxsize=4096)
def _scale_standing(
    shape: torch.Size,
    dense: bool,
    dtype: torch.dtype,
    residual: torch.dtype,
    result: torch.dtype,
    variant: spec.Scaled,
    device: int,
) -> tuple[str, str]:
    unsupported = spec.scale_unsupported(
        shape=tuple(shape),
        channels_last=dense,
        dtype=storage.name(dtype),
        residual=storage.name(residual),
        result=storage.name(result),
        variant=variant,
        arch=nvrtc.arch(device),
    )
    names = storage.name(dtype), storage.name(result)
    return unsupported, spec.wins(spec.scaled_kind(variant, *names), names[0])


@lru_cache(maxsize=64)
def _name(activation: str, bias: bool, residual: bool, dim: int = 1) -> str:
    return spec.name(activation, bias=bias, residual=residual, dim=dim)


@lru_cache(maxsize=64)
def _scale_name(variant: spec.Scaled) -> str:
    return variant.name


class _BiasAct(Function):
    replays = True

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        activation: str,
        slope: float,
        in_place: bool,
        dim: int,
    ) -> torch.Tensor:
        masked = activation in spec.MASKED
        y = x if in_place and masked else torch.empty_like(x)
        mask = cuda.mask_memory(x, activation) if any(ctx.needs_input_grad) else None
        cuda.bias_act(x, _fp32(bias), residual, activation, slope, y, dim, mask)
        if y is x:
            ctx.mark_dirty(x)
        Function.keep(ctx, mask if masked else x, bias)
        ctx.activation, ctx.slope, ctx.residual, ctx.dim = activation, slope, residual is not None, dim
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dy,) = gradients
        saved, bias = Function.kept(ctx)
        if differentiable.wanted(dy):
            dx, dbias = _differentiable_backward(dy, saved, bias, ctx.activation, ctx.slope, ctx.dim)
        else:
            dy = dense(dy, torch.channels_last if ctx.dim == 1 else torch.contiguous_format)
            dx, dbias = cuda.bias_act_backward(dy, saved, _fp32(bias), ctx.activation, ctx.slope, ctx.dim)
        return dx, None if dbias is None else dbias.to(bias.dtype), dx if ctx.residual else None, None, None, None, None


def _differentiable_backward(
    dy: torch.Tensor, saved: torch.Tensor, bias: torch.Tensor | None, activation: str, slope: float, dim: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """dx and dbias, None without a bias, in differentiable torch ops. The slope of a piecewise linear activation is constant."""
    if activation in spec.MASKED:
        wide = dy.float()
        dx = wide.where(differentiable.bits(saved, dy, dim=dim), wide * (slope if activation == "leaky_relu" else 0.0))
    else:
        z = saved.float()
        if bias is not None:
            z = z + reference.over_channels(bias.float(), z, dim)
        dx = differentiable.gradient(lambda z: activate(z, activation, slope), dy.float(), z)
    others = [d for d in range(dx.dim()) if d != dim % dx.dim()]
    return dx.to(dy.dtype), None if bias is None else dx.sum(others)


def bias_act(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    slope: float = 0.01,
    in_place: bool = False,
    dim: int = 1,
) -> torch.Tensor:
    """act(x + bias + residual).

    Args:
        x: [N, C, H, W] with `dim` 1, [..., C] with -1; the kernels take fp16, bf16 or fp32 on CUDA that is channels_last or, with
            -1, contiguous, everything else runs PyTorch's ops.
        bias: [C], or None. residual: like x, or None.
        activation: a key of `spec.ACTIVATIONS`; `slope` is LeakyReLU's.
        in_place: x's memory may become the result's, as it does with `bias.add_` and `nn.ReLU(inplace=True)`.
        dim: of the channels.

    Returns:
        A tensor like x.
    """
    reason = _refusal(x, bias, residual, activation, slope, dim)
    if reason:
        fell_back[reason] += 1
        return reference.bias_act(x, bias, residual, activation, slope, dim=dim)
    engaged[_name(activation, bias is not None, residual is not None, dim)] += 1
    result: torch.Tensor = _BiasAct.apply(x, bias, residual, activation, slope, in_place, dim)
    return result


class _ScaleAdd(Function):
    replays = True

    @staticmethod
    def forward(
        ctx: Any,
        branch: torch.Tensor,
        scale: torch.Tensor | None,
        keep: torch.Tensor | None,
        residual: torch.Tensor,
        bias: torch.Tensor | None,
        result: torch.dtype,
        twin: bool,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        Function.keep(ctx, None if scale is None else branch, scale, keep, bias)
        ctx.dtype, ctx.residual = branch.dtype, residual.dtype
        y, half = cuda.scale_add(
            branch, _fp32(bias), _fp32(scale), _factors(keep, branch.dtype), residual, result, twin=twin
        )
        return y if half is None else (y, half)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        dy, *twin = gradients
        half = twin[0] if twin else None
        branch, scale, keep, bias = Function.kept(ctx)
        if differentiable.wanted(dy):
            d = dy if half is None else dy + half.to(dy.dtype)
            return *_differentiable_scale_backward(d, branch, scale, keep, ctx.residual, bias, ctx.dtype), None, None
        dbranch, dbias, dscale, dresidual = cuda.scale_add_backward(
            nhwc(dy),
            None if half is None else nhwc(half),
            branch,
            _fp32(bias),
            _fp32(scale),
            _factors(keep, ctx.dtype),
            ctx.dtype,
            ctx.residual,
        )
        return (
            dbranch,
            None if dscale is None else dscale.to(scale.dtype).view(scale.shape),
            None,
            dresidual,
            None if dbias is None else dbias.to(bias.dtype),
            None,
            None,
        )


def _differentiable_scale_backward(
    dy: torch.Tensor,
    branch: torch.Tensor | None,
    scale: torch.Tensor | None,
    keep: torch.Tensor | None,
    residual: torch.dtype,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of branch, scale, keep, residual and bias in differentiable torch ops."""
    g = dy.float() if keep is None else dy.float() * keep.float().reshape(-1, 1, 1, 1)
    dresidual = dy.to(residual)
    if scale is None or branch is None:
        return g.to(dtype), None, None, dresidual, None
    z = branch.float() if bias is None else branch.float() + bias.float().reshape(1, -1, 1, 1)
    dscale = (g * z).sum((0, 2, 3))
    dbranch = g * scale.float().reshape(1, -1, 1, 1)
    dbias = None if bias is None else dbranch.sum((0, 2, 3)).to(bias.dtype)
    return dbranch.to(dtype), dscale.to(scale.dtype).view(scale.shape), None, dresidual, dbias


def scale_add(
    branch: torch.Tensor,
    scale: torch.Tensor | None,
    keep: torch.Tensor | None,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    result: torch.dtype | None = None,
    twin: bool = False,
) -> Any:
    """residual + (branch + bias) * scale * keep.

    Args:
        branch: [N, C, H, W]; the kernels take channels_last fp16, bf16 or fp32 on CUDA, everything else runs PyTorch's ops.
        scale: C values in a shape that broadcasts over channels, or None.
        keep: N values (zero, or one over the survival rate) in a shape that broadcasts over samples, or None; without gradient.
        residual: like branch, or in fp32.
        bias: [C], or None.
        result: dtype of the sum: the residual's (None), or fp32.
        twin: the sum is wanted in the branch's dtype too, as a cast of it would give it.

    Returns:
        A new tensor; with `twin` two of them.
    """
    dtype = residual.dtype if result is None else result
    mixed = residual.dtype != dtype
    variant = spec.Scaled(scale is not None, keep is not None, bias is not None, mixed, twin)
    reason = _scale_refusal(branch, scale, keep, residual, bias, dtype, variant)
    if reason:
        fell_back[reason] += 1
        return reference.scale_add(branch, scale, keep, residual, bias, dtype, twin)
    engaged[_scale_name(variant)] += 1
    return _ScaleAdd.apply(branch, scale, keep, residual, bias, dtype, twin)


@torch.library.custom_op("advisor::bias_act", mutates_args=())
def bias_act_op(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, activation: str, slope: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `bias_act`, for compiled graphs; the result, and what its backward reads of it: bits, or nothing. CUDA only."""
    x = nhwc(x)
    if residual is not None:
        residual = nhwc(residual)
    engaged[_name(activation, bias is not None, residual is not None)] += 1
    y, mask = torch.empty_like(x), cuda.mask_memory(x, activation)
    cuda.bias_act(x, _fp32(bias), residual, activation, slope, y, mask=mask)
    return y, x.new_empty(0, dtype=torch.uint8) if mask is None else mask


@bias_act_op.register_fake
def _(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, activation: str, slope: float
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = cuda.mask_memory(x, activation)
    return torch.empty_like(x, memory_format=torch.channels_last), x.new_empty(
        0, dtype=torch.uint8
    ) if mask is None else mask


@torch.library.custom_op("advisor::bias_act_backward", mutates_args=())
def bias_act_backward_op(
    dy: torch.Tensor, saved: torch.Tensor, bias: torch.Tensor | None, activation: str, slope: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `advisor::bias_act`: dx, which is the residual's too, and dbias fp32 (empty without a bias).

    saved: the bits that it gave out, or its x.
    """
    dy = nhwc(dy)
    if activation not in spec.MASKED:
        saved = nhwc(saved)
    dx, dbias = cuda.bias_act_backward(dy, saved, _fp32(bias), activation, slope)
    return dx, dy.new_empty(0, dtype=torch.float32) if dbias is None else dbias


@bias_act_backward_op.register_fake
def _(
    dy: torch.Tensor, saved: torch.Tensor, bias: torch.Tensor | None, activation: str, slope: float
) -> tuple[torch.Tensor, torch.Tensor]:
    dbias = dy.new_empty(0 if bias is None else bias.numel(), dtype=torch.float32)
    return torch.empty_like(dy, memory_format=torch.channels_last), dbias


def _bias_act_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, bias, residual, activation, slope = inputs
    _, mask = output
    ctx.mark_non_differentiable(mask)
    ctx.save_for_backward(mask if activation in spec.MASKED else x, bias)
    ctx.activation, ctx.slope, ctx.residual = activation, slope, residual is not None


def _bias_act_backward(ctx: Any, dy: torch.Tensor, _: Any) -> tuple[Any, ...]:
    saved, bias = ctx.saved_tensors
    dx, dbias = bias_act_backward_op(dy, saved, bias, ctx.activation, ctx.slope)
    return dx, None if bias is None else dbias.to(bias.dtype), dx if ctx.residual else None, None, None


bias_act_op.register_autograd(_bias_act_backward, setup_context=_bias_act_setup)


@torch.library.custom_op("advisor::scale_add", mutates_args=())
def scale_add_op(
    branch: torch.Tensor, scale: torch.Tensor | None, keep: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    """As `scale_add`, for compiled graphs. CUDA only."""
    branch = nhwc(branch)
    residual = nhwc(residual)
    engaged[spec.Scaled(scale is not None, keep is not None).name] += 1
    factors = _factors(keep, branch.dtype)
    return cuda.scale_add(branch, None, _fp32(scale), factors, residual, residual.dtype)[0]


@scale_add_op.register_fake
def _(
    branch: torch.Tensor, scale: torch.Tensor | None, keep: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    return torch.empty_like(residual, memory_format=torch.channels_last)


@torch.library.custom_op("advisor::scale_add_backward", mutates_args=())
def scale_add_backward_op(
    dy: torch.Tensor,
    branch: torch.Tensor | None,
    scale: torch.Tensor | None,
    keep: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `advisor::scale_add`: dbranch in `dtype`, and dscale [C] fp32 (empty without a scale)."""
    dy = nhwc(dy)
    if branch is not None:
        branch = nhwc(branch)
    factors = _factors(keep, dtype)
    dbranch, _, dscale, _ = cuda.scale_add_backward(dy, None, branch, None, _fp32(scale), factors, dtype, dy.dtype)
    return dbranch, dy.new_empty(0, dtype=torch.float32) if dscale is None else dscale


@scale_add_backward_op.register_fake
def _(
    dy: torch.Tensor,
    branch: torch.Tensor | None,
    scale: torch.Tensor | None,
    keep: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    dscale = dy.new_empty(0 if scale is None else scale.numel(), dtype=torch.float32)
    return torch.empty_like(dy, dtype=dtype, memory_format=torch.channels_last), dscale


def _scale_add_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    branch, scale, keep, _ = inputs
    ctx.save_for_backward(None if scale is None else branch, scale, keep)
    ctx.dtype = branch.dtype


def _scale_add_backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
    branch, scale, keep = ctx.saved_tensors
    dbranch, dscale = scale_add_backward_op(dy, branch, scale, keep, ctx.dtype)
    return dbranch, None if scale is None else dscale.to(scale.dtype).view(scale.shape), None, dy


scale_add_op.register_autograd(_scale_add_backward, setup_context=_scale_add_setup)
