"""Shapes at which the bias + activation and the scale + add kernels are measured and verified."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from advisor.ops import storage
from advisor.ops.batchnorm_act.reference import activate
from advisor.ops.bias_act import api, reference, spec
from advisor.ops.family import Arguments, Case, Work

# VGG-16 at batch 128: all its activations but one follow a convolution with a bias.
_VGG = ((128, 64, 224, 224), (128, 128, 112, 112), (128, 256, 56, 56), (128, 512, 28, 28), (128, 512, 14, 14))
# ConvNeXt-T at batch 256, under autocast: branches in half precision, the residual stream in fp32.
_CONVNEXT = ((256, 96, 56, 56), (256, 192, 28, 28), (256, 384, 14, 14), (256, 768, 7, 7))
# The wide Linear layers of its blocks, each before a GELU, with the tokens as they lie.
_CONVNEXT_WIDE = ((256, 56, 56, 384), (256, 28, 28, 768), (256, 14, 14, 1536), (256, 7, 7, 3072))
# EfficientNet-B0 at batch 256: drop path and add, no factor a channel.
_EFFICIENTNET = ((256, 24, 56, 56), (256, 40, 28, 28), (256, 112, 14, 14))
# An addition and an activation with no norm between: residual networks without norms, at ResNet-50's widths and batch 256.
_ADDED = ((256, 256, 56, 56), (256, 512, 28, 28))
# Odd sizes: one row, a prime number of vectors, N = 1, more rows than the blocks take in one pass.
_ODD = ((1, 8, 1, 1), (3, 72, 9, 7), (2, 1016, 5, 3), (5, 24, 28, 26))
_EVEN = (3, 48, 7, 5)  # an even number of vectors, whose neighbours exchange halves of an fp32 result
_ODD_LINEAR = ((3, 9, 7, 72), (2, 5, 1016))
_KINKS = (-3.0, 0.0, 3.0, 6.0)
SURVIVAL = 0.7


def _tensor(generator: torch.Generator, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """[N, C, H, W] channels_last, mean 0.5, deviation 1.5, requiring a gradient."""
    n, c, h, w = shape
    values = torch.randn(n, h, w, c, device=generator.device, generator=generator) * 1.5 + 0.5
    return values.to(getattr(torch, dtype)).permute(0, 3, 1, 2).requires_grad_()


def _inputs(
    generator: torch.Generator,
    n: int,
    *,
    shape: tuple[int, ...],
    dtype: str,
    activation: str,
    bias: bool,
    residual: bool,
) -> Arguments:
    """x and residual [n, C, H, W], bias [C] fp32."""
    size = (n, *shape[1:])
    x = _tensor(generator, size, dtype)
    b = torch.randn(shape[1], device=generator.device, generator=generator).requires_grad_() if bias else None
    return x, b, _tensor(generator, size, dtype) if residual else None, activation, 0.1


def _linear_inputs(
    generator: torch.Generator, n: int, *, shape: tuple[int, ...], dtype: str, activation: str, zero: bool
) -> Arguments:
    """x [n, ..., C] and bias [C] fp32, `zero` or random; not in place; channels last."""
    x = torch.randn((n, *shape[1:]), device=generator.device, generator=generator) * 1.5 + 0.5
    bias = torch.randn(shape[-1], device=generator.device, generator=generator) * (0.0 if zero else 1.0)
    x = x.to(getattr(torch, dtype)).requires_grad_()
    return x, bias.requires_grad_(), None, activation, 0.1, False, -1


class _InTheProduct(torch.autograd.Function):
    """x + bias for a bias of zero, in no time: the product has added it. Its gradient is a sum of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim % x.dim()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (dz,) = gradients
        return dz, dz.sum([d for d in range(dz.dim()) if d != ctx.dim]).float(), None


def _linear_eager(
    x: torch.Tensor,
    bias: torch.Tensor,
    residual: None,
    activation: str,
    slope: float,
    in_place: bool,
    dim: int,
) -> torch.Tensor:
    """What PyTorch runs after a Linear layer's product."""
    return activate(_InTheProduct.apply(x, bias, dim), activation, slope)  # type: ignore[no-untyped-call]  # torch's own, without types


def _steady(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    slope: float,
    in_place: bool = False,
    dim: int = 1,
) -> torch.Tensor:
    """False where rounding to 16 bits may take z over a point at which the activation's slope jumps."""
    z = reference.bias_act(x, bias, residual, "none", dim=dim)
    return torch.stack([(z - kink).abs() >= 0.05 for kink in _KINKS]).all(0)


def _case(shape: tuple[int, ...], dtype: str, activation: str, bias: bool, residual: bool) -> Case:
    n, c, h, w = shape
    forward, backward = spec.bytes_moved(
        elements=n * c * h * w, itemsize=getattr(torch, dtype).itemsize, activation=activation, residual=residual
    )
    name = spec.name(activation, bias=bias, residual=residual)
    return Case(
        name=name,
        kind=name,
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.FORWARD,), nbytes=forward),
            "backward": Work(kernels=(spec.backward(bias=bias),), nbytes=backward),
        },
        inputs=partial(_inputs, shape=shape, dtype=dtype, activation=activation, bias=bias, residual=residual),
        ours=api.bias_act,
        eager=reference.bias_act,
        reference=reference.bias_act,
        wins=partial(spec.wins, name, dtype),
        steady=_steady,
    )


def _linear_case(shape: tuple[int, ...], dtype: str, activation: str, *, measured: bool) -> Case:
    forward, backward = spec.bytes_moved(
        elements=math.prod(shape), itemsize=getattr(torch, dtype).itemsize, activation=activation, residual=False
    )
    name = spec.name(activation, bias=True, residual=False, dim=-1)
    return Case(
        name=name,
        kind=name,
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.FORWARD,), nbytes=forward),
            "backward": Work(kernels=(spec.BACKWARD,), nbytes=backward),
        },
        inputs=partial(_linear_inputs, shape=shape, dtype=dtype, activation=activation, zero=measured),
        ours=api.bias_act,
        eager=_linear_eager if measured else reference.bias_act,
        reference=reference.bias_act,
        wins=partial(spec.wins, name, dtype),
        steady=_steady,
    )


def _scale_inputs(
    generator: torch.Generator,
    n: int,
    *,
    shape: tuple[int, ...],
    dtype: str,
    result: str,
    variant: spec.Scaled,
    zero: bool,
) -> Arguments:
    """branch [n, C, H, W]; scale [C, 1, 1], fp32 beside a wider result, else of the branch's dtype; keep [n, 1, 1, 1], like what it
    is multiplied with; residual.

    And, for variants with any of them: bias [C] fp32, `zero` or random; the result's dtype; whether there is a twin.
    """
    size, device = (n, *shape[1:]), generator.device
    branch = _tensor(generator, size, dtype)
    factors = survives = bias = None
    if variant.scale:
        values = torch.randn(shape[1], 1, 1, device=device, generator=generator)
        factors = values.to(getattr(torch, result)).requires_grad_()
    if variant.keep:
        survives = torch.empty(n, 1, 1, 1, device=device).bernoulli_(SURVIVAL, generator=generator).div_(SURVIVAL)
        survives = survives.to(getattr(torch, result if variant.scale else dtype))  # like what it is multiplied with
    residual = _tensor(generator, size, dtype if variant.mixed else result)
    if not (variant.bias or variant.mixed or variant.twin):
        return branch, factors, survives, residual
    if variant.bias:
        bias = torch.randn(shape[1], device=device, generator=generator) * (0.0 if zero else 1.0)
        bias.requires_grad_()
    return branch, factors, survives, residual, bias, getattr(torch, result), variant.twin


def _scale_eager(
    branch: torch.Tensor,
    scale: torch.Tensor | None,
    keep: torch.Tensor | None,
    residual: torch.Tensor,
    bias: torch.Tensor,
    *rest: Any,
) -> Any:
    """What PyTorch runs after a Linear layer's product."""
    z = _InTheProduct.apply(branch, bias, 1)  # type: ignore[no-untyped-call]  # torch's own, without types
    return reference.scale_add(z, scale, keep, residual, None, *rest)


def _scale_case(
    shape: tuple[int, ...], dtype: str, result: str, variant: spec.Scaled, *, measured: bool = True
) -> Case:
    forward, backward = spec.scale_bytes_moved(
        elements=math.prod(shape),
        itemsize=getattr(torch, dtype).itemsize,
        result=getattr(torch, result).itemsize,
        variant=variant,
    )
    return Case(
        name=spec.scaled_kind(variant, dtype, result),
        kind=spec.scaled_kind(variant, dtype, result),
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.SCALE_FORWARD,), nbytes=forward),
            "backward": Work(kernels=(spec.scale_backward(scale=variant.scale),), nbytes=backward),
        },
        inputs=partial(
            _scale_inputs, shape=shape, dtype=dtype, result=result, variant=variant, zero=measured and variant.bias
        ),
        ours=api.scale_add,
        eager=_scale_eager if measured and variant.bias else reference.scale_add,
        reference=reference.scale_add,
        wins=partial(spec.wins, spec.scaled_kind(variant, dtype, result), dtype),
    )


_BOTH, _SCALE, _DROP = spec.Scaled(True, True), spec.Scaled(True, False), spec.Scaled(False, True)
_FIRST = _BOTH._replace(bias=True, mixed=True, twin=True)  # ConvNeXt's first block of a stage, behind a convolution
_INNER = _BOTH._replace(bias=True, twin=True)  # and before another block
_LAST = _BOTH._replace(bias=True)  # and before a norm
BENCHMARK = (
    *(_case(shape, "bfloat16", "relu", True, False) for shape in _VGG),
    *(_case(shape, dtype, "relu", True, False) for dtype in ("float16", "float32") for shape in _VGG[1:3]),
    *(_case(shape, "bfloat16", "silu", True, False) for shape in _VGG[1:3]),
    *(_case(shape, "bfloat16", "relu", False, True) for shape in _ADDED),
    *(_linear_case(shape, "bfloat16", "gelu", measured=True) for shape in _CONVNEXT_WIDE),
    *(_linear_case(_CONVNEXT_WIDE[1], dtype, "gelu", measured=True) for dtype in ("float16", "float32")),
    *(_linear_case(_CONVNEXT_WIDE[1], "bfloat16", kind, measured=True) for kind in ("gelu_tanh", "relu", "silu")),
    *(_scale_case(shape, "bfloat16", "float32", _BOTH) for shape in _CONVNEXT),
    *(_scale_case(shape, "bfloat16", "float32", _INNER) for shape in _CONVNEXT),
    *(_scale_case(shape, "bfloat16", "float32", _FIRST) for shape in _CONVNEXT[1:]),
    *(_scale_case(shape, "bfloat16", "float32", _LAST) for shape in _CONVNEXT),
    _scale_case(_CONVNEXT[0], "bfloat16", "float32", _INNER._replace(keep=False)),
    *(_scale_case(_CONVNEXT[1], "bfloat16", "float32", v._replace(bias=False)) for v in (_INNER, _FIRST)),
    _scale_case(_CONVNEXT[1], "float16", "float32", _INNER),
    *(_scale_case(shape, dtype, dtype, _BOTH) for dtype in ("bfloat16", "float32") for shape in _CONVNEXT[:2]),
    *(_scale_case(shape, "bfloat16", "bfloat16", _DROP) for shape in _EFFICIENTNET),
    # What other networks of docs/networks.md have, and nothing is dispatched for until it is measured: NFNet's and FastViT's GELU behind a
    # convolution, a layer scale without drop path (PoolFormer's in half precision, the first block of a ConvNeXt).
    *(_case(shape, "bfloat16", "gelu", True, False) for shape in _VGG[1:3]),
    *(_scale_case(shape, "bfloat16", "float32", _SCALE) for shape in _CONVNEXT[:2]),
    *(_scale_case(shape, "bfloat16", "bfloat16", _SCALE) for shape in _CONVNEXT[:2]),
)
_VARIANTS = tuple(
    (activation, bias, residual)
    for activation in spec.ACTIVATIONS
    for bias, residual in ((True, False), (True, True), (False, True))
    if not spec.unsupported_variant(activation, bias=bias, residual=residual)
)
_SCALES = (
    *(
        (dtype, result, variant)
        for dtype in storage.STORAGE
        for result in dict.fromkeys((dtype, "float32"))
        for variant in (_BOTH, _SCALE, _DROP)
    ),
    *(("bfloat16", "float32", variant) for variant in (_FIRST, _INNER, _LAST, _FIRST._replace(twin=False, bias=False))),
    *(("float16", "float32", variant) for variant in (_FIRST._replace(keep=False), _DROP._replace(twin=True))),
    *((dtype, dtype, _LAST) for dtype in ("bfloat16", "float32")),
)
# Every variant once on the shape with the most to go wrong; the other shapes where they differ most.
VERIFICATION = (
    *(_case(_ODD[1], dtype, *variant) for variant in _VARIANTS for dtype in storage.STORAGE),
    *(
        _case(shape, dtype, "relu", True, True)
        for shape in _ODD
        for dtype in ("bfloat16", "float32")
        if shape != _ODD[1]
    ),
    *(
        _linear_case(shape, dtype, activation, measured=False)
        for shape in _ODD_LINEAR
        for dtype in storage.STORAGE
        for activation in ("relu", "gelu")
    ),
    *(_scale_case(_ODD[1], *variant, measured=False) for variant in _SCALES),
    *(_scale_case(_EVEN, *variant, measured=False) for variant in _SCALES if variant[1] != variant[0]),
    *(
        _scale_case(shape, "bfloat16", result, _BOTH, measured=False)
        for shape in _ODD
        for result in ("bfloat16", "float32")
        if shape != _ODD[1]
    ),
)
