"""Steps whose inputs differ in size, put at one size. Pure.

Detectors train on images of many sizes, some scripts draw another size every few steps. Then a block of large images beside one of small
ones says more of the images than of the change between them (a YOLO at 256 to 384 pixels on an H200: bf16 gained −3 to 22 % in 13 pairs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_STEPS = 24  # of both arms, to learn from
LEAST_SPREAD = 0.01  # standard deviation of the logarithms of sizes, beneath which they are taken for one
STEEPEST = 2.0  # attention over all pixels


@dataclass(frozen=True, slots=True)
class Part:
    """A block's part: clean steps, µs, and the elements of what each gave its models, 0 where nobody saw."""

    step_us: tuple[float, ...]
    elements: tuple[int, ...]
    wall_us: float = math.nan  # a step


def exponent(arms: Sequence[Sequence[Part]]) -> float:
    """Steps take time as elements ** this: 0 where sizes do not differ, are not known, or say nothing.

    Least squares on logarithms, each arm about its own mean: what the change saves is no part of it.
    """
    if len({elements for arm in arms for part in arm for elements in part.elements}) < 2:
        return 0.0
    count, across, along = 0, 0.0, 0.0
    for arm in arms:
        pairs = [pair for part in arm for pair in zip(part.elements, part.step_us, strict=True)]
        if not pairs:
            continue
        if any(elements <= 0 or us <= 0 for elements, us in pairs):
            return 0.0
        sizes, times = ([math.log(pair[i]) for pair in pairs] for i in (0, 1))
        middle, usual = math.fsum(sizes) / len(sizes), math.fsum(times) / len(times)
        count += len(pairs)
        across += math.fsum((size - middle) ** 2 for size in sizes)
        along += math.fsum((size - middle) * (time - usual) for size, time in zip(sizes, times, strict=True))
    if count < LEAST_STEPS or across < count * LEAST_SPREAD**2:
        return 0.0
    return min(max(along / across, 0.0), STEEPEST)


def usual(arms: Sequence[Sequence[Part]]) -> float:
    """The geometric mean of all steps' elements."""
    logs = [math.log(elements) for arm in arms for part in arm for elements in part.elements]
    return math.exp(math.fsum(logs) / len(logs))


def at_size(part: Part, exponent: float, elements: float) -> tuple[float, ...]:
    """The part's steps, µs, as they would be with inputs of so many elements; as they are where sizes say nothing."""
    if not exponent:
        return part.step_us
    return tuple(us * (elements / own) ** exponent for us, own in zip(part.step_us, part.elements, strict=True))
