"""What a row's module is, in the words of who wrote it: its class, with the channels and the kernel of a convolution or norm."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from advisor.core.profile import ConvFact, KernelRow, StepProfile
from advisor.core.units import shape_text


def convolutions(profile: StepProfile) -> dict[str, ConvFact]:
    """The convolutions that were seen in the step, by the module of their rows."""
    return {fact.module: fact for fact in profile.model.convs}


def layer(row: KernelRow, convs: Mapping[str, ConvFact]) -> str:
    """As `Conv2d 64→128, 3×3`, `BatchNorm2d 64` or `Bottleneck`; "" for a row of no module."""
    if not row.module:
        return ""
    channels, kernel = _size(row, convs)
    words = [row.module_type, "→".join(map(str, channels))]
    fact = convs.get(row.module)
    extra = [shape_text(kernel)] if kernel else []
    extra += [f"{fact.groups} groups"] if fact is not None and fact.groups > 1 else []
    return ", ".join((" ".join(filter(None, words)), *extra))


def layers(rows: Iterable[KernelRow], convs: Mapping[str, ConvFact]) -> str:
    """The one layer that all these rows are of; of several their class, with the range of their channels."""
    rows = [row for row in rows if row.module]
    told = {layer(row, convs) for row in rows if _size(row, convs)[0]} or {layer(row, convs) for row in rows}
    if len(told) == 1:
        return told.pop()
    classes = {row.module_type for row in rows}
    channels = [number for row in rows for number in _size(row, convs)[0]]
    if len(classes) != 1 or not channels:
        return ""
    return f"{classes.pop()} {min(channels)} to {max(channels)} channels".strip()


def repeated(path: str) -> str:
    """The path with `*` for every index but the last component: `layer1.0.bn3` → `layer1.*.bn3`."""
    *parents, last = path.split(".")
    return ".".join([*("*" if p.isdigit() else p for p in parents), last])


def _size(row: KernelRow, convs: Mapping[str, ConvFact]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Channels (of a convolution in and out) and kernel, from its module, or from the shapes of the operator's inputs."""
    if (fact := convs.get(row.module)) is not None:
        return (fact.in_channels, fact.out_channels), fact.kernel
    shapes = _shapes(row)
    if row.kind == "norm" and shapes and len(shapes[0]) > 1:
        return (shapes[0][1],), ()
    if row.kind == "conv" and row.phase == "forward" and len(shapes) > 1 and len(shapes[0]) == len(shapes[1]) > 2:
        return (shapes[0][1], shapes[1][0]), tuple(shapes[1][2:])
    return (), ()


def _shapes(row: KernelRow) -> list[list[int]]:
    try:
        found: Any = json.loads(row.shapes) if row.shapes else []
    except ValueError:
        return []
    sound = isinstance(found, list) and all(
        isinstance(s, list) and all(isinstance(n, int) for n in s) for s in found[:2]
    )
    return found[:2] if sound else []
