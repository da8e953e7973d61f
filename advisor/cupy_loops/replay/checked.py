"""A graph's first launch is judged: it has to fill its arrays with what the calls give that it was made of.

Twice the calls of the segment are made one by one from the same state, then the graph is launched. Where the two are equal to the bit, the
graph has to be; where they are not (atomic additions), it may be as far off as a few times their distance. Calls that a function of ours
stands for in the graph are made by CuPy's own too, and compared within the rounding that sums of so many terms may differ by.

Source: the same test that a change of a PyTorch loop has to pass (docs/numerics.md), call by call in place of layer by layer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from advisor.cupy_loops.replay.arena import Arena
from advisor.cupy_loops.replay.calls import UNFILLED, Entry

FEW = 8.0  # distances of two plain runs that a third one may be off by
# How far a sum may be off that was made in another order, in parts of the sum of its terms' magnitudes, by the size of a number. Products in
# fp32 may be TF32's, in both or in one.
ROUNDING = {2: 4e-3, 4: 1e-5, 8: 1e-12}
TF32 = 2e-3
_SUMS = frozenset({"sum", "mean"})
_PRODUCTS = frozenset({"dot", "matmul", "tensordot", "__matmul__", "__rmatmul__"})

State = dict[int, Any]


def launched(backend: Any, arena: Arena, segment: tuple[int, int]) -> str:
    """Launch a segment's graph, the calls beside it: why its arrays are not right, or "".

    The arena then has what the graph gives, or where that is wrong, what CuPy's own calls give.

    Args:
        backend: what launches it. segment: the first call and the one behind the last.
    """
    program = arena.program
    entries = [entry for entry in program.entries[slice(*segment)] if entry.how == "run"]
    names = {place: entry.name for entry in entries for place in entry.gives}
    views = arena.views()
    written = {place for place in program.written if arena.at[place] is not None}
    judged = sorted((set(names) | written) - views)
    before = _state(arena, sorted(written))
    # What nobody has written yet is the same in all three runs.
    before |= {place: np.zeros_like(_numbers(arena.at[place])) for place in judged if names.get(place) in UNFILLED}

    _put(arena, before)
    wrong = ""
    for entry in arena.computed(*segment):
        given = arena.run(entry)
        wrong = wrong or _ours(arena, entry, given)
        arena.take(entry, given)
    first = _state(arena, judged)
    _put(arena, before)
    arena.again(*segment)
    second = _state(arena, judged)
    _put(arena, {place: _other(first[place]) for place in judged if place not in before})  # a graph that leaves one out
    _put(arena, before)
    backend.launch(arena, segment)
    for place, found in _state(arena, judged).items():
        if not wrong and not _may_be(found, first[place], second[place]):
            of = names.get(place, "an array that is changed in place")
            wrong = f"the graph gives other values than the calls: {of}"
    if wrong:
        _put(arena, before)
        arena.again(*segment, plain=True)
    return wrong


def _other(numbers: Any) -> Any:
    """Numbers of which none is what these are."""
    return np.full_like(numbers, np.nan) if numbers.dtype.kind in "fc" else np.invert(numbers)


def _state(arena: Arena, places: list[int]) -> State:
    return {place: _numbers(arena.at[place]).copy() for place in places}


def _put(arena: Arena, state: State) -> None:
    for place, numbers in state.items():
        arena.at[place][...] = arena.module.asarray(numbers)


def _numbers(value: Any) -> Any:
    """On the host, as NumPy has it."""
    return np.asarray(value.get()) if hasattr(value, "get") else np.asarray(value)


def _may_be(found: Any, first: Any, second: Any) -> bool:
    """Whether an array is one that the calls may give, who gave these two."""
    if first.tobytes() == second.tobytes():
        return bool(found.tobytes() == first.tobytes())
    if first.dtype.kind not in "fc":  # what compares or counts numbers that differ
        return _unlike(found, first) <= FEW * max(1, _unlike(second, first))
    if not np.array_equal(np.isfinite(found), np.isfinite(first)):
        return False
    wide = "c16" if first.dtype.kind == "c" else "f8"
    apart, allowed = (_furthest(other.astype(wide) - first.astype(wide)) for other in (found, second))
    return apart <= FEW * allowed


def _unlike(a: Any, b: Any) -> int:
    return int(np.count_nonzero(a != b))


def _furthest(distance: Any) -> float:
    return float(np.nan_to_num(np.abs(distance)).max())


def _ours(arena: Arena, entry: Entry, given: list[Any]) -> str:
    """Why what a function of ours gives is not what CuPy's does; "" where it is."""
    if entry.run is None or entry.takes is not None or entry.name not in _SUMS | _PRODUCTS | {"var"}:
        return ""
    plain = arena.run(entry, plain=True)
    # The sum of the terms' magnitudes; a variance's terms are squares, of which none is above the largest.
    squares = entry.name == "var"
    sizes = (
        [_furthest(_numbers(arena.at[entry.arrays[0][1]])) ** 2]
        if squares
        else arena.run(entry, plain=True, magnitudes=True)
    )
    for ours, theirs, size in zip(given, plain, sizes, strict=True):
        a, b, scale = (_numbers(value) for value in (ours, theirs, size))
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{entry.name} gives {a.dtype} {a.shape} in place of {b.dtype} {b.shape}"
        rounding = TF32 if entry.name in _PRODUCTS and a.itemsize == 4 else ROUNDING.get(a.itemsize, 0.0)
        finite = np.isfinite(b)
        near = np.abs(a.astype("f8") - b)[finite] <= rounding * np.broadcast_to(scale, b.shape)[finite]
        if not near.all() or not np.array_equal(np.isfinite(a), finite):
            return f"{entry.name} gives other values than CuPy's"
    return ""
