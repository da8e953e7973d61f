"""Arrays that are made of windows: `x = zeros(...)`, then `x[:, i : i + h : 2] += part` again and again, as col2im does, or `x[:, :, i] = part`,
as im2col does; `pad` with zeros, `stack` and `concatenate`.

As one kernel each element of `x` takes what the windows over it hold, in the order of the calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from advisor.cupy_loops.replay.calls import Element, Entry, Window
from advisor.cupy_loops.replay.memory import pointer

_ZEROS = frozenset({"zeros", "zeros_like"})
_TYPES = frozenset({"float32", "float64"})
MOST_WINDOWS = 64
_MOST = 1 << 31  # elements that 32-bit indices reach


@dataclass(slots=True, eq=False)
class Gathering:
    """An array of zeros whose windows have been added to so far."""

    number: int  # of the call that gave the zeros
    place: int
    array: Any
    windows: list[Window] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)  # that added
    views: list[int] = field(default_factory=list)  # that made views of it

    def element(self) -> Element:
        """The whole as one elementwise call."""
        kind, shape = str(self.array.dtype), tuple(self.array.shape)
        return Element(
            self.number, "", (), kind, kind, self.place, shape, windows=tuple(self.windows), also=tuple(self.calls)
        )

    def add(self, number: int, found: Element | None, arrays: dict[int, Any]) -> bool:
        """Take this call in, if it adds an array to a window of this one."""
        if found is None or not found.target or len(found.operands) != 2 or "add_rn" not in found.code:
            return False
        view, operand = arrays[found.place], found.operands[1]
        if operand.place < 0 or view.dtype != self.array.dtype or len(self.windows) >= MOST_WINDOWS:
            return False
        part = arrays[operand.place]
        where = _where(self.array, view)
        if where is None or part.dtype != self.array.dtype or not reachable(part):
            return False
        self.windows.append(Window(operand.place, *where, tuple(view.shape)))
        self.calls.append(number)
        return True

    def put(self, number: int, entry: Entry, arrays: dict[int, Any]) -> bool:
        """Take this call in, if it assigns an array to a window of this one."""
        given, constants = dict(entry.arrays), dict(entry.constants)
        if entry.name != "__setitem__" or entry.run is not None or entry.keys or set(given) != {0, 2}:
            return False
        index = constants.get(1)
        parts = index if isinstance(index, tuple) else (index,)
        if given[0] != self.place or len(self.windows) >= MOST_WINDOWS or len(parts) > self.array.ndim:
            return False
        if any(type(part) not in (int, slice) for part in parts):
            return False
        parts = tuple(p % n if isinstance(p, int) else p for p, n in zip(parts, self.array.shape, strict=False))
        whole = tuple(slice(p, p + 1) if isinstance(p, int) else p for p in parts)
        view, part = self.array[whole], arrays[given[2]]
        where = _where(self.array, view)
        if where is None or part.dtype != self.array.dtype or not reachable(part):
            return False
        dims = tuple(d for d in range(self.array.ndim) if d >= len(parts) or not isinstance(parts[d], int))
        if part.ndim > len(dims):
            return False
        self.windows.append(Window(given[2], *where, tuple(view.shape), put=True, dims=dims))
        self.calls.append(number)
        return True


def joined(number: int, entry: Entry, arrays: dict[int, Any]) -> Element | None:
    """What `stack` or `concatenate` gives, as windows of its result; None where the entry is no such call."""
    if entry.name not in ("stack", "concatenate") or entry.how != "run" or entry.fresh or not entry.single:
        return None
    if len(entry.nested) != 1 or entry.nested[0][0] != 0 or entry.arrays or len(entry.constants) > 1:
        return None
    named = {1: "axis"} | {entry.size + i: key for i, key in enumerate(entry.keys)}
    axis = next((value for at, value in entry.constants if named.get(at) == "axis"), 0 if not entry.constants else None)
    places, place = [place for place, _ in entry.nested[0][1]], entry.gives[0]
    result = arrays[place]
    if type(axis) is not int or min(places, default=-1) < 0 or len(places) > MOST_WINDOWS:
        return None
    kind, shape, axis = str(result.dtype), tuple(result.shape), axis % result.ndim
    if kind not in _TYPES or not 0 < result.size < _MOST or not result.flags.c_contiguous:
        return None
    own = tuple(d for d in range(result.ndim) if entry.name != "stack" or d != axis)
    windows, at = [], 0
    for each in places:
        part = arrays[each]
        if part.dtype != result.dtype or not reachable(part):
            return None
        length = 1 if entry.name == "stack" else part.shape[axis]
        starts = tuple(at if d == axis else 0 for d in range(result.ndim))
        lengths = tuple(length if d == axis else n for d, n in enumerate(shape))
        windows.append(Window(each, starts, (1,) * result.ndim, lengths, put=True, dims=own))
        at += length
    return Element(number, "", (), kind, kind, place, shape, windows=tuple(windows))


def gathering(number: int, entry: Entry, arrays: dict[int, Any]) -> Gathering | None:
    """The array of zeros that this call gives; None where it gives none, or one that cannot be a sum of windows."""
    if entry.how != "run" or entry.run is not None or entry.name not in _ZEROS or entry.fresh or not entry.single:
        return None
    place = entry.gives[0]
    array = arrays[place]
    if str(array.dtype) not in _TYPES or not array.shape or not array.flags.c_contiguous or not 0 < array.size < _MOST:
        return None
    return Gathering(number, place, array)


def padded(number: int, entry: Entry, arrays: dict[int, Any]) -> Element | None:
    """What `pad` with zeros gives, as a window of its result; None where the entry is no such call."""
    if entry.name != "pad" or entry.how != "run" or entry.run is not None or entry.fresh or len(entry.arrays) != 1:
        return None
    given = dict(entry.constants)
    widths = given.pop(1, None)
    if any(value not in ("constant", 0) for value in given.values()) or entry.arrays[0][0] != 0:
        return None
    place, source = entry.gives[0], entry.arrays[0][1]
    array, part = arrays[place], arrays[source]
    if str(array.dtype) not in _TYPES or array.dtype != part.dtype or not 0 < array.size < _MOST or not reachable(part):
        return None
    try:
        before = np.broadcast_to(np.asarray(widths, dtype=int), (part.ndim, 2))[:, 0]
    except (TypeError, ValueError):
        return None
    kind, steps = str(array.dtype), (1,) * part.ndim
    window = Window(source, tuple(int(n) for n in before), steps, tuple(part.shape), put=True)
    return Element(number, "", (), kind, kind, place, tuple(array.shape), windows=(window,))


def _where(array: Any, view: Any) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Starts and steps of a view in the contiguous array that it is of."""
    if view.ndim != array.ndim or 0 in view.shape:
        return None
    rest = pointer(view) - pointer(array)
    starts, steps = [], []
    for length, stride, mine, wanted in zip(array.shape, array.strides, view.strides, view.shape, strict=True):
        start, rest = divmod(rest, stride) if length > 1 else (0, rest)
        step = mine // stride if wanted > 1 else 1
        if step < 1 or (wanted > 1 and mine % stride) or start < 0 or start + step * (wanted - 1) >= length:
            return None
        starts.append(int(start))
        steps.append(int(step))
    return (tuple(starts), tuple(steps)) if rest == 0 else None


def reachable(part: Any) -> bool:
    """Whether 32-bit offsets from its first element on reach all of an array."""
    reach = sum(stride * (length - 1) for stride, length in zip(part.strides, part.shape, strict=True))
    return 0 not in part.shape and min(part.strides, default=0) >= 0 and reach // part.dtype.itemsize < _MOST
