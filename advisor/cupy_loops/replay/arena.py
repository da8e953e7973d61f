"""A program with memory of its own: the arrays that its calls give, and what fills them.

There are two of a program, used in turn: while a step is replayed into one, the script may hold what the step before gave it in the other.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from advisor.cupy_loops.replay.calls import (
    PRODUCTS,
    UNFILLED,
    CannotCapture,
    CannotFuse,
    Cluster,
    Element,
    Entry,
    Program,
    Step,
    arrays_of,
)
from advisor.cupy_loops.replay.memory import one_memory
from advisor.cupy_loops.replay.naive import Meaning


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
            self.at[place] = like.copy(order="K")  # as it lies: what is a view of it stays one
        for entry in program.entries:
            if entry.how in ("made", "constant", "placeholder"):
                for place, value in zip(entry.gives, entry.samples, strict=True):
                    if self.at[place] is None:
                        self.at[place] = value.copy() if entry.how == "made" else value
        self.owned: frozenset[int] = frozenset()  # by `id`, the arrays that the graphs make
        self._own: list[int] = []
        self._holders: list[int] = []
        self._unwritten: dict[
            tuple[int, int], list[tuple[int, int]]
        ] = {}  # by segment, places and how many hold their arrays

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
        for segment in self.program.plans:
            places = self.program.unwritten(segment)
            self._unwritten[segment] = [(place, sys.getrefcount(self.at[place])) for place in places]

    def missed(self, segment: tuple[int, int]) -> list[int]:
        """Places whose values the segment's kernels do not write, and whose arrays the script holds while the step is replayed: the
        recorder's own list of them counts once.
        """
        at = self.at
        return [place for place, count in self._unwritten.get(segment, ()) if sys.getrefcount(at[place]) > count + 1]

    def held(self) -> list[int]:
        """Places whose arrays somebody else holds."""
        at = self.at
        pairs = zip(self._own, self._holders, strict=True)
        return [place for place, count in pairs if sys.getrefcount(at[place]) > count]

    def run(
        self, entry: Entry, *, plain: bool = False, magnitudes: bool = False, at: dict[int, Any] | None = None
    ) -> list[Any]:
        """Make the entry's call now, with arrays of this arena; its arrays, in order.

        Args:
            at: by place, arrays in place of the arena's. plain: by CuPy's own function, whatever stands for it in a graph. magnitudes: of the absolute values of these arrays.
        """
        given = at or {}
        values: list[Any] = [None] * (entry.size + len(entry.keys))
        for position, value in entry.constants:
            values[position] = value
        for position, place in entry.arrays:
            value = given.get(place, self.at[place])
            values[position] = abs(value) if magnitudes else value
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

    def build(
        self,
        segment: tuple[int, int],
        launch: Callable[[Step], None],
        wrote: Callable[[Any], None] = lambda array: None,
    ) -> None:
        """Make the arrays of a segment and fill them, step by step; `launch` runs the kernels of a step, and `wrote` is told of each array
        that may have been written to.

        Raises:
            CannotCapture: at a call that failed. CannotFuse: at kernels that did.
        """
        for step in self.program.steps(segment):
            try:
                self._allocate(step)
                if step.kernels:
                    launch(step)
                for cluster in step.kernels:
                    for place in cluster.writes:
                        wrote(self.at[place])
            except Exception as error:
                raise CannotFuse(f"kernels for several calls: {type(error).__name__}: {error}") from None
            for number in [step.number, *step.views] if step.number >= 0 else step.views:
                entry = self.program.entries[number]
                try:
                    self._first(entry)
                except Exception as error:
                    raise CannotCapture(number, f"{entry.name}: {type(error).__name__}: {error}") from None
                if number == step.number:
                    for place in _may_write(entry):
                        wrote(self.at[place])

    def _allocate(self, step: Step) -> None:
        """Arrays for what the step's kernels give, lying as those of the recorded step."""
        for cluster in step.clusters:
            for each in cluster.elements:
                if self.at[each.place] is None:
                    entry = self.program.entries[self.program.results[each.place]]
                    self.at[each.place] = self.module.empty_like(entry.samples[0])

    def _first(self, entry: Entry) -> None:
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
            if value is not own and not one_memory(value, own):
                own[...] = value


def _may_write(entry: Entry) -> list[int]:
    """Places that a call may write to: of products only what they give."""
    if entry.name in PRODUCTS:
        return list(entry.gives)
    nested = (place for _, items in entry.nested for place, _ in items if place >= 0)
    return [*entry.changes, *entry.gives, *(place for _, place in entry.arrays), *nested]


class Plain:
    """A backend whose segments are calls one by one: where there is no device, and for tests. What kernels would not write to memory is
    made no number, so that whoever reads it is found.
    """

    timed = False  # it is not for speed

    def build(self, program: Program, module: Any, segments: list[tuple[int, int]]) -> Arena:
        """An arena whose arrays are there. What the calls change of the loop's own is put back."""
        arena = Arena(program, module)
        before = {place: value.copy() for place, value in program.kept.items()}
        for segment in segments:
            arena.build(segment, lambda step: self._kernels(arena, step))
        for place, value in before.items():
            program.kept[place][...] = value
        return arena

    def launch(self, arena: Arena, segment: tuple[int, int]) -> None:
        """Fill what the calls of this segment give."""
        for step in arena.program.steps(segment):
            self._kernels(arena, step)
            if step.number >= 0:
                entry = arena.program.entries[step.number]
                if entry.name not in UNFILLED:
                    arena.take(entry, arena.run(entry))

    def masked(self, name: str) -> Callable[..., Any]:
        """What does `target[mask] op= number` in place, of target, mask and number; "" is an assignment."""

        def change(target: Any, mask: Any, number: Any) -> None:
            target[mask] = getattr(target[mask], name)(number) if name else number

        return change

    def operation(self, found: Meaning, inputs: list[Any]) -> Callable[..., None]:
        """What computes this of its inputs into an output."""

        def call(*values: Any) -> None:
            values[-1][...] = found.operation(*values[:-1])

        return call

    def faster(self, first: Callable[[], Any], second: Callable[[], Any]) -> bool:
        """Nobody times it."""
        return True

    def _kernels(self, arena: Arena, step: Step) -> None:
        for cluster in reversed(step.clusters):  # in which order is nobody's business
            _compute(arena, cluster)


def _compute(arena: Arena, cluster: Cluster) -> None:
    at = {place: arena.at[place].copy() for place in cluster.reads}
    for each in cluster.elements:
        entry = arena.program.entries[each.number]
        if each.windows:
            at[each.place] = arena.module.asarray(_sum_of(each, arena.at))
            continue
        found = arena.run(entry, at=at)
        if found and not each.target:
            at[each.place] = found[0]
    for place in cluster.writes:
        arena.at[place][...] = at[place]
    for place in cluster.dead:
        arena.at[place].fill(np.nan if arena.at[place].dtype.kind == "f" else 1)


def _sum_of(each: Element, at: list[Any]) -> Any:
    """What an element of windows gives, made by NumPy."""
    total = np.zeros(each.shape, dtype=each.gives)
    for window in each.windows:
        index = tuple(
            slice(start, start + step * length, step)
            for start, step, length in zip(window.starts, window.steps, window.lengths, strict=True)
        )
        value = np.asarray(at[window.place])
        if window.dims is not None:
            here = iter(reversed(value.shape))
            value = value.reshape([next(here, 1) if d in window.dims else 1 for d in reversed(range(total.ndim))][::-1])
        if window.put:
            total[index] = value
        else:
            total[index] += value
    return total
