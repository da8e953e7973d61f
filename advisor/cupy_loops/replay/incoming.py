"""What comes into a replayed step from outside, until its graph reads it; and what of the graph's goes back to the script."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from advisor.cupy_loops.replay.arena import Arena


class Incoming:
    """Of one step, by place in its arena."""

    def __init__(self) -> None:
        self.bound: dict[int, Any] = {}  # what came in there, and is not yet where the graph reads it
        self.outside: dict[int, Any] = {}  # what came in there in this step
        self.numbers: dict[int, Any] = {}  # by the number of the scalar
        self.promised: list[tuple[int, Any]] = []  # arrays of the script's own that are to be filled

    def clear(self) -> None:
        """Another step begins; promises stay until they are kept."""
        self.bound.clear()
        self.outside.clear()
        self.numbers.clear()

    def fill(self, arena: Arena) -> None:
        """What came in goes to where the graph reads it."""
        for place, value in self.bound.items():
            arena.at[place][...] = value
        self.bound.clear()
        for number, value in self.numbers.items():
            arena.scalars[number].fill(value)
        self.numbers.clear()

    def give_back(self, arena: Arena, written: Iterable[int]) -> None:
        """What came from outside and is changed in place, the script sees changed; what was promised is filled."""
        for place in written:
            value = self.outside.get(place)
            if value is not None:
                value[...] = arena.at[place]
        for place, made in self.promised:
            made[...] = arena.at[place]
        self.promised.clear()
