"""Steps whose inputs differ in size, put at one size. Pure.

Detectors train on images of many sizes, some scripts draw another size every few steps. Then a block of large images beside one of small
ones says more of the images than of the change between them (a YOLO at 256 to 384 pixels on an H200: bf16 gained −3 to 22 % in 13 pairs).

Where both arms have had the same few sizes, they are compared size by size: a change may leave small images to the host's launches, and
then grows otherwise with size than the plain step. Else a power of the size puts both at one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

LEAST_STEPS = 24  # of both arms, to learn from
LEAST_SPREAD = 0.01  # standard deviation of the logarithms of sizes, beneath which they are taken for one
STEEPEST = 2.0  # attention over all pixels
LEAST_PARTS = 2  # of each arm that have had a size, for steps of that size to be held against others of it
LEAST_KEPT = 3  # steps of a part, and half of them, whose size both arms have had


@dataclass(frozen=True, slots=True)
class BlockPart:
    """A block's part: clean steps, µs, the elements of what each gave its models, 0 where nobody saw, and the device's share of each step."""

    step_us: tuple[float, ...]
    elements: tuple[int, ...]
    wall_us: float = math.nan  # a step
    device_us: tuple[float, ...] = ()  # of each step, without its waits in loaders' `next()`; empty where nobody saw


def exponent(arms: Sequence[Sequence[BlockPart]]) -> float:
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


Times = list[list[tuple[float, ...]]]  # µs, of each step of each part of each arm


def levelled(arms: Sequence[Sequence[BlockPart]]) -> tuple[float, Times]:
    """Each part's steps as they would be with inputs of one size; and the exponent, 0 where they are as they were.

    Of the two ways the one that leaves steps of an arm nearer to each other.
    """
    grows = exponent(arms)
    if not grows:
        return 0.0, [[part.step_us for part in arm] for arm in arms]
    middle = usual(arms)
    scaled = [[at_size(part, grows, middle) for part in arm] for arm in arms]
    return grows, min((scaled, by_size(arms, scaled)), key=_scatter)


def by_size(arms: Sequence[Sequence[BlockPart]], scaled: Times) -> Times:
    """A step is held against the middle of its arm's steps of its size in the arm's other parts: with its own part among them,
    what that part has of the machine's noise would be taken for the size's. Parts of sizes that the other arm has hardly had are as
    `scaled` has them.
    """
    cells = [_cells(arm) for arm in arms]
    shared = [size for size in cells[0] if all(len(arm.get(size, ())) >= LEAST_PARTS for arm in cells)]
    if len(shared) < 2:
        return scaled
    weights = {size: sum(len(part) for arm in cells for part in arm[size].values()) for size in shared}
    found: Times = []
    for arm, own, otherwise in zip(arms, cells, scaled, strict=True):
        level = sum(weights[size] * _middle(own[size]) for size in shared) / sum(weights.values())
        parts = []
        for position, part in enumerate(arm):
            factor = {
                size: math.exp(level - _middle(own[size], but=position)) for size in weights.keys() & set(part.elements)
            }
            steps = tuple(
                us * factor[size] for us, size in zip(part.step_us, part.elements, strict=True) if size in factor
            )
            parts.append(steps if len(steps) >= max(LEAST_KEPT, len(part.step_us) / 2) else otherwise[position])
        found.append(parts)
    return found


def _scatter(times: Times) -> float:
    """Variance of the logarithms, each arm about its own mean."""
    count, total = 0, 0.0
    for arm in times:
        logs = [math.log(us) for steps in arm for us in steps]
        mean = math.fsum(logs) / max(1, len(logs))
        count += len(logs)
        total += math.fsum((us - mean) ** 2 for us in logs)
    return total / max(1, count)


_Cell = dict[int, list[float]]  # logarithms of a size's steps in one arm, by part


def _cells(arm: Sequence[BlockPart]) -> dict[int, _Cell]:
    found: dict[int, _Cell] = {}
    for position, part in enumerate(arm):
        for us, size in zip(part.step_us, part.elements, strict=True):
            found.setdefault(size, {}).setdefault(position, []).append(math.log(us))
    return found


def _middle(cell: _Cell, but: int = -1) -> float:
    """The median, without part `but`. A mean has the host's bursts in it (docs/notes/proof.md)."""
    return median([us for position, part in cell.items() if position != but for us in part])


def usual(arms: Sequence[Sequence[BlockPart]]) -> float:
    """The geometric mean of all steps' elements."""
    logs = [math.log(elements) for arm in arms for part in arm for elements in part.elements]
    return math.exp(math.fsum(logs) / len(logs))


def at_size(part: BlockPart, exponent: float, elements: float) -> tuple[float, ...]:
    """The part's steps, µs, as they would be with inputs of so many elements; as they are where sizes say nothing."""
    if not exponent:
        return part.step_us
    return tuple(us * (elements / own) ** exponent for us, own in zip(part.step_us, part.elements, strict=True))
