"""Shapes at which the BatchNorm+activation+max-pool kernels are measured and verified."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from advisor.ops.batchnorm_act import spec as batchnorm_act
from advisor.ops.batchnorm_act.norm import Norm
from advisor.ops.batchnorm_max_pool import api, reference, spec
from advisor.ops.family import Arguments, Case, Work
from advisor.ops.pooling.spec import K2S2, K3S2, PoolWindow

_KINKS = {"relu": (0.0,), "relu6": (0.0, 6.0), "leaky_relu": (0.0,), "none": ()}


def _inputs(
    generator: torch.Generator, n: int, *, shape: tuple[int, ...], dtype: str, activation: str, window: PoolWindow
) -> Arguments:
    """x [n, C, H, W] channels_last, mean 0.5, deviation 1.5; a third of the weights negative; statistics [C] fp32."""
    device = generator.device
    _, c, h, w = shape
    values = torch.randn(n, h, w, c, device=device, generator=generator) * 1.5 + 0.5
    weight = torch.rand(c, device=device, generator=generator) + 0.5
    return (
        values.to(getattr(torch, dtype)).permute(0, 3, 1, 2).requires_grad_(),
        torch.zeros(c, device=device),
        torch.ones(c, device=device),
        torch.where(torch.arange(c, device=device) % 3 == 1, -weight, weight).requires_grad_(),
        torch.randn(c, device=device, generator=generator).requires_grad_(),
        0.1,
        1e-5,
        activation,
        0.1,
        *window.arguments,
    )


def _steady(x: torch.Tensor, *norm_and_pool: Any) -> torch.Tensor:
    """False within 1e-3 of a point where the activation's slope jumps."""
    norm = Norm._make(norm_and_pool[:8])
    z = reference.batchnorm_max_pool(x, *norm._replace(activation="none"), *norm_and_pool[8:])
    kinks = _KINKS[norm.activation]
    return torch.stack([torch.ones_like(z, dtype=torch.bool), *((z - k).abs() >= 1e-3 for k in kinks)]).all(0)


def _case(shape: tuple[int, ...], window: PoolWindow, dtype: str, activation: str = "relu") -> Case:
    n, c, h, w = shape
    oh, ow = window.output(h, w)
    forward, backward = spec.bytes_moved(
        inputs=n * c * h * w, outputs=n * c * oh * ow, itemsize=getattr(torch, dtype).itemsize
    )
    return Case(
        name=f"{spec.kind(activation)} {window.label}",
        kind=spec.kind(activation),
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(batchnorm_act.FORWARD, spec.FORWARD), nbytes=forward),
            "backward": Work(kernels=(batchnorm_act.BACKWARD, spec.BACKWARD), nbytes=backward),
        },
        inputs=partial(_inputs, shape=shape, dtype=dtype, activation=activation, window=window),
        ours=api.batchnorm_max_pool,
        eager=reference.batchnorm_max_pool,
        reference=reference.batchnorm_max_pool,
        wins=partial(spec.wins, activation, dtype),
        steady=_steady,
        gradient_floor=0.05,  # with few rows a channel dx is what cancellation leaves of dy
    )


# The stems of ResNet-50 and DenseNet-121, a VGG with batch norm, a UNet's first level.
BENCHMARK = (
    _case((256, 64, 112, 112), K3S2, "bfloat16"),
    _case((128, 64, 224, 224), K2S2, "bfloat16"),
    _case((32, 64, 256, 256), K2S2, "bfloat16"),
    *(_case((256, 64, 112, 112), K3S2, dtype) for dtype in ("float16", "float32")),
    # Xception's first block, no activation between: not dispatched until it is measured.
    _case((64, 128, 147, 147), K3S2, "bfloat16", "none"),
)
_WIDE = PoolWindow(kernel=(3, 2), stride=(2, 3), padding=(1, 1), dilation=(2, 1), ceil_mode=True)
# They run emulated in the tests too, where each variant is compiled.
VERIFICATION = (
    _case((3, 24, 13, 11), K3S2, "float32"),
    _case((3, 24, 13, 11), K3S2, "bfloat16"),
    _case((4, 8, 9, 10), K2S2, "float16", "leaky_relu"),
    _case((2, 264, 7, 6), _WIDE, "bfloat16", "relu6"),
)
