"""Changes that compute what the step computed: none may be refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from advisor.core.findings import Semantics
from advisor.core.transform_table import ROWS
from advisor.transforms.autocast import AutocastBf16, AutocastFp16
from advisor.transforms.base import Transform
from advisor.transforms.channels_last import ChannelsLast
from advisor.transforms.conv_bias import ConvBiasBeforeNorm
from advisor.transforms.cuda_graphs import CudaGraphs
from advisor.transforms.fused_optimizer import FusedOptimizer
from advisor.transforms.registry import get
from advisor.transforms.tf32 import Tf32
from numerics.loops import Change, Loop, Switch, named

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_ANYWHERE = {"cpu": "always"}


def put_on(loop: Loop, *transforms: Transform) -> tuple[Switch, ...] | None:
    """advisor's own changes, or None where one of them does not apply."""
    if not all(transform.match(loop.training, _ANYWHERE).applies for transform in transforms):
        return None

    def switch(transform: Transform) -> Callable[[], None]:
        return transform.apply(loop.training, _ANYWHERE).run

    return tuple(functools.partial(switch, transform) for transform in transforms)


def patched(module: nn.Module, make: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> Switch:
    """The module's forward is another one, made from its own."""

    def switch() -> Callable[[], None]:
        before = module.__dict__.get("forward")
        module.forward = make(module.forward)

        def off() -> None:
            if before is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = before

        return off

    return switch


def in_two_parts(conv: nn.Module) -> Switch:
    """The sum over input channels in two parts: another order."""

    def make(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def changed(x: Tensor) -> Tensor:
            half = x.shape[1] // 2
            weights = conv.weight.split([half, x.shape[1] - half], 1)
            first, second = x.split([half, x.shape[1] - half], 1)
            return conv._conv_forward(second, weights[1], conv.bias) + conv._conv_forward(first, weights[0], None)

        return changed

    return patched(conv, make)


def by_hand(norm: nn.Module) -> Switch:
    """A batch norm from two sums instead of torch's own kernel."""

    def make(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def changed(x: Tensor) -> Tensor:
            wide, dims = x.float(), [0, *range(2, x.dim())]
            shape = (1, -1, *[1] * (x.dim() - 2))
            count = x.numel() // x.shape[1]
            mean = wide.mean(dims)
            var = (wide - mean.view(shape)).square().mean(dims)
            with torch.no_grad():
                norm.running_mean.mul_(1 - norm.momentum).add_(norm.momentum * mean)
                norm.running_var.mul_(1 - norm.momentum).add_(norm.momentum * var * count / (count - 1))
                norm.num_batches_tracked.add_(1)
            scale = norm.weight * (var + norm.eps).rsqrt()
            return (wide * scale.view(shape) + (norm.bias - mean * scale).view(shape)).to(x.dtype)

        return changed

    return patched(norm, make)


def tf32(module: nn.Module) -> Switch:
    """Products of values rounded to TF32's ten bits, as tensor cores take them; the backward's as well."""

    def make(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x: _RoundedGradient.apply(forward(_RoundedValue.apply(x)))

    return patched(module, make)


def to_tf32(x: Tensor) -> Tensor:
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + (bits >> 13 & 1)) & ~0x1FFF).view(torch.float32)


class _RoundedValue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return to_tf32(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


class _RoundedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return to_tf32(gradient)


def other_numbers(model: nn.Module) -> Switch:
    """Random layers draw other numbers, as kernels in another order do on a GPU."""

    def make(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def changed(*args: object, **kwargs: object) -> Tensor:
            torch.rand(7)
            return forward(*args, **kwargs)

        return changed

    return patched(model, make)


def of_kernels(loop: Loop) -> tuple[Switch, ...]:
    """Every kernel family that finds something in these models."""
    found = (put_on(loop, get(name)) for name, row in ROWS.items() if row.family)
    return tuple(part for parts in found if parts for part in parts)


def changes(loop: Loop) -> Iterator[Change]:
    """All that apply to this training."""
    models = loop.script.models
    half, order = Semantics.PRECISION, Semantics.REASSOCIATED
    convs = [
        m
        for m in named(models, *_CONVOLUTIONS)
        if m.groups == 1 and m.in_channels > 1 and not hasattr(m, "parametrizations")
    ]
    norms = [m for m in named(models, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) if m.training]
    another = tuple(map(in_two_parts, convs)) + tuple(map(by_hand, norms))
    draws = tuple(map(other_numbers, models)) if "dropout" in loop.kind.traits else ()
    layout, bias, fused = (put_on(loop, kind()) for kind in (ChannelsLast, ConvBiasBeforeNorm, FusedOptimizer))
    found: list[tuple[str, tuple[Switch, ...] | None, Semantics, str]] = [
        ("channels_last", layout, order, ""),
        ("bias before norm", bias, order, ""),
        ("fused optimizer", fused, order, ""),
        ("another order", another, order, ""),
        ("other random numbers", draws or None, order, ""),
        ("another order, other random numbers", another + draws if draws else None, order, ""),
    ]
    if not loop.kind.autocast:
        bf16, fp16 = put_on(loop, AutocastBf16()), put_on(loop, AutocastFp16())
        assert bf16 is not None
        assert fp16 is not None
        rest = (layout or ()) + (bias or ()) + (fused or ())
        found += [
            ("bf16", bf16, half, "half"),
            ("bf16 and the rest", rest + bf16, half, "half"),
            ("bf16, another order", another + bf16 + draws, half, "half"),
            ("fp16, scaled", fp16, half, "half"),
        ]
        if loop.device.type == "cuda":
            found.append(("TF32", put_on(loop, Tf32()), half, "tf32"))
            kernels, graphs = of_kernels(loop), put_on(loop, CudaGraphs())
            found += [
                ("kernels", kernels or None, order, ""),
                ("bf16, channels_last, kernels", (layout or ()) + bf16 + kernels, half, "half"),
                ("bf16, graphs", bf16 + graphs if graphs else None, half, "half"),
                ("all at once", rest + bf16 + kernels + (graphs or ()), half, "half"),
            ]
        else:
            found.append(("TF32", tuple(map(tf32, named(models, *_CONVOLUTIONS, nn.Linear))), half, "tf32"))
    for name, parts, semantics, precision in found:
        if parts is not None:
            yield Change(name, parts, semantics, precision or "half")
