"""Which arrays of a recorded step lie in the same memory, and how arrays lie."""

from __future__ import annotations

from typing import Any

import numpy as np

from advisor.cupy_loops.replay.calls import Program


def pointer(value: Any) -> int:
    """The address of an array's first element."""
    if isinstance(value, np.ndarray):
        return int(value.__array_interface__["data"][0])
    return int(value.data.ptr)


def one_memory(a: Any, b: Any) -> bool:
    """Whether two arrays are the same elements in the same order."""
    return bool(pointer(a) == pointer(b) and a.dtype == b.dtype and _lies(a) == _lies(b))


def apart(value: Any) -> bool:
    """Whether no two elements of an array share bytes, as far as its strides tell: each dimension spans what is inside it."""
    inside = value.dtype.itemsize
    for stride, length in sorted((abs(s), n) for s, n in zip(value.strides, value.shape, strict=True) if n > 1):
        if stride < inside:
            return False
        inside = stride * length
    return True


def samples(program: Program) -> dict[int, Any]:
    """By place, the arrays of the recorded step; all of them are alive, so different memory is different arrays."""
    found = dict(program.kept) | dict(program.given)
    for entry in program.entries:
        found.update(zip(entry.gives, entry.samples, strict=False))
    return found


def classes(arrays: dict[int, Any]) -> dict[int, int]:
    """By place, a number that places have in common whose arrays overlap."""
    spans = sorted((*span(value), place) for place, value in arrays.items())
    found: dict[int, int] = {}
    number = end = -1
    for first, last, place in spans:
        if first >= end or first == last:  # an array without elements overlaps none
            number += 1
            end = last if first != last else max(end, last)
        end = max(end, last)
        found[place] = number
    return found


def alike(first: dict[int, Any], second: dict[int, Any]) -> bool:
    """Whether the places that both have share memory in one as they do in the other, and lie alike."""
    both = first.keys() & second.keys()
    a, b = classes({place: first[place] for place in both}), classes({place: second[place] for place in both})
    pairs = {(a[place], b[place]) for place in both}
    one_to_one = len(pairs) == len({x for x, _ in pairs}) == len({y for _, y in pairs})
    return one_to_one and all(_lies(first[p]) == _lies(second[p]) for p in both)


def _lies(value: Any) -> tuple[tuple[int, ...], list[int]]:
    """Shape, and the strides that mean something: the next element of a dimension of one is nowhere."""
    return value.shape, [stride for stride, n in zip(value.strides, value.shape, strict=True) if n > 1]


def span(value: Any) -> tuple[int, int]:
    """Addresses of the first byte, and of the one behind the last."""
    first = pointer(value)
    if 0 in value.shape:
        return first, first
    steps = [stride * (n - 1) for stride, n in zip(value.strides, value.shape, strict=True)]
    low, high = sum(min(s, 0) for s in steps), sum(max(s, 0) for s in steps)
    return first + low, first + high + int(value.dtype.itemsize)
