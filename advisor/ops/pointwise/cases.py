"""Shapes at which the 1 x 1 convolution kernels are measured and verified: always with the batch norm before or behind them.

Beside each stands what it takes the place of: PyTorch's convolution and this project's batch norm, which reads a tensor once more.
Of a convolution before a norm the backward is the same on both sides, of one behind a norm the forward.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import moments_cases
from advisor.ops.batchnorm_act import api as batchnorm_api
from advisor.ops.batchnorm_act import reference as batchnorm_reference
from advisor.ops.batchnorm_act import spec as batchnorm_spec
from advisor.ops.family import Arguments, Case, Work
from advisor.ops.pointwise import api, reference, spec


def _inputs(generator: torch.Generator, n: int, *, shape: tuple[int, ...], dtype: str, out_channels: int) -> Arguments:
    """x [n, CI, H, W] channels_last, mean 0.5; weight [CO, CI, 1, 1] fp32, of a deviation that keeps y's near 1."""
    device = generator.device
    _, c, h, w = shape
    x = torch.randn(n, h, w, c, device=device, generator=generator) + 0.5
    weight = torch.randn(out_channels, c, 1, 1, device=device, generator=generator) / c**0.5
    return x.to(getattr(torch, dtype)).permute(0, 3, 1, 2).requires_grad_(), weight.requires_grad_()


def _eager(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """As autocast runs it: the weight cast to x's dtype."""
    return F.conv2d(x, weight.to(x.dtype))


def _cases(shape: tuple[int, ...], out_channels: int, dtype: str) -> tuple[Case, Case]:
    """With a batch norm and ReLU behind it: with its moments; and apart, where the convolution is PyTorch's own."""
    n, c, h, w = shape
    rows = n * h * w
    nbytes, flops = spec.bytes_moved(rows, c, out_channels), spec.flops(rows, c, out_channels)
    pytorchs = Case(
        name=spec.name(c, out_channels),
        kind="1x1",
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(), nbytes=nbytes, flops=flops, unit="matrix"),
            "backward": Work(kernels=(), nbytes=2 * nbytes, flops=2 * flops, unit="matrix"),
        },
        inputs=partial(_inputs, shape=shape, dtype=dtype, out_channels=out_channels),
        ours=_eager,
        eager=_eager,
        reference=reference.pointwise_conv2d,
        wins=lambda: "the convolution is PyTorch's own",
    )
    wins = partial(spec.wins, dtype=dtype, rows=rows, in_channels=c, out_channels=out_channels)
    leaving, apart = moments_cases.cases(pytorchs, api.pointwise_conv2d_moments, (n, out_channels, h, w), wins)
    forward = leaving.passes["forward"]
    ours = replace(forward, kernels=(spec.FORWARD, *forward.kernels))
    return replace(leaving, passes={**leaving.passes, "forward": ours}), replace(apart, wins=pytorchs.wins)


_NORM = 6  # tensors of the norm, before the convolution's weight
_MOMENTUM, _EPS, _SLOPE = 0.1, 1e-5, 0.01
# How near its kink an activation's input may be for rounding to decide its slope.
_KINK = 1e-3


def _behind_inputs(
    generator: torch.Generator, n: int, *, shape: tuple[int, ...], dtype: str, of: spec.BehindNorm
) -> Arguments:
    """x and residual [n, C, H, W] channels_last; running mean and variance, weight and bias [C] fp32; the convolution's weight fp32."""
    device = generator.device
    _, c, h, w = shape

    def tensor() -> torch.Tensor:
        values = torch.randn(n, h, w, c, device=device, generator=generator) * 1.5 + 0.5
        return values.to(getattr(torch, dtype)).permute(0, 3, 1, 2).requires_grad_()

    return (
        tensor(),
        tensor() if of.residual else None,
        torch.zeros(c, device=device),
        torch.ones(c, device=device),
        (torch.rand(c, device=device, generator=generator) + 0.5).requires_grad_(),
        torch.randn(c, device=device, generator=generator).requires_grad_(),
        (torch.randn(of.out_channels, c, 1, 1, device=device, generator=generator) / c**0.5).requires_grad_(),
    )


def _call(arguments: Any, of: spec.BehindNorm) -> tuple[Any, ...]:
    """What every form of the norm is called with."""
    return (*arguments[:_NORM], _MOMENTUM, _EPS, of.activation, _SLOPE)


def _behind(*arguments: Any, of: spec.BehindNorm) -> tuple[torch.Tensor, ...]:
    y, z, _ = api.batchnorm_act_pointwise(*_call(arguments, of), conv_weight=arguments[_NORM])
    return (y, z) if of.forked else (z,)


def _behind_apart(*arguments: Any, of: spec.BehindNorm) -> tuple[torch.Tensor, ...]:
    norm, weight = _call(arguments, of), arguments[_NORM]
    if not of.forked:
        return (_eager(batchnorm_api.batchnorm_act(*norm), weight),)
    y, again = batchnorm_api.forked_batchnorm_act(*norm)
    return again, _eager(y, weight)


def _behind_plain(*arguments: Any, of: spec.BehindNorm) -> tuple[torch.Tensor, ...]:
    norm, weight = _call(arguments, of), arguments[_NORM]
    y = batchnorm_reference.batchnorm_act(*norm)
    return (y, _eager(y, weight)) if of.forked else (_eager(y, weight),)


def _behind_steady(*arguments: Any, of: spec.BehindNorm) -> tuple[torch.Tensor, ...]:
    y, z = _behind_plain(*arguments, of=replace(of, activation="none", forked=True))
    everywhere = torch.ones_like(z, dtype=torch.bool)
    return (y.abs() >= _KINK, everywhere) if of.forked else (everywhere,)


def _behind_cases(shape: tuple[int, ...], of: spec.BehindNorm, dtype: str) -> tuple[Case, Case]:
    """A norm and the convolution behind it as one operation; and apart, where the convolution is PyTorch's own."""
    n, c, h, w = shape
    rows = n * h * w
    forward, backward = spec.behind_norm_bytes_moved(
        rows, c, of.out_channels, of.activation, of.residual, forked=of.forked
    )
    flops = spec.flops(rows, c, of.out_channels)
    kernels = (spec.NORM_GRADIENT, batchnorm_spec.GRADIENT_SUMS, batchnorm_spec.BACKWARD)
    one_pass = not (
        spec.unsupported_norm_forward(dtype=dtype, channels=c, out_channels=of.out_channels, arch=90)
        or spec.norm_forward_wins(
            activation=of.activation, residual=of.residual, dtype=dtype, channels=c, out_channels=of.out_channels
        )
    )
    apply = (batchnorm_spec.FORWARD, spec.NORM_FORWARD) if one_pass else (batchnorm_spec.FORWARD,)
    wins = partial(
        spec.gradient_wins,
        activation=of.activation,
        residual=of.residual,
        forked=of.forked,
        dtype=dtype,
        rows=rows,
        channels=c,
        out_channels=of.out_channels,
    )
    together = Case(
        name=spec.behind_norm(of.activation, of.residual, c, of.out_channels) + (" forked" if of.forked else ""),
        kind=spec.behind_kind(of.activation, of.residual, of.forked),
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=apply, nbytes=forward, flops=flops, unit="matrix"),
            "backward": Work(kernels=kernels, nbytes=backward, flops=2 * flops, unit="matrix"),
        },
        inputs=partial(_behind_inputs, shape=shape, dtype=dtype, of=of),
        ours=partial(_behind, of=of),
        eager=partial(_behind_plain, of=of),
        reference=partial(_behind_plain, of=of),
        wins=wins,
        steady=partial(_behind_steady, of=of),
        gradient_floor=0.05,  # as of a norm alone
    )
    norm = {
        "forward": Work(kernels=(batchnorm_spec.FORWARD,), nbytes=forward, flops=flops, unit="matrix"),
        "backward": Work(kernels=(batchnorm_spec.BACKWARD,), nbytes=backward, flops=2 * flops, unit="matrix"),
    }
    apart = replace(
        together,
        name=together.name + moments_cases.APART,
        kind="",
        passes=norm,
        ours=partial(_behind_apart, of=of),
        wins=lambda: "" if wins() else "the norm takes its gradient's sums from the convolution",
    )
    return together, apart


BENCHMARK = (
    *(
        case
        for dtype in ("bfloat16", "float16")
        for c, out, side in spec.TRAINED
        if dtype == "bfloat16" or (c, out) == (64, 256)
        for case in _cases((256, c, side, side), out, dtype)
    ),
    *(case for of in spec.BEHIND_NORMS for case in _behind_cases((256, of.channels, of.side, of.side), of, "bfloat16")),
    *_behind_cases((256, 256, 56, 56), spec.BEHIND_NORMS[0], "float16"),
)
# Few and odd pixels, channels that fill no step, column or chunk, several chunks, several columns of blocks.
VERIFICATION = (
    *(
        _cases(shape, out, dtype)[0]
        for shape, out, dtype in (
            ((1, 8, 1, 2), 8, "float16"),
            ((2, 16, 5, 7), 64, "bfloat16"),
            ((3, 24, 9, 11), 72, "float16"),
            ((1, 64, 13, 5), 24, "bfloat16"),
            ((1, 40, 9, 9), 240, "bfloat16"),
            ((1, 136, 13, 11), 272, "bfloat16"),
            ((2, 200, 13, 11), 40, "float16"),
            ((1, 512, 5, 7), 128, "bfloat16"),
        )
    ),
    *(
        _behind_cases(shape, spec.BehindNorm(shape[1], out, 0, *variant), dtype)[0]
        for shape, out, dtype, variant in (
            ((2, 64, 5, 7), 16, "bfloat16", ("relu", True, True)),
            ((3, 24, 9, 11), 72, "float16", ("none", True, True)),
            ((1, 136, 13, 11), 200, "bfloat16", ("relu", True, False)),
            ((1, 8, 7, 5), 8, "float16", ("relu", False, False)),
            ((2, 40, 9, 9), 24, "bfloat16", ("hardswish", False, True)),
            ((1, 272, 5, 7), 512, "bfloat16", ("none", False, False)),
            ((2, 48, 6, 11), 136, "float16", ("relu6", True, True)),
            ((1, 128, 13, 11), 40, "bfloat16", ("relu", True, True)),
            ((3, 256, 7, 9), 128, "float16", ("relu", False, True)),
            ((2, 512, 5, 7), 72, "bfloat16", ("none", True, False)),
        )
    ),
)
