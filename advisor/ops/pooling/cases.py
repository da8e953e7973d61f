"""Shapes at which the pooling kernels are measured and verified."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from advisor.ops import storage
from advisor.ops.family import Arguments, Case, Work
from advisor.ops.pooling import api, reference, spec
from advisor.ops.pooling.spec import K2S2, K3S1, K3S2, PoolWindow

# max-pool: the stems of ResNet-50 and DenseNet-121, VGG-16's five, two of GoogLeNet's branches and its ceil_mode one.
_CEIL = PoolWindow(kernel=(3, 3), stride=(2, 2), ceil_mode=True)
_MAX = (
    ((256, 64, 112, 112), K3S2),
    ((128, 64, 224, 224), K2S2),
    ((128, 128, 112, 112), K2S2),
    ((128, 256, 56, 56), K2S2),
    ((128, 512, 28, 28), K2S2),
    ((128, 512, 14, 14), K2S2),
    ((256, 192, 28, 28), K3S1),
    ((256, 832, 7, 7), K3S1),
    ((256, 480, 28, 28), _CEIL),
)
# avg-pool: DenseNet-121's transitions, Inception's branch.
_AVG = (((256, 128, 56, 56), K2S2), ((256, 256, 28, 28), K2S2), ((256, 512, 14, 14), K2S2), ((256, 288, 35, 35), K3S1))
# Last layers of ResNet-50, DenseNet-121, MobileNetV3, EfficientNet-B0; a squeeze-and-excite block of EfficientNet.
_GLOBAL = ((256, 2048, 7, 7), (256, 1024, 7, 7), (256, 960, 7, 7), (256, 1280, 7, 7), (256, 96, 56, 56))


def _input(generator: torch.Generator, n: int, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """[n, C, H, W] channels_last, mean 0.5, deviation 1.5."""
    _, c, h, w = shape
    values = torch.randn(n, h, w, c, device=generator.device, generator=generator) * 1.5 + 0.5
    return values.to(getattr(torch, dtype)).permute(0, 3, 1, 2).requires_grad_()


def _inputs(
    generator: torch.Generator, n: int, *, shape: tuple[int, ...], dtype: str, rest: tuple[object, ...]
) -> Arguments:
    return (_input(generator, n, shape, dtype), *rest)


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    itemsize: int = getattr(torch, dtype).itemsize
    return math.prod(shape) * itemsize


def _elements(shape: tuple[int, ...], window: PoolWindow) -> tuple[int, int]:
    n, c, h, w = shape
    oh, ow = window.output(h, w)
    return n * c * h * w, n * c * oh * ow


def _max(shape: tuple[int, ...], window: PoolWindow, dtype: str) -> Case:
    inputs, outputs = _elements(shape, window)
    forward, backward = spec.bytes_max(inputs=inputs, outputs=outputs, itemsize=getattr(torch, dtype).itemsize)
    return Case(
        name=f"max_pool {window.label}",
        kind="max_pool",
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.MAX_FORWARD,), nbytes=forward),
            "backward": Work(kernels=(spec.MAX_BACKWARD,), nbytes=backward),
        },
        inputs=partial(_inputs, shape=shape, dtype=dtype, rest=window.arguments),
        ours=api.max_pool2d,
        eager=F.max_pool2d,
        reference=reference.max_pool2d,
        wins=partial(spec.wins, "max_pool", dtype=dtype, nbytes=_bytes(shape, dtype)),
    )


def _bias_inputs(
    generator: torch.Generator, n: int, *, shape: tuple[int, ...], dtype: str, window: PoolWindow
) -> Arguments:
    """x [n, C, H, W] and bias [C] fp32, below which about half of the maxima stay."""
    bias = torch.randn(shape[1], device=generator.device, generator=generator) - 1.5
    return (_input(generator, n, shape, dtype), bias.requires_grad_(), *window.arguments)


def _bias_eager(x: torch.Tensor, bias: torch.Tensor, *window: Any) -> torch.Tensor:
    """What PyTorch runs behind a convolution in channels_last: a pass for its bias, ReLU in place, pooling."""
    pooled: torch.Tensor = F.max_pool2d(F.relu_(x + bias.to(x.dtype).view(1, -1, 1, 1)), *window)
    return pooled


def _bias_steady(x: torch.Tensor, bias: torch.Tensor, *window: Any) -> torch.Tensor:
    """False where rounding to 16 bits may take a maximum over zero, or the eager sums of two elements to one."""
    largest = reference.max_pool2d(x + bias.view(1, -1, 1, 1), *window)
    return largest.abs() >= 0.05


def bias_max_case(shape: tuple[int, ...], window: PoolWindow, dtype: str) -> Case:
    """Max-pooling behind a bias and ReLU."""
    inputs, outputs = _elements(shape, window)
    forward, backward = spec.bytes_max(inputs=inputs, outputs=outputs, itemsize=getattr(torch, dtype).itemsize)
    return Case(
        name=f"{spec.BIAS_RELU} {window.label}",
        kind=spec.BIAS_RELU,
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.MAX_FORWARD,), nbytes=forward),
            "backward": Work(kernels=(spec.BIAS_BACKWARD,), nbytes=backward),
        },
        inputs=partial(_bias_inputs, shape=shape, dtype=dtype, window=window),
        ours=api.bias_relu_max_pool2d,
        eager=_bias_eager,
        reference=reference.bias_relu_max_pool2d,
        wins=partial(spec.wins, spec.BIAS_RELU, dtype=dtype, nbytes=_bytes(shape, dtype)),
        steady=_bias_steady,
    )


def _avg(
    shape: tuple[int, ...], window: PoolWindow, dtype: str, include: bool = True, divisor: int | None = None
) -> Case:
    inputs, outputs = _elements(shape, window)
    forward, backward = spec.bytes_avg(inputs=inputs, outputs=outputs, itemsize=getattr(torch, dtype).itemsize)
    variant = "" if include else " inside"
    return Case(
        name=f"avg_pool {window.label}{variant}" + ("" if divisor is None else f" over {divisor}"),
        kind="avg_pool",
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.AVG_FORWARD,), nbytes=forward),
            "backward": Work(kernels=(spec.AVG_BACKWARD,), nbytes=backward),
        },
        inputs=partial(
            _inputs, shape=shape, dtype=dtype, rest=(*window.arguments[:3], window.ceil_mode, include, divisor)
        ),
        ours=api.avg_pool2d,
        eager=F.avg_pool2d,
        reference=reference.avg_pool2d,
        wins=partial(spec.wins, "avg_pool", dtype=dtype, nbytes=_bytes(shape, dtype)),
    )


def _global(shape: tuple[int, ...], dtype: str) -> Case:
    n, c, h, w = shape
    forward, backward = spec.bytes_avg(inputs=n * c * h * w, outputs=n * c, itemsize=getattr(torch, dtype).itemsize)
    return Case(
        name="global_avg_pool",
        kind="global_avg_pool",
        shape=shape,
        dtype=dtype,
        passes={
            "forward": Work(kernels=(spec.GLOBAL_AVG,), nbytes=forward),
            "backward": Work(kernels=(spec.GLOBAL_AVG,), nbytes=backward),
        },
        inputs=partial(_inputs, shape=shape, dtype=dtype, rest=()),
        ours=api.global_avg_pool2d,
        eager=reference.global_avg_pool2d,
        reference=reference.global_avg_pool2d,
        wins=partial(spec.wins, "global_avg_pool", dtype=dtype, nbytes=_bytes(shape, dtype)),
    )


_OTHERS = ("float16", "float32")

_VGG = _MAX[1:6]
_ALEXNET = ((128, 64, 55, 55), PoolWindow(kernel=(3, 3), stride=(2, 2)))

BENCHMARK = (
    *(_max(shape, window, "bfloat16") for shape, window in _MAX),
    *(bias_max_case(shape, window, "bfloat16") for shape, window in (*_VGG, _ALEXNET)),
    *(bias_max_case(*_VGG[1], dtype) for dtype in ("float16", "float32")),
    *(_avg(shape, window, "bfloat16") for shape, window in _AVG),
    *(_global(shape, "bfloat16") for shape in _GLOBAL),
    *(_max(*_MAX[0], dtype) for dtype in _OTHERS),
    *(_avg(*_AVG[0], dtype) for dtype in _OTHERS),
    *(_global(_GLOBAL[0], dtype) for dtype in _OTHERS),
)

_WIDE = PoolWindow(kernel=(3, 2), stride=(2, 3), padding=(1, 1), dilation=(2, 1), ceil_mode=True)
_SPARSE = PoolWindow(kernel=(2, 2), stride=(3, 3))  # elements that no window covers
# Every variant in bf16, every kernel in every dtype. They run emulated in the tests too, where each variant is compiled.
VERIFICATION = (
    _max((1, 72, 9, 7), K3S1, "bfloat16"),
    _max((2, 264, 7, 6), _WIDE, "bfloat16"),
    _max((2, 16, 8, 11), _SPARSE, "bfloat16"),
    bias_max_case((2, 264, 7, 6), _WIDE, "bfloat16"),
    bias_max_case((2, 16, 8, 11), _SPARSE, "bfloat16"),
    bias_max_case((3, 520, 9, 5), K2S2, "bfloat16"),
    _avg((1, 72, 9, 7), K3S1, "bfloat16", divisor=7),
    _avg((2, 264, 6, 8), _WIDE._replace(dilation=(1, 1)), "bfloat16"),
    _global((3, 1032, 1, 1), "bfloat16"),
    _global((1, 8, 64, 33), "bfloat16"),
    *(
        case
        for dtype in storage.STORAGE
        for case in (
            _max((2, 24, 13, 11), K3S2, dtype),
            bias_max_case((2, 24, 13, 11), K3S2, dtype),
            _avg((2, 24, 13, 11), K3S2, dtype, include=False),
            _global((2, 24, 13, 11), dtype),
        )
    ),
)
