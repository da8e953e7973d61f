"""How far one replay's results are from another's.

Errors are relative L2 over a group of tensors, the worst element against its neighbours' scale, and the scale and cosine
of the whole gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from advisor.trials.numerics.replay import Result

# A group much weaker than the model's mean gradient (a bias before batch norm: truly zero) is measured against that.
_FLOOR = 1e-3


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
        """Of the group that is farthest off."""
        return max(self.l2.values(), default=0.0)

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
    if found.groups.keys() != base.groups.keys():
        apart.broken = "other tensors have gradients"
        return apart
    gradients = [g for g in base.groups if g.startswith("gradient") and not g.startswith("gradient of input")]
    rows = [sums(found.groups[group], base.groups[group]).cpu() for group in base.groups]
    table = dict(zip(base.groups, torch.stack(rows).tolist(), strict=True)) if rows else {}
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
    if gradients:
        product = sum(table[g][2] for g in gradients)
        own = sum(table[g][3] for g in gradients)
        if energy > 0:
            apart.scale = product / energy
            apart.cosine = product / math.sqrt(energy * own) if own > 0 else 0.0
    return apart


def sums(found: list[torch.Tensor], base: list[torch.Tensor]) -> torch.Tensor:
    """Σ(a−b)², Σb², Σab, Σa², worst |a−b| / (|b| + rms of b), and how many values lost finiteness; fp64, one transfer."""
    total = torch.zeros(6, dtype=torch.float64, device=base[0].device)
    for raw_a, raw_b in zip(found, base, strict=True):
        if not raw_b.is_floating_point():
            unequal = (raw_a != raw_b).double().mean()
            total[0] += unequal * raw_b.numel()
            total[1] += raw_b.numel()
            continue
        wide = torch.float64 if raw_b.dtype == torch.float64 else torch.float32
        a, b = raw_a.to(wide), raw_b.to(wide)
        both = torch.isfinite(a) & torch.isfinite(b)
        total[5] += (torch.isfinite(b) & ~both).sum() + (torch.isnan(a) & ~torch.isnan(b)).sum()
        a, b = torch.where(both, a, 0.0), torch.where(both, b, 0.0)
        difference = a - b
        total[0] += (difference * difference).sum(dtype=torch.float64)
        squares = (b * b).sum(dtype=torch.float64)
        total[1] += squares
        total[2] += (a * b).sum(dtype=torch.float64)
        total[3] += (a * a).sum(dtype=torch.float64)
        if b.numel():
            rms = torch.sqrt(squares / b.numel()).to(wide)
            tiny = torch.finfo(wide).tiny
            total[4] = torch.maximum(total[4], (difference.abs() / (b.abs() + rms + tiny)).max().double())
    return total


def _difference(found: tuple[Any, ...], base: tuple[Any, ...]) -> str:
    names = (
        "the output has another structure",
        "outputs have another shape, dtype or device",
        "other parameters have gradients",
        "parameters are other objects",
        "counters (buffers of integers) differ",
    )
    return next(name for name, a, b in zip(names, found, base, strict=True) if a != b)
