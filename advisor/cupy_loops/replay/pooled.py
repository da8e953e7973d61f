"""Largest and smallest values over few elements each, as poolings take them: a thread makes one. CuPy's own reduction, which keeps a block busy for
each few results, takes 47 µs of an H200 for two poolings of a small CNN's.
"""

from __future__ import annotations

from typing import Any

from advisor.cupy_loops.replay.calls import Element, Entry
from advisor.cupy_loops.replay.windows import reachable

_SIGNS = {"max": ">", "amax": ">", "min": "<", "amin": "<"}
_TYPES = frozenset({"float32", "float64"})
MOST = 64  # elements of one result
_ARGUMENTS = ("array", "axis", "out", "keepdims")


def pooled(number: int, entry: Entry, arrays: dict[int, Any]) -> Element | None:
    """What the call at `number` gives, as an element that looks through a window; None where it is no such call."""
    if entry.how != "run" or entry.run is not None or entry.name not in _SIGNS or entry.fresh or not entry.single:
        return None
    if len(entry.arrays) != 1 or entry.arrays[0][0] != 0 or entry.scalars or entry.nested:
        return None
    told = {_ARGUMENTS[at] if at < entry.size else entry.keys[at - entry.size]: v for at, v in entry.constants}
    if not set(told) <= {"axis", "keepdims", "out"} or told.get("out") is not None:
        return None
    place, source = entry.gives[0], entry.arrays[0][1]
    result, given = arrays[place], arrays[source]
    axis = told.get("axis")
    axes = tuple(range(given.ndim)) if axis is None else axis if isinstance(axis, tuple) else (axis,)
    axes = tuple(sorted(a % given.ndim for a in axes))
    size = 1
    for a in axes:
        size *= given.shape[a]
    kind = str(result.dtype)
    if kind not in _TYPES or kind != str(given.dtype) or not 0 < size <= MOST or not reachable(given):
        return None
    if not result.size or result.ndim == 0:
        return None
    code = _SIGNS[entry.name]
    return Element(number, code, (), kind, kind, place, tuple(result.shape), reduced=(source, axes))
