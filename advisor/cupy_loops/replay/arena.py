"""A program with memory of its own: the arrays that its calls give, and what fills them.

There are two of a program, used in turn: while a step is replayed into one, the script may hold what the step before gave it in the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from advisor.cupy_loops.replay.calls import UNFILLED, Entry, Program, arrays_of


class Arena:
    """Arrays by place. `at[place]` is what the graph reads or writes there; kept arrays are the loop's own."""

    def __init__(self, program: Program, module: Any) -> None:
        self.program, self.module = program, module
        self.at: list[Any] = [None] * program.places
        self.scalars: list[Any] = [module.zeros((), dtype=dtype) for dtype in program.scalar_dtypes]
        self.graphs: dict[tuple[int, int], Any] = {}  # by segment
        self.checked: set[tuple[int, int]] = set()  # segments whose graphs have been judged
        self.pool: Any = None  # the memory of the graphs, which nobody else may be given
        for place, value in program.kept.items():
            self.at[place] = value
        for place, like in program.given.items():
            self.at[place] = like.copy()
        for entry in program.entries:
            if entry.how in ("made", "constant", "placeholder"):
                for place, value in zip(entry.gives, entry.samples, strict=True):
                    if self.at[place] is None:
                        self.at[place] = value.copy() if entry.how == "made" else value
        self.owned: frozenset[int] = frozenset()  # by `id`, the arrays that the graphs make
        self._own: list[int] = []
        self._holders: list[int] = []

    def settle(self) -> None:
        """All arrays are there: from here on `held` tells which of them others hold as well."""
        self._own = [
            place
            for entry in self.program.entries
            if entry.how == "run"
            for place in entry.gives
            if place not in self.program.kept and place not in self.program.given
        ]
        self._holders = [sys.getrefcount(self.at[place]) for place in self._own]
        self.owned = frozenset(id(self.at[place]) for place in self._own)

    def held(self) -> list[int]:
        """Places whose arrays somebody else holds."""
        at = self.at
        pairs = zip(self._own, self._holders, strict=True)
        return [place for place, count in pairs if sys.getrefcount(at[place]) > count]

    def run(self, entry: Entry, *, plain: bool = False, magnitudes: bool = False) -> list[Any]:
        """Make the entry's call now, with arrays of this arena; its arrays, in order.

        Args:
            plain: by CuPy's own function, whatever stands for it in a graph. magnitudes: of the absolute values of these arrays.
        """
        values: list[Any] = [None] * (entry.size + len(entry.keys))
        for position, value in entry.constants:
            values[position] = value
        for position, place in entry.arrays:
            values[position] = abs(self.at[place]) if magnitudes else self.at[place]
        for position, number in entry.scalars:
            values[position] = self.scalars[number]
        for position, places in entry.nested:
            values[position] = tuple(self.at[place] if place >= 0 else value for place, value in places)
        call = entry.plain if plain or entry.run is None else entry.run
        if entry.takes is not None:
            result = call(*(values[position] for position in entry.takes))
        else:
            named = dict(zip(entry.keys, values[entry.size :], strict=True))
            result = call(*values[: entry.size], **named)
        return list(arrays_of(result, self.module.ndarray))

    def first(self, entry: Entry) -> None:
        """Make the entry's call for the first time: its arrays are this arena's from here on."""
        for place, value in zip(entry.gives, self.run(entry), strict=False):
            if self.at[place] is None:
                self.at[place] = value

    def again(self, first: int, last: int, *, plain: bool = False) -> None:
        """Make the calls from `first` to `last` one by one, their results written where a graph would have; `plain` as there."""
        for entry in self.computed(first, last):
            self.take(entry, self.run(entry, plain=plain and entry.takes is None))

    def computed(self, first: int, last: int) -> list[Entry]:
        """The calls from `first` to `last` that a graph makes and that give values: to memory that holds none yet nothing is written."""
        entries = self.program.entries[first:last]
        return [entry for entry in entries if entry.how == "run" and entry.name not in UNFILLED]

    def views(self) -> set[int]:
        """Places whose arrays are views of other places' arrays."""
        known = {id(value) for value in self.at if value is not None}
        return {place for place, value in enumerate(self.at) if value is not None and id(value.base) in known}

    def take(self, entry: Entry, values: list[Any]) -> None:
        """Write what the entry's call has given where a graph would have."""
        for place, value in zip(entry.gives, values, strict=False):
            own = self.at[place]
            if value is not own and not _one_memory(value, own):
                own[...] = value


def _one_memory(a: Any, b: Any) -> bool:
    return _pointer(a) == _pointer(b) and a.shape == b.shape and a.strides == b.strides


def _pointer(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return int(value.__array_interface__["data"][0])
    return int(value.data.ptr)


class Plain:
    """A backend whose segments are calls one by one: where there is no device, and for tests."""

    def build(self, program: Program, module: Any, segments: list[tuple[int, int]]) -> Arena:
        """An arena whose arrays are there. What the calls change of the loop's own is put back."""
        arena = Arena(program, module)
        before = {place: value.copy() for place, value in program.kept.items()}
        for entry in program.entries:
            if entry.how == "run":
                arena.first(entry)
        for place, value in before.items():
            program.kept[place][...] = value
        arena.settle()
        return arena

    def launch(self, arena: Arena, segment: tuple[int, int]) -> None:
        """Fill what the calls of this segment give."""
        arena.again(*segment)

    def masked(self, name: str) -> Callable[..., Any]:
        """What does `target[mask] op= number` in place, of target, mask and number; "" is an assignment."""

        def change(target: Any, mask: Any, number: Any) -> None:
            target[mask] = getattr(target[mask], name)(number) if name else number

        return change
