"""Shapes at which the BatchNorm(+add)+activation kernels are measured and verified."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from advisor.core import architectures
from advisor.ops import storage
from advisor.ops.batchnorm_act import api, reference, spec
from advisor.ops.family import Arguments, Case, Work

# The batch norms of ResNet-50 at batch 256, of MobileNetV3 at batch 256 and of CIFAR ResNet-18 at batch 128.
_TRAINED = (
    (256, 64, 112, 112),
    (256, 256, 56, 56),
    (256, 512, 28, 28),
    (256, 1024, 14, 14),
    (256, 2048, 7, 7),
    (256, 72, 56, 56),
    (256, 672, 14, 14),
    (128, 64, 32, 32),
    (128, 512, 4, 4),
)
# Those of CIFAR ResNet-18 at batch 128 and of ResNet-50 at batch 256 whose rows fit a cluster's registers.
_HELD = ((128, 512, 4, 4), (128, 256, 8, 8), (128, 128, 16, 16), (256, 2048, 7, 7), (256, 1024, 14, 14))
# Those that the registers and shared memory of all SMs hold, of the same, MobileNetV3 and EfficientNet-B0.
_ON_CHIP = (
    (128, 64, 32, 32),
    *_HELD[:3],
    (256, 256, 14, 14),
    (256, 512, 7, 7),
    (256, 960, 7, 7),
    (256, 80, 14, 14),
    (256, 40, 28, 28),
)
# Whose results are used twice: the ends of ResNet-50's blocks, those of CIFAR ResNet-18 at batch 128, MobileNetV2's.
_BLOCK_ENDS = ((256, 256, 56, 56), (256, 512, 28, 28), (256, 1024, 14, 14), (256, 2048, 7, 7))
_SMALL_BLOCK_ENDS = ((128, 64, 32, 32), (128, 128, 16, 16), (128, 256, 8, 8), (128, 512, 4, 4))
_BOTTLENECKS = ((256, 24, 56, 56), (256, 96, 14, 14))
# Rows that are neither a few cache lines nor whole ones, of EfficientNet-B0, RegNetY-3.2GF and MobileNetV2 at batch 256.
_UNEVEN = (
    *(((256, *chw), "silu") for chw in ((144, 56, 56), (240, 28, 28), (480, 14, 14))),
    *(((256, *chw), "relu") for chw in ((216, 56, 56), (216, 28, 28), (1512, 14, 14))),
    ((256, 192, 28, 28), "relu6"),
)
# Whose channels are no whole vectors, of ShuffleNetV2 and ReXNet at batch 256.
_JOINED = ((256, 58, 28, 28), (256, 116, 14, 14), (256, 27, 56, 56), (256, 162, 28, 28))
_SMALL_JOINED = ((32, 58, 28, 28), (8, 116, 14, 14))
# Odd sizes: few rows, a prime number of vectors, N = 1, one pixel. Channels are multiples of 8, which every dtype takes.
_ODD = ((4, 64, 28, 28), (3, 72, 9, 7), (2, 1016, 5, 3), (1, 24, 7, 5), (2, 8, 1, 1))
_KINKS = (-3.0, 0.0, 3.0, 6.0)


def inputs_of(
    generator: torch.Generator, n: int, *, shape: tuple[int, ...], dtype: str, activation: str, residual: bool
) -> Arguments:
    """x and residual [n, C, H, W] channels_last, mean 0.5, deviation 1.5; statistics, weight and bias [C] fp32."""
    device = generator.device
    _, c, h, w = shape

    def tensor() -> torch.Tensor:
        values = torch.randn(n, h, w, c, device=device, generator=generator) * 1.5 + 0.5
        return values.to(getattr(torch, dtype)).permute(0, 3, 1, 2).requires_grad_()

    return (
        tensor(),
        tensor() if residual else None,
        torch.zeros(c, device=device),
        torch.ones(c, device=device),
        (torch.rand(c, device=device, generator=generator) + 0.5).requires_grad_(),
        torch.randn(c, device=device, generator=generator).requires_grad_(),
        0.1,
        1e-5,
        activation,
        0.01,
    )


def _incomplete_inputs(
    generator: torch.Generator,
    n: int,
    *,
    shape: tuple[int, ...],
    dtype: str,
    activation: str,
    residual: bool,
    without: str,
) -> Arguments:
    """As `inputs_of`, without affine parameters or without running statistics."""
    x, second, *rest = inputs_of(generator, n, shape=shape, dtype=dtype, activation=activation, residual=residual)
    given = [None, None, *rest[2:4]] if without == spec.NO_STATISTICS else [*rest[:2], None, None]
    return (x, second, *given, *rest[4:])


def _frozen_inputs(
    generator: torch.Generator,
    n: int,
    *,
    shape: tuple[int, ...],
    dtype: str,
    activation: str,
    residual: bool,
    affine_gradients: bool,
) -> Arguments:
    """As `inputs_of`, with statistics near those of x, and none to update."""
    x, second, mean, variance, weight, bias, _, *rest = inputs_of(
        generator, n, shape=shape, dtype=dtype, activation=activation, residual=residual
    )
    mean += 0.5 + 0.1 * torch.randn(mean.shape, device=mean.device, generator=generator)
    variance += 1.0 + torch.rand(mean.shape, device=mean.device, generator=generator)
    affine = (parameter.detach().requires_grad_(affine_gradients) for parameter in (weight, bias))
    return (x, second, mean, variance, *affine, *rest)


def _steady(*arguments: object, function: Callable[..., torch.Tensor] = reference.batchnorm_act) -> torch.Tensor:
    """False within 1e-3 of a point where an activation's slope jumps."""
    *tensors, _, _ = arguments
    z = function(*tensors)
    return torch.stack([(z - kink).abs() >= 1e-3 for kink in _KINKS]).all(0)


def _steady_twice(*arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
    mask = _steady(*arguments)
    return mask, mask


def case_of(
    shape: tuple[int, ...],
    dtype: str,
    activation: str,
    residual: bool,
    *,
    way: str | None = None,
    without: str = "",
    forked: bool = False,
) -> Case:
    """In training mode: as it is dispatched or, named so, in one of spec.WAYS.

    Of channels that are no whole vectors, rows are joined. `forked` takes two gradients, whose sum in PyTorch is autograd's: outside
    what torch.compile sees, here as wherever a graph gives one tensor out twice.
    """
    n, c, h, w = shape
    passes, as_dispatched = {}, True
    joined = spec.joined(c, dtype) > 1
    for kind in ("forward", "backward"):
        work: Callable[..., tuple[str, int]] = partial(
            spec.work,
            *(n * h * w, c, dtype, activation),
            residual=residual,
            forked=forked,
            backward=kind == "backward",
            sm_count=architectures.MEASURED.sms,
            arch=90,
        )
        kernel, nbytes = work(way=way)
        as_dispatched &= kernel == work()[0]
        passes[kind] = Work(
            kernels=(kernel, spec.JOINED_ROWS) if joined and kernel in (spec.FORWARD, spec.BACKWARD) else (kernel,),
            nbytes=nbytes,
        )
    inputs = partial(_incomplete_inputs, without=without) if without else inputs_of
    variant = spec.FORKED if forked else spec.JOINED if joined else without
    wins = partial(spec.wins, activation=activation, residual=residual, dtype=dtype, variant=variant)
    function: Callable[..., Any] = api.forked_batchnorm_act if forked else api.batchnorm_act
    plain: Callable[..., Any] = reference.forked_batchnorm_act if forked else reference.batchnorm_act
    if not as_dispatched:
        wins = partial(str, "slower than another way at this size, or not measured")
    return Case(
        name=" ".join(filter(None, (spec.name(activation, residual), variant, way))),
        shape=shape,
        dtype=dtype,
        passes=passes,
        inputs=partial(inputs, shape=shape, dtype=dtype, activation=activation, residual=residual),
        ours=function if way is None else partial(function, way=way),
        eager=plain,
        reference=plain,
        wins=wins,
        steady=_steady_twice if forked else _steady,
        kind=spec.kind(activation, residual, variant),
        # With few rows a channel dx is what cancellation leaves of dy; of two rows nothing is left but rounding, times the inverse
        # deviation: of 30 draws in fp32 PyTorch's own error went from 2.5e-7 to 6e-4 of a twentieth of dy, and ours with it.
        gradient_floor=1.0 if n * h * w <= 2 else 0.05,
    )


def frozen_case_of(shape: tuple[int, ...], dtype: str, activation: str, residual: bool, affine_gradients: bool) -> Case:
    """By running statistics, in training; with `affine_gradients` False weight and bias are frozen too."""
    forward, backward = spec.frozen_bytes_moved(
        elements=math.prod(shape),
        itemsize=getattr(torch, dtype).itemsize,
        activation=activation,
        residual=residual,
        affine_gradients=affine_gradients,
    )
    variant = spec.FROZEN if affine_gradients else spec.FROZEN_AFFINE
    return Case(
        name=spec.kind(activation, residual, variant),
        kind=spec.kind(activation, residual, variant),
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.FROZEN_FORWARD,), nbytes=forward),
            "backward": Work(kernels=(spec.FROZEN_BACKWARD,), nbytes=backward),
        },
        inputs=partial(
            _frozen_inputs,
            shape=shape,
            dtype=dtype,
            activation=activation,
            residual=residual,
            affine_gradients=affine_gradients,
        ),
        ours=api.frozen_batchnorm_act,
        eager=reference.frozen_batchnorm_act,
        reference=reference.frozen_batchnorm_act,
        wins=partial(spec.wins, activation=activation, residual=residual, dtype=dtype, variant=spec.FROZEN),
        steady=partial(_steady, function=reference.frozen_batchnorm_act),
    )


_MEASURED = (("relu", False), ("relu", True), ("none", False), ("hardswish", False))
_OTHER_ACTIVATIONS = ("leaky_relu", "silu", "gelu")

_RELU = (("relu", False), ("relu", True))
_LARGE = (256, 256, 56, 56)

BENCHMARK = (
    *(
        case_of(shape, dtype, activation, residual)
        for dtype in ("bfloat16", "float16", "float32")
        for activation, residual in _MEASURED
        for shape in (_TRAINED if dtype == "bfloat16" else _TRAINED[:3])
    ),
    *(case_of(shape, "bfloat16", activation, False) for activation in _OTHER_ACTIVATIONS for shape in _TRAINED[::3]),
    *(
        case_of(_TRAINED[0], dtype, activation, False)
        for activation in _OTHER_ACTIVATIONS
        for dtype in ("float16", "float32")
    ),
    *(case_of(shape, "bfloat16", activation, False) for shape, activation in _UNEVEN),
    *(case_of(shape, "bfloat16", activation, False) for shape in _JOINED for activation in ("none", "relu")),
    *(case_of(shape, "bfloat16", "relu", False) for shape in _SMALL_JOINED),
    *(case_of(_JOINED[0], dtype, "relu", False) for dtype in ("float16", "float32")),
    case_of(_JOINED[3], "bfloat16", "relu", True),
    # One launch beside two, which the cases above have for the shapes that stand there too.
    *(case_of(shape, "bfloat16", *variant) for shape in _HELD if shape not in _TRAINED for variant in _RELU),
    *(case_of(shape, "bfloat16", *variant, way=spec.CLUSTER) for shape in _HELD for variant in _RELU),
    *(
        case_of(shape, dtype, "relu", False, way=way)
        for shape, dtype in ((_HELD[0], "float32"), (_HELD[1], "float16"))
        for way in spec.WAYS
    ),
    *(
        case_of(shape, "bfloat16", *variant, way=way)
        for shape in _ON_CHIP
        for variant in _RELU
        for way in (spec.TWO, spec.GRID)
    ),
    *(
        case_of(shape, "bfloat16", "relu", True, way=way, forked=True)
        for shape in _SMALL_BLOCK_ENDS
        for way in (spec.TWO, spec.GRID)
    ),
    *(frozen_case_of(_LARGE, "bfloat16", *variant, wanted) for variant in _RELU for wanted in (True, False)),
    *(case_of(_LARGE, "bfloat16", "relu", False, without=what) for what in (spec.NO_AFFINE, spec.NO_STATISTICS)),
    *(case_of(shape, "bfloat16", "relu", True, forked=True) for shape in (*_BLOCK_ENDS, *_SMALL_BLOCK_ENDS)),
    *(case_of(_BLOCK_ENDS[0], dtype, "relu", True, forked=True) for dtype in ("float16", "float32")),
    *(
        case_of(shape, "bfloat16", activation, False, forked=True)
        for activation in ("relu", "leaky_relu", "silu")
        for shape in _BLOCK_ENDS[1:3]
    ),
    *(
        case_of(shape, "bfloat16", "none", residual, forked=forked)
        for shape in _BOTTLENECKS
        for residual, forked in ((True, False), (True, True), (False, True))
    ),
)
_VARIANTS = (*((a, False) for a in spec.ACTIVATIONS), *((a, True) for a in sorted(spec.RESIDUAL_ACTIVATIONS)))
_EACH = tuple(enumerate(itertools.product(_VARIANTS, storage.STORAGE)))
# Each variant with one dtype after the other, at one shape after the other.
_IN_TURN = tuple(
    (_ODD[i % len(_ODD)], dtype, *variant)
    for i, (variant, dtype) in enumerate(zip(_VARIANTS, itertools.cycle(storage.STORAGE), strict=False))
)
# Each variant and dtype at two of the shapes, so that every shape meets every dtype. In the tests each is compiled to run
# emulated: of what the sources in one launch, and frozen, share with these there is less.
VERIFICATION = (
    *(
        case_of(_ODD[(i + second) % len(_ODD)], dtype, *variant, way=spec.TWO)
        for i, (variant, dtype) in _EACH
        for second in (0, 2)
    ),
    *(case_of(*one, way=spec.CLUSTER) for one in _IN_TURN),
    *(case_of(*one, way=spec.GRID) for one in _IN_TURN[::2]),
    *(frozen_case_of(*one, i % 2 == 0) for i, one in enumerate(_IN_TURN)),
    frozen_case_of(_ODD[1], "bfloat16", "relu", True, True),
    frozen_case_of(_ODD[2], "bfloat16", "relu", False, True),
    frozen_case_of(_ODD[3], "float16", "silu", False, True),
    # Of two rows next to nothing of a gradient is left, and what g is rounded by behind its sums (two gradients) is as much.
    *(
        case_of(shape if shape != _ODD[4] else _ODD[1], dtype, act, residual, way=spec.WAYS[i % 3], forked=True)
        for i, (shape, dtype, act, residual) in enumerate(_IN_TURN)
    ),
    *(case_of(_ODD[i], "bfloat16", "relu", True, way=way, forked=True) for i, way in enumerate(spec.WAYS)),
    case_of(_ODD[1], "bfloat16", "relu", True, without=spec.NO_AFFINE, way=spec.TWO),
    case_of((3, 200, 9, 7), "bfloat16", "relu", True, way=spec.TWO),  # a row of 25 vectors whole
    *(  # two, four and eight rows for one; of fp32 two and four, or it is whole vectors
        case_of(shape, dtype, *_VARIANTS[(3 * i + j) % len(_VARIANTS)])
        for i, shape in enumerate(((3, 36, 8, 7), (4, 58, 6, 5), (8, 27, 5, 3), (8, 1, 2, 1), (2, 522, 4, 2)))
        for j, dtype in enumerate(storage.STORAGE)
    ),
    case_of((8, 11, 3, 3), "bfloat16", "relu", True),
    case_of((8, 11, 3, 3), "float32", "silu", False, without=spec.NO_AFFINE),
    case_of((8, 11, 3, 3), "float16", "none", False, without=spec.NO_STATISTICS),
    case_of(_ODD[1], "float32", "relu", False, without=spec.NO_STATISTICS, way=spec.TWO),
)
