"""Two recorded steps in a row to a program: which arrays are a step's own, which the step's before, which the loop's, and what varies."""

from __future__ import annotations

from typing import Any

import numpy as np

from advisor.cupy_loops.replay.calls import (
    HOSTED,
    IN_PLACE,
    SOURCES,
    WRITERS,
    CupyCall,
    Entry,
    NotAStep,
    Program,
    arrays_of,
    flat,
    same,
)
from advisor.profiling.inside.cupy_surface import LOOKS

# Of two operands one may be a number that differs from step to step: in the graph it is an array without dimensions.
_WITH_NUMBERS = frozenset(
    f"__{turned}{name}__" for name in ("add", "sub", "mul", "truediv", "pow") for turned in ("", "r", "i")
) | {"multiply", "add", "subtract", "divide", "true_divide", "power", "maximum", "minimum"}

# What draws numbers, waits for the host, or brings arrays of its own to the device.
_MADE = ("random.", "linalg.", "cupyx.scipy.")


def understand(first: list[CupyCall], second: list[CupyCall], array: Any, varying: set[tuple[int, int]]) -> Program:
    """The program of the loop that made these two steps, one behind the other.

    Args:
        varying: (call, position) of numbers that have been seen to vary before.

    Raises:
        NotAStep: what one step does the other does not.
    """
    if len(first) != len(second):
        raise NotAStep("two steps make different numbers of calls")
    return _Reader(first, second, array, varying).program()


class _Reader:
    def __init__(
        self, first: list[CupyCall], second: list[CupyCall], array: Any, varying: set[tuple[int, int]]
    ) -> None:
        self.first, self.second, self.array, self.varying = first, second, array, varying
        self.now: dict[int, int] = {}  # object → place
        self.out = Program(entries=[], places=0)
        self.fixed: dict[int, int] = {}  # object → place, of kept and carried and given ones

    def place(self) -> int:
        self.out.places += 1
        return self.out.places - 1

    def program(self) -> Program:
        for number, (old, new) in enumerate(zip(self.first, self.second, strict=True)):
            self.out.entries.append(self._entry(number, old, new))
        return self.out

    def _entry(self, number: int, old: CupyCall, new: CupyCall) -> Entry:
        olds, _ = flat(old.args, old.kwargs)
        news, keys = flat(new.args, new.kwargs)
        if old.name != new.name or len(olds) != len(news) or tuple(sorted(old.kwargs)) != keys:
            raise NotAStep(f"{old.name} in one step is {new.name} in the next, at {new.line}")
        entry = Entry(name=new.name, plain=new.plain, size=len(new.args), keys=keys)
        if old.result is NotImplemented and new.result is NotImplemented:
            return self._left_to_others(entry, olds, news)
        made = new.name in SOURCES | HOSTED or new.name.startswith(_MADE) or self._is_masked(new)
        if new.name in LOOKS:
            entry.how = "look"
        elif made:
            entry.how = "made"
        arrays, constants, scalars, nested = [], [], [], []
        for position, (a, b) in enumerate(zip(olds, news, strict=True)):
            if isinstance(b, self.array):
                arrays.append((position, self._place_of(a, b)))
            elif isinstance(b, (list, tuple)) and any(isinstance(v, self.array) for v in b):
                nested.append((position, self._nested(a, b)))
            elif same(a, b) and (number, position) not in self.varying:
                constants.append((position, b))
            elif entry.how == "run":
                if not self._may_vary(new, b):
                    entry.how = "made"
                else:
                    scalars.append((position, self.out.scalars))
                    self.out.scalars += 1
                    self.out.scalar_dtypes.append(self._dtype_beside(news))
        entry.arrays, entry.constants, entry.scalars, entry.nested = map(tuple, (arrays, constants, scalars, nested))
        entry.changes = self._note_writes(new)
        if entry.how == "made" and new.name in SOURCES and not arrays and not nested and self._is_constant(old, new):
            entry.how = "constant"
        elif entry.how == "made" and not arrays and not nested:
            entry.constants = ()  # whatever it is given
        elif entry.how == "made" and new.name in SOURCES and arrays:
            entry.how = "run"  # a device array again
        self._give(number, entry, new)
        return entry

    def _left_to_others(self, entry: Entry, olds: list[Any], news: list[Any]) -> Entry:
        """An operator of an array that leaves the work to the other operand, of a class of the script's own."""
        pairs = list(enumerate(zip(olds, news, strict=True)))
        entry.arrays = tuple((i, self._place_of(a, b)) for i, (a, b) in pairs if isinstance(b, self.array))
        entry.types = tuple((i, type(b)) for i, (_, b) in pairs if not isinstance(b, self.array))
        entry.how, entry.single, entry.value = "placeholder", False, NotImplemented
        return entry

    def _give(self, number: int, entry: Entry, new: CupyCall) -> None:
        gives = []
        for value in arrays_of(new.result, self.array):
            known = self.now.get(id(value))
            if known is None:
                known = self.fixed.get(id(value))
            if known is None:
                known = self.now[id(value)] = self.place()
                self.out.results[known] = number
            gives.append(known)
        entry.gives, entry.single = tuple(gives), isinstance(new.result, self.array)
        entry.samples = list(arrays_of(new.result, self.array))
        if not gives:
            entry.value = new.result
            if new.result is not None and entry.how == "run":
                entry.how = "look"

    def _place_of(self, a: Any, b: Any) -> int:
        """Where array `b` of the second step lives; `a` stood there in the first."""
        known = self.now.get(id(b), self.fixed.get(id(b)))
        if known is not None:
            return known
        if b.base is not None and id(b.base) in self.now:
            raise NotAStep("a view of a step's array comes from where no call was seen")
        place = self.fixed[id(b)] = self.place()
        if a is b:
            self.out.kept[place] = b
        else:
            self.out.given[place] = b
        return place

    def _nested(self, a: Any, b: Any) -> tuple[tuple[int, Any], ...]:
        if not isinstance(a, (list, tuple)) or len(a) != len(b):
            raise NotAStep("a list of arrays has another length in the next step")
        found: list[tuple[int, Any]] = []
        for x, y in zip(a, b, strict=True):
            if isinstance(y, self.array):
                found.append((self._place_of(x, y), None))
            elif same(x, y):
                found.append((-1, y))
            else:
                raise NotAStep("a list holds a number that differs from step to step")
        return tuple(found)

    def _is_masked(self, call: CupyCall) -> bool:
        """An index that says of each element if it is meant: how many are, the host must know."""
        if call.name not in ("__getitem__", "__setitem__") or len(call.args) < 2:
            return False
        index = call.args[1]
        parts = index if isinstance(index, tuple) else (index,)
        return any(isinstance(part, self.array) and part.dtype.kind == "b" for part in parts)

    def _note_writes(self, call: CupyCall) -> tuple[int, ...]:
        """Arrays that this call changes in place, themselves or through a view; the places of what it names."""
        found = []
        targets = []
        if call.name in IN_PLACE or call.name in WRITERS:
            targets = list(call.args[:1])
        elif "Kernel:" in call.name:
            targets = [*call.args, *(v for a in call.args if isinstance(a, (list, tuple)) for v in a)]
        targets += [call.kwargs[key] for key in ("out",) if key in call.kwargs]
        for target in targets:
            if isinstance(target, self.array):
                root = target if target.base is None else target.base
                for value in (target, root):
                    place = self.now.get(id(value), self.fixed.get(id(value)))
                    if place is not None:
                        self.out.written.add(place)
                        found.append(place)
        return tuple(found)

    def _may_vary(self, call: CupyCall, value: Any) -> bool:
        return (
            call.name in _WITH_NUMBERS
            and type(value) in (int, float, np.float64)
            and self._dtype_beside(call.args) is not None
        )

    def _dtype_beside(self, values: Any) -> Any:
        found = [v.dtype for v in values if isinstance(v, self.array) and v.dtype.kind == "f"]
        return found[0] if found else None

    def _is_constant(self, old: CupyCall, new: CupyCall) -> bool:
        """A number made an array of: the same in both steps, and nobody writes into it."""
        (a, *_), (b, *_) = old.args or (None,), new.args or (None,)
        if not isinstance(b, (int, float, np.floating, np.integer)) or not same(a, b):
            return False
        writes = (c for c in self.second if c.name in IN_PLACE or c.name == "__setitem__" or "Kernel:" in c.name)
        return all(new.result is not given for c in writes for given in (c.args if "Kernel:" in c.name else c.args[:1]))
