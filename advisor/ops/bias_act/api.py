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
from advisor.ops.operation import ABOVE, FIRST, NONE, OWN, Arguments, Gradients, Operation, Saved


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
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    slope: float,
    _in_place: bool,
    dim: int,
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
    twin: bool,
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
    variant = _variant(branch, scale, keep, residual, bias, result, twin)
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


def _forward(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    slope: float,
    in_place: bool = False,
    dim: int = 1,
    *,
    kept: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The result, and the bits of its slopes, where the backward reads them."""
    y = x if in_place and activation in spec.MASKED else torch.empty_like(x)
    mask = cuda.mask_memory(x, activation) if kept else None
    cuda.bias_act(x, _fp32(bias), residual, activation, slope, y, dim, mask)
    return y, mask


def _pure(
    x: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor | None, activation: str, slope: float
) -> tuple[torch.Tensor, torch.Tensor]:
    y, mask = _forward(x, bias, residual, activation, slope)
    return y, x.new_empty(0, dtype=torch.uint8) if mask is None else mask


def _fake(
    x: torch.Tensor, bias: Any, residual: Any, activation: str, slope: float
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = cuda.mask_memory(x, activation)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    return y, x.new_empty(0, dtype=torch.uint8) if mask is None else mask


def _backward(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    x, bias, residual, activation, slope, _, dim = arguments
    dy = dense(dy, torch.channels_last if dim == 1 else torch.contiguous_format)
    read = saved[0] if activation in spec.MASKED else x
    dx, dbias = cuda.bias_act_backward(dy, read, _fp32(bias), activation, slope, dim)
    return dx, None if dbias is None else dbias.to(bias.dtype), None if residual is None else dx


def _twice(dy: torch.Tensor, arguments: Arguments, saved: Saved) -> Gradients:
    """In differentiable torch ops. The slope of a piecewise linear activation is constant."""
    x, bias, residual, activation, slope, _, dim = arguments
    if activation in spec.MASKED:
        wide, below = dy.float(), slope if activation == "leaky_relu" else 0.0
        dx = wide.where(differentiable.bits(saved[0], dy, dim=dim), wide * below)
    else:
        z = x.float()
        if bias is not None:
            z = z + reference.over_channels(bias.float(), z, dim)
        dx = differentiable.gradient(lambda z: activate(z, activation, slope), dy.float(), z)
    others = [d for d in range(dx.dim()) if d != dim % dx.dim()]
    narrow = dx.to(dy.dtype)
    dbias = None if bias is None else dx.sum(others).to(bias.dtype)
    return narrow, dbias, None if residual is None else narrow


_BIAS_ACT = Operation(
    name="bias_act",
    forward=_forward,
    pure=_pure,
    backward=_backward,
    reads=lambda x, bias, residual, activation, *_: (activation not in spec.MASKED, True, False),
    flows=lambda *_: (OWN, OWN, FIRST),
    twice=_twice,
    pytorch=reference.bias_act,
    refusal=_refusal,
    label=lambda x, bias, residual, activation, slope, in_place, dim: _name(
        activation, bias is not None, residual is not None, dim
    ),
    readable=lambda x, bias, residual, *others: (nhwc(x), bias, nhwc(residual), *others),
    fake=_fake,
)


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
    return _BIAS_ACT(x, bias, residual, activation, slope, in_place, dim)


def _variant(
    branch: torch.Tensor,
    scale: torch.Tensor | None,
    keep: torch.Tensor | None,
    residual: torch.Tensor,
    bias: torch.Tensor | None,
    result: torch.dtype | None,
    twin: bool,
) -> spec.Scaled:
    mixed = result is not None and residual.dtype != result
    return spec.Scaled(scale is not None, keep is not None, bias is not None, mixed, twin)


def _scale_forward(
    branch: torch.Tensor,
    scale: torch.Tensor | None,
    keep: torch.Tensor | None,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    result: torch.dtype | None = None,
    twin: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sum, and its twin where that is wanted."""
    factors = _fp32(bias), _fp32(scale), _factors(keep, branch.dtype)
    return cuda.scale_add(branch, *factors, residual, result or residual.dtype, twin=twin)


def _scale_pure(
    branch: torch.Tensor, scale: torch.Tensor | None, keep: torch.Tensor | None, residual: torch.Tensor
) -> torch.Tensor:
    return _scale_forward(branch, scale, keep, residual)[0]


def _scale_backward(above: tuple[Any, ...], arguments: Arguments, _saved: Saved) -> Gradients:
    branch, scale, keep, residual, bias, result, _ = arguments
    dy, half = _above(above, result)
    dbranch, dbias, dscale, dresidual = cuda.scale_add_backward(
        nhwc(dy),
        nhwc(half),
        None if scale is None else branch,
        _fp32(bias),
        _fp32(scale),
        _factors(keep, branch.dtype),
        branch.dtype,
        residual.dtype,
    )
    dscale = None if dscale is None else dscale.to(scale.dtype).view(scale.shape)
    return dbranch, dscale, None, dresidual, None if dbias is None else dbias.to(bias.dtype)


def _above(gradients: tuple[Any, ...], result: torch.dtype | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of the sum and of its twin: of the sum alone where nobody used both."""
    dy, half = gradients if len(gradients) == 2 else (gradients[0], None)
    return (half.to(result), None) if dy is None and half is not None else (dy, half)


def _scale_twice(above: tuple[Any, ...], arguments: Arguments, _saved: Saved) -> Gradients:
    """In differentiable torch ops."""
    branch, scale, keep, residual, bias, result, _ = arguments
    dy, half = _above(above, result)
    dy = dy if half is None else dy + half.to(dy.dtype)
    g = dy.float() if keep is None else dy.float() * keep.float().reshape(-1, 1, 1, 1)
    dresidual = dy.to(residual.dtype)
    if scale is None:
        return g.to(branch.dtype), None, None, dresidual, None
    z = branch.float() if bias is None else branch.float() + bias.float().reshape(1, -1, 1, 1)
    dscale = (g * z).sum((0, 2, 3))
    dbranch = g * scale.float().reshape(1, -1, 1, 1)
    dbias = None if bias is None else dbranch.sum((0, 2, 3)).to(bias.dtype)
    return dbranch.to(branch.dtype), dscale.to(scale.dtype).view(scale.shape), None, dresidual, dbias


_SCALE_ADD = Operation(
    name="scale_add",
    family="bias_act",
    forward=_scale_forward,
    results=2,
    pure=_scale_pure,
    backward=_scale_backward,
    reads=lambda branch, scale, *_: (scale is not None, True, True, False, True),
    flows=lambda *_: (OWN, OWN, NONE, ABOVE, OWN),
    twice=_scale_twice,
    pytorch=reference.scale_add,
    refusal=_scale_refusal,
    label=lambda *arguments: _scale_name(_variant(*arguments)),
    readable=lambda branch, scale, keep, residual, *others: (nhwc(branch), scale, keep, nhwc(residual), *others),
    fake=lambda branch, scale, keep, residual: torch.empty_like(residual, memory_format=torch.channels_last),
)


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
    return _SCALE_ADD(branch, scale, keep, residual, bias, residual.dtype if result is None else result, twin)
