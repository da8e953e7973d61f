"""Benchmark and verification cases of a convolution with the batch norm behind it: with the moments that the convolution leaves, and
apart, where the norm reads its input once more. Beside each other they say whether the moments save time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from advisor.core import architectures
from advisor.ops import dispatch
from advisor.ops.batchnorm_act import api, reference, spec
from advisor.ops.family import Arguments, Case, Work

APART = " apart"
_ACTIVATION = "relu"
_NORM = 4  # arguments of the norm, behind the convolution's
# How near the kink a value may be brought to its other side by the rounding of the convolution's result to 16 bits.
_KINK = 0.05


def _inputs(generator: torch.Generator, n: int, *, conv: Case, channels: int) -> Arguments:
    """The convolution's, then running mean and variance, weight and bias [C] fp32."""
    device = generator.device
    return (
        *conv.inputs(generator, n),
        torch.zeros(channels, device=device),
        torch.ones(channels, device=device),
        (torch.rand(channels, device=device, generator=generator) + 0.5).requires_grad_(),
        torch.randn(channels, device=device, generator=generator).requires_grad_(),
    )


def _normalised(y: torch.Tensor, norm: Any, moments: torch.Tensor | None) -> torch.Tensor:
    mean, var, weight, bias = norm
    return api.batchnorm_act(y, None, mean, var, weight, bias, 0.1, 1e-5, _ACTIVATION, moments=moments)


def _leaving(*arguments: Any, producer: Callable[..., Any]) -> torch.Tensor:
    y, moments = producer(*arguments[:-_NORM])
    return _normalised(y, arguments[-_NORM:], moments)


def _apart(*arguments: Any, conv: Case) -> torch.Tensor:
    return _normalised(conv.ours(*arguments[:-_NORM]), arguments[-_NORM:], None)


def _plain(*arguments: Any, function: Callable[..., torch.Tensor], activation: str = _ACTIVATION) -> torch.Tensor:
    mean, var, weight, bias = arguments[-_NORM:]
    y = function(*arguments[:-_NORM])
    return reference.batchnorm_act(y, None, mean, var, weight, bias, 0.1, 1e-5, activation)


def _steady(*arguments: Any, conv: Case) -> torch.Tensor:
    return _plain(*arguments, function=conv.reference, activation="none").abs() >= _KINK


def cases(
    conv: Case, producer: Callable[..., Any], result: tuple[int, ...], wins: Callable[[], str]
) -> tuple[Case, Case]:
    """`conv` with a norm and ReLU behind it, whose result has this shape [N, C, OH, OW]: with moments, and apart.

    Args:
        producer: as `conv.ours`, which returns the moments too.
        wins: why the norm takes no moments from this convolution; empty where it does.
    """
    unused = partial(spec.takes_moments, math.prod(result) * getattr(torch, conv.dtype).itemsize, False)
    norm = {kind: _norm(result, conv.dtype, backward=kind == "backward") for kind in conv.passes}
    leaving_norm = {**norm, "forward": _norm(result, conv.dtype, backward=False, moments=True)}
    leaving = Case(
        name=f"{conv.name}+{spec.name(_ACTIVATION, False)}",
        kind=dispatch.with_moments(conv.kind),
        shape=conv.shape,
        dtype=conv.dtype,
        passes={kind: _together(work, leaving_norm[kind]) for kind, work in conv.passes.items()},
        inputs=partial(_inputs, conv=conv, channels=result[1]),
        ours=partial(_leaving, producer=producer),
        eager=partial(_plain, function=conv.eager),
        reference=partial(_plain, function=conv.reference),
        wins=lambda: unused() or wins(),
        steady=partial(_steady, conv=conv),
        gradient_floor=0.05,  # as of a norm alone
    )
    apart = replace(
        leaving,
        name=leaving.name + APART,
        kind="",
        passes={kind: _together(work, norm[kind]) for kind, work in conv.passes.items()},
        ours=partial(_apart, conv=conv),
        wins=lambda: "" if unused() or wins() else "the norm takes its statistics from the convolution",
    )
    return leaving, apart


def _norm(result: tuple[int, ...], dtype: str, *, backward: bool, moments: bool = False) -> Work:
    """The norm's share of a pass over a tensor of this shape, as it is launched on an H200."""
    n, c, h, w = result
    if moments:  # which leave the tensor's second reading alone
        elements, itemsize = math.prod(result), getattr(torch, dtype).itemsize
        moved = spec.held_bytes_moved(
            elements=elements, itemsize=itemsize, activation=_ACTIVATION, residual=False, forked=False
        )
        return Work(kernels=(spec.MOMENTS, spec.FORWARD), nbytes=moved[0])
    kernel, nbytes = spec.work(
        *(n * h * w, c, dtype, _ACTIVATION),
        residual=False,
        forked=False,
        backward=backward,
        sm_count=architectures.MEASURED.sms,
        arch=90,
    )
    return Work(kernels=(kernel,), nbytes=nbytes)


def _together(conv: Work, norm: Work) -> Work:
    return replace(conv, kernels=(*conv.kernels, *norm.kernels), nbytes=conv.nbytes + norm.nbytes)
