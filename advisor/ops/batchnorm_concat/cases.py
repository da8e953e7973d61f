"""Concatenations at which the kernels are measured and verified: all norms over one, as one call."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch

from advisor.ops import storage
from advisor.ops.batchnorm_act.spec import ACTIVATIONS
from advisor.ops.batchnorm_concat import api, reference, spec
from advisor.ops.batchnorm_concat.reference import Norm
from advisor.ops.family import Arguments, Case, Work

# DenseNet-121's four blocks at batch 256: channels at first, size, and how many norms read the concatenation: one a layer and
# the transition's.
_BLOCKS = (
    ((256, 64, 56, 56), 7),
    ((256, 128, 28, 28), 13),
    ((256, 256, 14, 14), 25),
    ((256, 512, 7, 7), 17),
)
_GROWTH = 32
# Odd sizes: few rows, N = 1, two tiles of channels of which one is not full, one channel vector.
_ODD = (((2, 32, 9, 7), 4), ((1, 24, 7, 5), 3), ((3, 264, 4, 3), 2), ((4, 8, 6, 6), 3))
_KINKS = (-3.0, 0.0, 3.0, 6.0)


def _widths(shape: tuple[int, ...], norms: int, growth: int) -> list[int]:
    return [shape[1] + k * growth for k in range(norms)]


def _inputs(
    generator: torch.Generator, n: int, *, shape: tuple[int, ...], norms: int, growth: int, dtype: str, activation: str
) -> Arguments:
    """As many feature maps as norms, channels_last, mean 0.5, deviation 1.5; then each norm's statistics, weight and bias."""
    device = generator.device
    _, c, h, w = shape

    def feature(channels: int) -> torch.Tensor:
        values = torch.randn(n, h, w, channels, device=device, generator=generator) * 1.5 + 0.5
        return values.to(getattr(torch, dtype)).permute(0, 3, 1, 2).requires_grad_()

    def norm(channels: int) -> Norm:
        weight = torch.rand(channels, device=device, generator=generator) + 0.5
        bias = torch.randn(channels, device=device, generator=generator)
        statistics = torch.zeros(channels, device=device), torch.ones(channels, device=device)
        return *statistics, weight.requires_grad_(), bias.requires_grad_()

    features = [feature(c), *(feature(growth) for _ in range(norms - 1))]
    parameters = itertools.chain.from_iterable(map(norm, _widths(shape, norms, growth)))
    return (*features, *parameters, 0.1, 1e-5, activation, 0.01)


def _grouped(arguments: Arguments, norms: int) -> tuple[Arguments, list[Any], Arguments]:
    """Feature maps, norms and the rest of what `_inputs` gives."""
    features, parameters, rest = arguments[:norms], arguments[norms : 5 * norms], arguments[5 * norms :]
    return features, [parameters[i : i + 4] for i in range(0, len(parameters), 4)], rest


def _ours(*arguments: Any, norms: int) -> tuple[torch.Tensor, ...]:
    features, parameters, rest = _grouped(arguments, norms)
    tensor, moments = api.features(features[0], sum(feature.shape[1] for feature in features))
    found = []
    for k, norm in enumerate(parameters):
        if k:
            tensor, moments = api.extended(tensor, moments, features[k])
        y, tensor, moments = api.batchnorm_act(tensor, moments, *norm, *rest)
        found.append(y)
    return tuple(found)


def _reference(*arguments: Any, norms: int) -> tuple[torch.Tensor, ...]:
    features, parameters, rest = _grouped(arguments, norms)
    return reference.batchnorm_concat(features, parameters, *rest)


def _steady(*arguments: Any, norms: int) -> tuple[torch.Tensor, ...]:
    """False within 1e-3 of a point where an activation's slope jumps."""
    features, parameters, (momentum, eps, *_) = _grouped(arguments, norms)
    outputs = reference.batchnorm_concat(features, parameters, momentum, eps)
    return tuple(torch.stack([(z - kink).abs() >= 1e-3 for kink in _KINKS]).all(0) for z in outputs)


def _case(shape: tuple[int, ...], norms: int, growth: int, dtype: str, activation: str) -> Case:
    n, _, h, w = shape
    forward, backward = spec.bytes_moved(
        rows=n * h * w, widths=_widths(shape, norms, growth), itemsize=storage.itemsize(dtype)
    )
    return Case(
        name=f"{norms} x {spec.kind(activation)}",
        kind=spec.kind(activation),
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.APPEND, spec.FORWARD), nbytes=forward),
            "backward": Work(kernels=(spec.APPEND, spec.BACKWARD), nbytes=backward),
        },
        inputs=partial(_inputs, shape=shape, norms=norms, growth=growth, dtype=dtype, activation=activation),
        ours=partial(_ours, norms=norms),
        eager=partial(_reference, norms=norms),
        reference=partial(_reference, norms=norms),
        wins=partial(spec.wins, dtype=dtype),
        steady=partial(_steady, norms=norms),
        gradient_floor=0.05,  # with few rows a channel dx is what cancellation leaves of dy
    )


BENCHMARK = (
    *(_case(*block, _GROWTH, "bfloat16", "relu") for block in _BLOCKS),
    *(_case(*_BLOCKS[1], _GROWTH, dtype, "relu") for dtype in ("float16", "float32")),
)
_VARIANTS = (
    *zip(ACTIVATIONS, itertools.cycle(storage.STORAGE), strict=False),
    ("relu", "bfloat16"),
    ("relu", "float32"),
)
# Each activation, and ReLU with each dtype, at one shape after the other.
VERIFICATION = tuple(
    _case(*_ODD[i % len(_ODD)], (8, 40)[i % 2], dtype, activation) for i, (activation, dtype) in enumerate(_VARIANTS)
)
