"""How far one replay's results are from another's.

Errors are relative L2 over a group of tensors, the worst element against its neighbours' scale, and the scale and cosine
of the whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from advisor.trials.numerics.replay import POOL, Result

# A group much weaker than the model's mean gradient (a bias before batch norm: truly zero) is measured against that.
_FLOOR = 1e-3
# Of a small parameter by itself, below its pool: what the group's name begins with; how much weaker than its layer's parameters, and
# than the model's, its gradient may be to be measured against those (where the true one is zero, as of a bias before a batch norm,
# bf16 leaves rounding: up to 0.014 of the model's); and of how few values it may be rounding in any case (squeeze-and-excite with
# four channels, a scalar: right bf16 is off by 2 to 5 times such gradients).
OWN = "own gradient of "
_OWN_FLOOR, _OWN_FLOOR_OF_ALL, _OWN_VALUES = 1e-1, 1e-2, 8
# Tensors are compared together up to this many values beyond the first; two more copies of them are made.
BATCH_ELEMENTS = 1 << 25

# Σ(a−b)², Σb², Σab, Σa², worst |a−b| / (|b| + rms of b), and how many values lost finiteness.
Row = tuple[float, ...]


@dataclass(slots=True)
class Distance:
    """How far one result is from another, per group; `cosine` and `scale` are of the whole gradient."""

    l2: dict[str, float] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    cosine: float = 1.0
    scale: float = 1.0
    broken: str = ""  # not comparable: another structure, NaN where the plain step has none

    @property
    def largest(self) -> float:
        """Of the group that is farthest off; small parameters are in their pool."""
        return max((value for group, value in self.l2.items() if not group.startswith(OWN)), default=0.0)

    def times(self, factor: float) -> Distance:
        """The same at `factor` times the distance."""
        return Distance(
            l2={group: factor * value for group, value in self.l2.items()},
            worst={group: factor * value for group, value in self.worst.items()},
            cosine=1.0 - factor * (1.0 - self.cosine),
            scale=1.0 + factor * (self.scale - 1.0),
        )


def distance(found: Result, base: Result) -> Distance:
    """How far `found` is from `base`, or what makes the two not comparable."""
    apart = Distance()
    if found.structure != base.structure:
        apart.broken = _difference(found.structure, base.structure)
        return apart
    if found.groups.keys() != base.groups.keys() or found.small != base.small:
        apart.broken = "other tensors have gradients"
        return apart
    if not base.moved <= found.moved:
        apart.broken = f"{min(base.moved - found.moved)} is not updated any more"
        return apart
    gradients = [g for g in base.groups if g.startswith("gradient") and not g.startswith("gradient of input")]
    every = iter(rows([t for ts in found.groups.values() for t in ts], [t for ts in base.groups.values() for t in ts]))
    each = {group: [next(every) for _ in tensors] for group, tensors in base.groups.items()}
    table = {group: added(several) for group, several in each.items()}
    count = sum(t.numel() for g in gradients for t in base.groups[g])
    energy = sum(table[g][1] for g in gradients)
    for group, (squares, reference, _, own_squares, worst, broken) in table.items():
        if broken:
            apart.broken = f"{group} has NaN or infinite values that the plain step has not"
            return apart
        size = sum(t.numel() for t in base.groups[group])
        floor = _FLOOR**2 * energy / max(1, count) * size if group in gradients else 0.0
        if group.startswith("buffer"):
            floor = 1e-12 * size  # below fp32 resolution of values around one
        # What was zero and is not any more is off by all of itself.
        apart.l2[group] = math.sqrt(squares / (max(reference, floor) or own_squares)) if squares else 0.0
        apart.worst[group] = worst if group.startswith(("output", "gradient of ")) else 0.0
    apart.l2.update(_own(base, each, energy / max(1, count)))
    if gradients:
        product = sum(table[g][2] for g in gradients)
        own = sum(table[g][3] for g in gradients)
        if energy > 0:
            apart.scale = product / energy
            apart.cosine = product / math.sqrt(energy * own) if own > 0 else 0.0
    return apart


def _own(base: Result, each: dict[str, list[Row]], mean: float) -> Iterator[tuple[str, float]]:
    """How far each small parameter's gradient is off by itself, from its row in the pool; `mean` is of the model's squares.

    In the pool one gradient that is missing, or has the other sign, is lost among the others' rounding.
    """
    pooled = [
        (name, tensor.numel(), row)
        for name, tensor, row in zip(base.small, base.groups.get(POOL, ()), each.get(POOL, ()), strict=True)
    ]
    layers: dict[str, list[tuple[float, int]]] = {}
    for name, size, row in pooled:
        layers.setdefault(name.rpartition(".")[0], []).append((row[1], size))
    for group, tensors in base.groups.items():
        if group.startswith("gradient of "):
            layer = group.removeprefix("gradient of ").rpartition(".")[0]
            layers.setdefault(layer, []).append((each[group][0][1], tensors[0].numel()))
    for name, size, (squares, reference, _, own_squares, *_) in pooled:
        if size < _OWN_VALUES:
            continue
        energies, sizes = zip(*layers[name.rpartition(".")[0]], strict=True)
        floor = size * max(_OWN_FLOOR**2 * math.fsum(energies) / sum(sizes), _OWN_FLOOR_OF_ALL**2 * mean)
        yield OWN + name, math.sqrt(squares / (max(reference, floor) or own_squares)) if squares else 0.0


def added(rows: Sequence[Row]) -> Row:
    if not rows:
        return (0.0,) * 6
    squares, reference, product, own, worst, broken = zip(*rows, strict=True)
    return math.fsum(squares), math.fsum(reference), math.fsum(product), math.fsum(own), max(worst), math.fsum(broken)


def rows(found: Sequence[torch.Tensor], base: Sequence[torch.Tensor]) -> list[Row]:
    """One row a tensor. Many at once: a deep net has hundreds, and each sum of each would be a launch of its own."""
    result: list[Row] = [(0.0,) * 6] * len(base)
    for i, tensor in enumerate(base):
        if tensor.numel() and not tensor.is_floating_point():
            unequal = float((found[i] != tensor).double().mean()) * tensor.numel()
            result[i] = (unequal, float(tensor.numel()), 0.0, 0.0, 0.0, 0.0)
    for wide, chosen in _batches(base):
        a, b = ([tensors[i].to(wide) for i in chosen] for tensors in (found, base))
        try:
            several = _together(a, b)
        except RuntimeError:  # no room for it, or no such operation on this device
            several = None
        for i, row in zip(chosen, several or map(_one, a, b), strict=True):
            result[i] = row
    return result


def _batches(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.dtype, list[int]]]:
    """Places of the floating-point ones with values, by the dtype that they are compared in."""
    for wide in (torch.float32, torch.float64):
        batch: list[int] = []
        elements = 0
        for i, tensor in enumerate(tensors):
            if not tensor.numel() or not tensor.is_floating_point() or _wide(tensor) is not wide:
                continue
            if elements > BATCH_ELEMENTS:
                yield wide, batch
                batch, elements = [], 0
            batch.append(i)
            elements += tensor.numel()
        if batch:
            yield wide, batch


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _together(a: list[torch.Tensor], b: list[torch.Tensor]) -> list[Row] | None:
    """Rows of tensors of one dtype; None where any value is not finite."""
    difference = torch._foreach_sub(a, b)
    norms = [torch.stack(torch._foreach_norm(ts, 2, dtype=torch.float64)) for ts in (difference, b, a)]
    squares, reference, own = torch.stack(norms).square().cpu()
    if not bool(torch.isfinite(squares + reference + own).all()):
        return None
    sizes = torch.tensor([t.numel() for t in b], dtype=torch.float64, device=reference.device)
    scale = torch._foreach_abs(b)
    torch._foreach_add_(scale, (torch.sqrt(reference / sizes) + torch.finfo(b[0].dtype).tiny).tolist())
    torch._foreach_abs_(difference)
    torch._foreach_div_(difference, scale)
    worst = torch.stack(torch._foreach_norm(difference, math.inf)).double().cpu()
    # Exactly Σb² where a and b are the same bits.
    product = 0.5 * (own + reference - squares)
    columns = (squares, reference, product, own, worst, torch.zeros_like(worst))
    return [tuple(row) for row in torch.stack(columns, 1).tolist()]


def _one(a: torch.Tensor, b: torch.Tensor) -> Row:
    """The row of one tensor, whose values need not be finite: what is infinite or NaN in either counts as zero, and is told."""
    both = torch.isfinite(a) & torch.isfinite(b)
    broken = (torch.isfinite(b) & ~both).sum() + (torch.isnan(a) & ~torch.isnan(b)).sum()
    a, b = torch.where(both, a, 0.0), torch.where(both, b, 0.0)
    difference = a - b
    squares, reference, product, own = (
        (x * y).sum(dtype=torch.float64) for x, y in ((difference, difference), (b, b), (a, b), (a, a))
    )
    rms = torch.sqrt(reference / b.numel()).to(b.dtype)
    worst = (difference.abs() / (b.abs() + rms + torch.finfo(b.dtype).tiny)).max()
    row = torch.stack([squares, reference, product, own, worst.double(), broken.double()])
    return tuple(row.tolist())


def _difference(found: tuple[Any, ...], base: tuple[Any, ...]) -> str:
    names = (
        "the output has another structure",
        "outputs have another shape, dtype or device",
        "a loss is rounded to half precision",
        "other parameters have gradients",
        "parameters, or buffers that the step replaces, are other objects",
        "counters (buffers of integers) differ",
    )
    name, a, b = next(row for row in zip(names, found, base, strict=True) if row[1] != row[2])
    if name != names[1] or len(a) != len(b):
        return name
    one, other = next(pair for pair in zip(a, b, strict=True) if pair[0] != pair[1])
    unlike = next((x, y) for x, y in zip(one, other, strict=True) if x != y)
    return f"{name} ({unlike[0]} in place of {unlike[1]})"
