"""Sets of weights with which the kernel that casts many tensors is measured and verified: those of trained networks."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import torch

from advisor.ops.casts import api, reference, spec
from advisor.ops.family import Arguments, Case, Work

Sizes = tuple[tuple[int, ...], ...]


def _inputs(generator: torch.Generator, n: int, *, sizes: Sizes) -> Arguments:
    """The first n weights in fp32, filters channels_last."""
    found = []
    for size in sizes[:n]:
        weight = torch.randn(size, device=generator.device, generator=generator)
        if len(size) == 4:
            weight = weight.contiguous(memory_format=torch.channels_last)
        found.append(weight.requires_grad_())
    return tuple(found)


def _case(name: str, sizes: Sizes, dtype: str = "bfloat16") -> Case:
    """`shape`: how many weights, and how many values each has on average."""
    elements = sum(map(math.prod, sizes))
    work = Work(kernels=(spec.CAST,), nbytes=spec.bytes_moved(elements))
    kind = getattr(torch, dtype)
    return Case(
        name=f"weights of {name}",
        kind=spec.WEIGHTS,
        shape=(len(sizes), round(elements / len(sizes))),
        dtype=dtype,
        passes={"forward": work, "backward": work},
        inputs=partial(_inputs, sizes=sizes),
        ours=partial(api.cast, kind),
        eager=partial(api.cast, kind, by=api.copies_by_torch),
        reference=reference.cast,
        wins=partial(spec.wins, len(sizes), elements, dtype, captured=False),
        layout="nhwc",
    )


def _bottlenecks(stages: tuple[int, ...]) -> Sizes:
    """Weights of a ResNet of bottleneck blocks on ImageNet."""
    found: list[tuple[int, ...]] = [(64, 3, 7, 7)]
    inputs = 64
    for stage, blocks in enumerate(stages):
        width = 64 * 2**stage
        for block in range(blocks):
            found += [(width, inputs, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            found += [(4 * width, inputs, 1, 1)] if block == 0 else []
            inputs = 4 * width
    return (*found, (1000, inputs), (1000,))


def _basic(stages: tuple[int, ...], first: tuple[int, ...], classes: int) -> Sizes:
    """Weights of a ResNet of basic blocks."""
    found, inputs = [first], 64
    for stage, blocks in enumerate(stages):
        width = 64 * 2**stage
        for _ in range(blocks):
            found += [(width, inputs, 3, 3), (width, width, 3, 3)]
            found += [(width, inputs, 1, 1)] if width != inputs else []
            inputs = width
    return (*found, (classes, inputs), (classes,))


def _vgg16() -> Sizes:
    widths = (3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)
    convolutions = [s for i, o in pairwise(widths) for s in ((o, i, 3, 3), (o,))]
    return (*convolutions, (4096, 25088), (4096,), (4096, 4096), (4096,), (1000, 4096), (1000,))


def _densenet121() -> Sizes:
    found: list[tuple[int, ...]] = [(64, 3, 7, 7)]
    channels = 64
    for layers in (6, 12, 24, 16):
        for _ in range(layers):
            found += [(128, channels, 1, 1), (32, 128, 3, 3)]
            channels += 32
        if layers != 16:
            found.append((channels // 2, channels, 1, 1))
            channels //= 2
    return (*found, (1000, channels), (1000,))


def _inverted() -> Sizes:
    """Weights like a MobileNetV2's: many, and few values in each."""
    found: list[tuple[int, ...]] = [(32, 3, 3, 3)]
    inputs = 32
    for expansion, width, blocks in (
        (1, 16, 1),
        (6, 24, 2),
        (6, 32, 3),
        (6, 64, 4),
        (6, 96, 3),
        (6, 160, 3),
        (6, 320, 1),
    ):
        for _ in range(blocks):
            hidden = inputs * expansion
            found += [(hidden, inputs, 1, 1)] if expansion > 1 else []
            found += [(hidden, 1, 3, 3), (width, hidden, 1, 1)]
            inputs = width
    return (*found, (1280, inputs, 1, 1), (1000, 1280), (1000,))


NETWORKS: dict[str, Sizes] = {
    "resnet18 cifar": _basic((2, 2, 2, 2), (64, 3, 3, 3), 10),
    "resnet50": _bottlenecks((3, 4, 6, 3)),
    "vgg16": _vgg16(),
    "densenet121": _densenet121(),
    "mobilenet_v2": _inverted(),
}
BENCHMARK = (
    *(_case(name, sizes) for name, sizes in NETWORKS.items()),
    _case("resnet18 cifar", NETWORKS["resnet18 cifar"], "float16"),
)
_CHUNK = spec.THREADS * 4 * spec.UNROLL
# One value, fewer than a vector, a block's end, more tensors than a launch takes.
_ODD: Sizes = ((1,), (5, 3, 3, 3), (3,), (2, _CHUNK), (_CHUNK - 1,), (7, 8, 1, 1), (_CHUNK + 5,))
VERIFICATION = (
    _case("odd sizes", _ODD),
    _case("odd sizes", _ODD, "float16"),
    _case("two launches", ((3, 2, 3, 3), (7,)) * (spec.TENSORS // 2 + 3)),
    _case("one", ((9, 11),), "float16"),
)
