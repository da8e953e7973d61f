"""A graph's first launch is judged: it has to fill its arrays with what the calls give that it was made of.

Twice the calls of the segment are made one by one from the same state, then the graph is launched. Where the two are equal to the bit, the
graph has to be; where they are not (atomic additions), it may be as far off as a few times their distance. Calls that a function of ours
stands for in the graph are made by CuPy's own too, and compared within the rounding that sums of so many terms may differ by.

Source: the same test that a change of a PyTorch loop has to pass (docs/numerics.md), call by call in place of layer by layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from advisor.core.errors import first_line
from advisor.cupy_loops.facts import ROUNDED_BY, fewer_bits
from advisor.cupy_loops.replay.arena import Arena
from advisor.cupy_loops.replay.calls import PRODUCTS, UNFILLED, Entry

FEW = 8.0  # distances of two plain runs that a third one may be off by
# How far a sum may be off that was made in another order, in parts of the sum of its terms' magnitudes, by the size of a number. Products in
# fp32 may be TF32's or bf16's, in both or in one.
ROUNDING = {2: 4e-3, 4: 1e-5, 8: 1e-12}
OTHER_VALUES = "the graph gives other values than the calls: "  # and the name of one
SMALLEST = 1e-300  # what is not equal to the bit is apart
_SUMS = frozenset({"sum", "mean"})

State = dict[int, Any]


def launched(backend: Any, arena: Arena, segment: tuple[int, int]) -> str:
    """Launch a segment's graph, the calls beside it: why its arrays are not right, or "".

    The arena then has what the graph gives, or where that is wrong or cannot be judged, what CuPy's own calls give.

    Args:
        backend: what launches it. segment: the first call and the one behind the last.
    """
    names, judged, written = _of(arena, segment)
    before = _state(arena, written)
    # What nobody has written yet is the same in all three runs.
    unfilled = [place for place in judged if names.get(place) in UNFILLED]
    try:
        before |= {place: arena.module.zeros_like(arena.at[place]) for place in unfilled}
        wrong = _judged(backend, arena, segment, names, judged, before)
    except Exception as error:  # memory for its copies, most likely
        wrong = f"a graph cannot be judged: {first_line(error)}"
    if wrong:
        _put(arena, before)
        arena.again(*segment, plain=True)
    return wrong


def _of(arena: Arena, segment: tuple[int, int]) -> tuple[dict[int, str], list[int], list[int]]:
    """Of a segment: by place, the call that gives an array there; places to judge; places that are changed in place.

    Arrays that a later segment makes are not judged: a graph may use their memory for arrays of its own meanwhile.
    """
    program = arena.program
    names = {
        place: entry.name for entry in program.entries[slice(*segment)] if entry.how == "run" for place in entry.gives
    }
    last = segment[1]
    written = [p for p in sorted(program.written) if arena.at[p] is not None and program.results.get(p, -1) < last]
    judged = sorted({*names, *written} - arena.views() - set(program.unwritten(segment)))
    return names, judged, written


def _judged(
    backend: Any, arena: Arena, segment: tuple[int, int], names: dict[int, str], judged: list[int], before: State
) -> str:
    wrong = ""
    _put(arena, before)
    for entry in arena.computed(*segment):
        given = arena.run(entry)
        wrong = wrong or _ours(arena, entry, given)
        arena.take(entry, given)
    first = _state(arena, judged)
    _put(arena, before)
    arena.again(*segment)
    allowed = {place: _apart(arena, first[place], arena.at[place]) for place in judged}
    for place in judged:  # a graph that leaves one out
        if place not in before:
            _poison(arena.at[place])
    _put(arena, before)
    backend.launch(arena, segment)
    for place in judged:
        if _apart(arena, first[place], arena.at[place]) > FEW * allowed[place]:
            of = names.get(place, "an array that is changed in place")
            return wrong or OTHER_VALUES + of
    return wrong


def _poison(array: Any) -> None:
    """Numbers of which none is what these are."""
    if array.dtype.kind in "fc":
        array.fill(np.nan)
    else:
        array[...] = ~array


def _state(arena: Arena, places: list[int]) -> State:
    return {place: arena.at[place].copy() for place in places}


def _put(arena: Arena, state: State) -> None:
    for place, numbers in state.items():
        arena.at[place][...] = numbers


def _apart(arena: Arena, first: Any, found: Any) -> float:
    """How far two arrays are apart: 0 where they are equal to the bit; numbers that count are apart by how many differ."""
    if _bits(arena, first, found):
        return 0.0
    if first.dtype.kind not in "fc":
        return float((first != found).sum())
    finite = arena.module.isfinite(first)
    if not bool((finite == arena.module.isfinite(found)).all()):
        return float("inf")
    distance = abs(arena.module.where(finite, found, 0) - arena.module.where(finite, first, 0))
    return max(float(distance.max()), SMALLEST)


def _bits(arena: Arena, first: Any, found: Any) -> bool:
    if first.size == 0:
        return True
    kind = "u8" if first.dtype.itemsize % 8 == 0 else f"u{first.dtype.itemsize}"
    a, b = (arena.module.ascontiguousarray(value).reshape(-1).view(kind) for value in (first, found))
    return bool((a == b).all())


def _ours(arena: Arena, entry: Entry, given: list[Any]) -> str:
    """Why what a function of ours gives is not what CuPy's does; "" where it is."""
    if entry.run is None or entry.takes is not None or entry.name not in _SUMS | PRODUCTS | {"var"}:
        return ""
    plain = arena.run(entry, plain=True)
    # The sum of the terms' magnitudes; a variance's terms are squares, of which none is above the largest.
    squares = entry.name == "var"
    sizes = (
        [float(abs(arena.at[entry.arrays[0][1]]).max()) ** 2]
        if squares
        else arena.run(entry, plain=True, magnitudes=True)
    )
    module = arena.module
    for ours, theirs, size in zip(given, plain, sizes, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"{entry.name} gives {ours.dtype} {ours.shape} in place of {theirs.dtype} {theirs.shape}"
        rounding = (
            ROUNDED_BY[fewer_bits(arena.module)]
            if entry.name in PRODUCTS and ours.itemsize == 4
            else ROUNDING.get(ours.itemsize, 0.0)
        )
        finite = module.isfinite(theirs)
        near = abs(ours - theirs) <= rounding * size
        if not bool((near | ~finite).all()) or not bool((module.isfinite(ours) == finite).all()):
            return f"{entry.name} gives other values than CuPy's"
    return ""
