"""Shapes at which the squeeze-and-excite kernels are measured and verified."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional as F

from advisor.ops.family import Arguments, Case, Work
from advisor.ops.squeeze_excite import api, reference, spec

# (hidden, shape, activation, gate) at batch 256: EfficientNet-B0, MobileNetV3-L, RegNetY-3.2GF.
_TRAINED = (
    (8, (256, 32, 112, 112), "silu", "sigmoid"),
    (4, (256, 96, 56, 56), "silu", "sigmoid"),
    (6, (256, 144, 56, 56), "silu", "sigmoid"),
    (20, (256, 480, 14, 14), "silu", "sigmoid"),
    (48, (256, 1152, 7, 7), "silu", "sigmoid"),
    (32, (256, 120, 28, 28), "relu", "hardsigmoid"),
    (168, (256, 672, 14, 14), "relu", "hardsigmoid"),
    (240, (256, 960, 7, 7), "relu", "hardsigmoid"),
    (54, (256, 216, 28, 28), "relu", "sigmoid"),
    (144, (256, 576, 14, 14), "relu", "sigmoid"),
)
# Both activations and gates, every dtype; one pixel, hidden widths whose rows are not aligned, more tiles than one, N no
# multiple of the samples a block takes, without biases.
_ODD = (
    (4, (2, 8, 1, 1), "silu", "sigmoid", "bfloat16", True),
    (6, (5, 24, 5, 7), "relu", "hardsigmoid", "float32", True),
    (8, (3, 72, 9, 9), "relu", "hardsigmoid", "float16", False),
    (50, (1, 200, 7, 5), "relu", "hardsigmoid", "float32", True),
    (33, (2, 1016, 3, 3), "silu", "sigmoid", "bfloat16", False),
    (130, (37, 136, 2, 2), "relu", "hardsigmoid", "float16", True),
    (4, (2, 16, 70, 70), "silu", "sigmoid", "bfloat16", True),  # a pool whose sums come in five parts
)


def _inputs(
    generator: torch.Generator,
    n: int,
    *,
    shape: tuple[int, ...],
    hidden: int,
    dtype: str,
    rest: tuple[str, str],
    biased: bool,
) -> Arguments:
    """x [n, C, H, W] channels_last, mean 0.5, deviation 1.5; convolutions' weights and biases, fp32, as PyTorch begins them."""
    device = generator.device
    _, c, h, w = shape
    x = (torch.randn(n, h, w, c, device=device, generator=generator) * 1.5 + 0.5).to(getattr(torch, dtype))

    def parameter(*size: int, fan: int) -> torch.Tensor:
        values = torch.rand(size, device=device, generator=generator) * 2 - 1
        found: torch.Tensor = values / fan**0.5
        return found.requires_grad_()

    return (
        x.permute(0, 3, 1, 2).requires_grad_(),
        parameter(hidden, c, 1, 1, fan=c),
        parameter(hidden, fan=c) if biased else None,
        parameter(c, hidden, 1, 1, fan=hidden),
        parameter(c, fan=hidden) if biased else None,
        *rest,
    )


def _eager(
    x: torch.Tensor,
    w1: torch.Tensor,
    b1: torch.Tensor | None,
    w2: torch.Tensor,
    b2: torch.Tensor | None,
    activation: str,
    gate: str,
) -> torch.Tensor:
    """As torchvision writes it, under autocast where x is of half precision."""
    with torch.autocast(x.device.type, x.dtype, enabled=x.dtype in (torch.float16, torch.bfloat16)):
        h = F.conv2d(F.adaptive_avg_pool2d(x, 1), w1, b1)
        z = F.conv2d(F.relu(h) if activation == "relu" else F.silu(h), w2, b2)
        scale: torch.Tensor = torch.sigmoid(z) if gate == "sigmoid" else F.hardsigmoid(z)
        y: torch.Tensor = scale * x
    return y


def _case(hidden: int, shape: tuple[int, ...], activation: str, gate: str, dtype: str, biased: bool = True) -> Case:
    n, c, h, w = shape
    forward, backward = spec.bytes_moved(elements=n * c * h * w, dtype=dtype)
    flops = spec.flops(shape=shape, hidden=hidden)
    return Case(
        name=spec.name(activation, gate),
        kind=spec.name(activation, gate),
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.FORWARD, spec.GATE), nbytes=forward, flops=flops[0]),
            "backward": Work(kernels=(spec.GATE, spec.BACKWARD), nbytes=backward, flops=flops[1]),
        },
        inputs=partial(_inputs, shape=shape, hidden=hidden, dtype=dtype, rest=(activation, gate), biased=biased),
        ours=api.squeeze_excite,
        eager=_eager,
        reference=reference.squeeze_excite,
        wins=partial(spec.wins, channels=c, hidden=hidden, activation=activation, gate=gate, dtype=dtype),
        gradient_floor=0.05,
    )


BENCHMARK = (
    *(_case(*case, "bfloat16") for case in _TRAINED),
    *(_case(*case, dtype) for dtype in ("float16", "float32") for case in (_TRAINED[1], _TRAINED[6])),
)
VERIFICATION = tuple(_case(*case) for case in _ODD)
