"""What each module of the table of layers is: kind of work, input, number type and layout, and the algorithm that runs it. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from advisor.analysis.convolutions import products
from advisor.core import layers
from advisor.core.held import ACTIVATION, MemoryLook
from advisor.core.profile import KernelRow, StepProfile
from advisor.core.units import shape_text
from advisor.reporting import numbers

# Operators whose first operand is a bias, and the second the input.
BIAS_FIRST = frozenset({"aten::addmm", "aten::_addmm_activation", "aten::addmv", "aten::addbmm", "aten::baddbmm"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Of a module's own rows, not those of modules below it. Texts are empty where a run does not tell."""

    kind: str = ""  # as KernelRow.kind
    layer: str = ""  # `Conv2d 64→128, 3×3`
    shape: str = ""  # of its input: `8×64×56×56`
    numbers: str = ""  # `bf16 nhwc`
    algorithm: str = ""


def layer_table(profile: StepProfile) -> dict[str, Layer]:
    """Module path → what it is."""
    convs = layers.convolutions(profile)
    algorithms: dict[str, list[str]] = {}
    for product in products(profile):
        algorithms.setdefault(product.module, []).append(product.algorithm)
    own: dict[str, list[KernelRow]] = {}
    for row in profile.kernels:
        if row.module:
            own.setdefault(row.module, []).append(row)
    found = {}
    for module, rows in own.items():
        first = max(rows, key=lambda r: (r.phase == "forward", r.time_us, r.name))
        same = [row for row in rows if row.kind == first.kind]
        runs = algorithms.get(module) or [numbers.kernel_name(first.name).removeprefix("aten::")]
        known = [algorithm for algorithm in runs if algorithm != "other"]
        found[module] = Layer(
            kind=first.kind,
            layer=layers.layer(first, convs),
            shape=_input(first) or next(filter(None, map(_input, rows)), ""),
            numbers=" ".join(filter(None, (_told(r.dtype for r in same), _told(r.layout for r in same)))),
            algorithm=_told(known or runs),
        )
    return found


def kept_below(look: MemoryLook | None) -> dict[str, int]:
    """Module path → bytes that its forward, and those of modules below it, keep for the backward."""
    found: dict[str, int] = {}
    for row in look.rows if look is not None else ():
        if row.kind == ACTIVATION and row.module:
            parts = row.module.split(".")
            for depth in range(1, len(parts) + 1):
                path = ".".join(parts[:depth])
                found[path] = found.get(path, 0) + row.nbytes
    return found


def _told(words: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(filter(None, words)))


def _input(row: KernelRow) -> str:
    """The shape of the row's input; a backward operator's first is the gradient of the output, which tells nothing here."""
    if row.phase != "forward" or not row.shapes:
        return ""
    try:
        first = json.loads(row.shapes)[row.op in BIAS_FIRST]
    except (ValueError, LookupError):
        return ""
    sound = isinstance(first, list) and first and all(isinstance(n, int) for n in first)
    return shape_text(first) if sound else ""
