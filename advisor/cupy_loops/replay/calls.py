"""A step's calls as data: what each takes, by where that came from, and what it gives.

A place is where an array of a step lives, by number. Each is one of: the result of a call of this step; an array that is the same object in
each step (kept); an array that comes from the step before, or from where nobody sees it (given).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

# Calls whose results come from the host or from a generator: made as ever in each step, their arrays copied to where the graph reads them.
SOURCES = frozenset({"array", "asarray", "asanyarray", "ascontiguousarray"})
# What only the host can tell the shape of, and what makes the host wait: as ever in each step.
HOSTED = frozenset(
    {"nonzero", "argwhere", "flatnonzero", "unique", "bincount", "histogram", "compress", "extract", "set"}
)
PRODUCTS = frozenset({"dot", "matmul", "tensordot", "einsum", "inner", "__matmul__", "__rmatmul__"})
UNFILLED = frozenset({"empty", "empty_like", "ndarray"})  # what these give holds no values yet
IN_PLACE = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "and", "or", "xor", "floordiv", "mod")
)
# What changes its first argument.
WRITERS = frozenset(
    [
        "__setitem__",
        "fill",
        "sort",
        "partition",
        "put",
        "set",
        "scatter_add",
        "scatter_max",
        "scatter_min",
        "cupyx.scatter_add",
        "cupyx.scatter_max",
        "cupyx.scatter_min",
        "copyto",
        "putmask",
        "place",
        "fill_diagonal",
        "add.at",
        "subtract.at",
        "multiply.at",
    ]
)


class NotAStep(Exception):
    """Why what was recorded makes no program."""


class CannotCapture(NotAStep):
    """A call that a graph cannot hold: `number` in the program."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


class CannotFuse(NotAStep):
    """Why calls run one by one."""


@dataclass(slots=True, eq=False)
class CupyCall:
    """One call as it was made; `result` holds its arrays alive while a step is recorded."""

    name: str
    plain: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    line: str = ""
    augmented: bool = False  # it is one of the three calls of `a[mask] op= value`


@dataclass(slots=True, eq=False)
class Entry:
    """One call of the recorded step.

    arrays: (position among `flat`, place) of what it takes; scalars: (position, number) of numbers that differ from step to step;
    constants: (position, value) of all else. nested: (position, items) of lists that hold arrays; an item is (place, None), or (-1, value)
    of what is no array. gives: the places of its results, in order; `single` where it returns one array by itself.
    how: "run" in the graph; "made" in each step, by the plain call (sources, and what a graph cannot hold); "look": made, and the host sees
    values; "constant": an array that is the same in each step; "placeholder": its result is nobody's (see augmented.py).
    """

    name: str
    plain: Callable[..., Any]
    size: int
    keys: tuple[str, ...]
    arrays: tuple[tuple[int, int], ...] = ()
    scalars: tuple[tuple[int, int], ...] = ()
    constants: tuple[tuple[int, Any], ...] = ()
    nested: tuple[tuple[int, tuple[tuple[int, Any], ...]], ...] = ()
    types: tuple[
        tuple[int, type], ...
    ] = ()  # of arguments that are asked for their type alone: an operator leaves the work to them
    gives: tuple[int, ...] = ()
    single: bool = True
    how: str = "run"
    value: Any = None  # what it returns where that is no array
    samples: list[Any] = field(
        default_factory=list
    )  # the arrays that it gave while it was recorded, until there is an arena
    changes: tuple[int, ...] = ()  # places whose arrays it changes, as far as the call names them
    idle: bool = False  # in a graph there is nothing to do: `a[i] = value` where value is a[i] itself, changed in place
    masked: tuple[str, Any] | None = (
        None  # it is `target[mask] op= number`: the operation's name, "" of an assignment; the number
    )
    run: Callable[..., Any] | None = None  # in place of `plain`, in the graph
    takes: tuple[int, ...] | None = None  # positions that this is called with; None: all
    # Answered by a look at its arrays and constants alone: those by position, and those by name; the place of what it gives, or -1: `value`.
    quick: bool = False
    positional: tuple[tuple[int, Any], ...] = ()
    named: dict[str, Any] = field(default_factory=dict)
    place: int = -1
    native: Any = None  # the same, for quick.cpp
    fresh: bool = False  # the script holds its arrays for longer than a step: it is given others, which are filled behind the graph
    next: Entry | None = None  # the entry of the next call


@dataclass(frozen=True, slots=True)
class Operand:
    """place: of an array; scalar: the number of a number that differs from step to step; else `value`, which is in the source."""

    place: int = -1
    scalar: int = -1
    value: Any = None


@dataclass(frozen=True, slots=True)
class Window:
    """Where an array is added into a larger one, or put: by dimension of the larger, the first element, the distance of elements, and how
    many.
    """

    place: int  # of the array that is added, which may be broadcast to `lengths`
    starts: tuple[int, ...]
    steps: tuple[int, ...]
    lengths: tuple[int, ...]
    put: bool = False  # what was there is gone
    dims: tuple[int, ...] | None = None  # dimensions of the larger one that the array has; None: all, the last ones


@dataclass(frozen=True, slots=True)
class Element:
    """One elementwise call. `code`: the expression, with {0}, {1} … for operands of type `inside`; the result is stored as `gives` at `place`.
    `target`: `place` is changed in place.
    """

    number: int
    code: str
    operands: tuple[Operand, ...]
    inside: str
    gives: str
    place: int
    shape: tuple[int, ...]
    target: bool = False
    windows: tuple[Window, ...] = ()  # in place of an expression: these added or put, in their order, from 0
    also: tuple[int, ...] = ()  # further calls that it stands for
    # In place of an expression: the largest (`code` is ">") or smallest of an array's elements over these of its dimensions.
    reduced: tuple[int, tuple[int, ...]] | None = None

    @property
    def moves(self) -> bool:
        """Whether it reads other elements of an array than the one at its own place."""
        return bool(self.windows) or self.reduced is not None

    @property
    def looked_through(self) -> list[int]:
        """Places of arrays of which it reads other elements than the one at its own place."""
        found = [window.place for window in self.windows]
        return found if self.reduced is None else [*found, self.reduced[0]]


@dataclass(slots=True, eq=False)
class Cluster:
    """Elementwise calls of one shape that run as one kernel."""

    shape: tuple[int, ...]
    elements: list[Element] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)  # places read before the kernel writes them
    writes: list[int] = field(default_factory=list)  # places whose values go to memory
    dead: list[int] = field(default_factory=list)  # places that nobody but the kernel's own calls reads


@dataclass(slots=True, eq=False)
class Step:
    """What is launched as one: a call by its number, or kernels that do not need each other."""

    number: int = -1
    clusters: list[Cluster] = field(default_factory=list)
    views: list[int] = field(
        default_factory=list
    )  # calls without work of their own, which only need what is there by now

    @property
    def kernels(self) -> list[Cluster]:
        """Clusters that have something to do: where nobody reads what one gives there is only its memory."""
        return [cluster for cluster in self.clusters if cluster.writes]


@dataclass(slots=True, eq=False)
class Program:
    """A recorded step."""

    entries: list[Entry]
    places: int
    results: dict[int, int] = field(default_factory=dict)  # place → entry that gives it
    kept: dict[int, Any] = field(default_factory=dict)
    given: dict[int, Any] = field(default_factory=dict)  # place → an array like it
    written: set[int] = field(default_factory=set)  # places whose arrays the step changes in place
    scalars: int = 0
    scalar_dtypes: list[Any] = field(default_factory=list)
    plans: dict[tuple[int, int], list[Step]] = field(
        default_factory=dict
    )  # by segment, in what order and together with what its calls run
    alive: set[int] = field(default_factory=set)  # entries whose arrays the script holds while a segment is launched

    def link(self) -> None:
        """Each entry knows the next, and whether a look at its arguments is all that a call of it takes."""
        for entry, after in zip(self.entries, [*self.entries[1:], None], strict=True):
            entry.next = after
            plain = not (entry.nested or entry.scalars or entry.types) and all(
                position < entry.size for position, _ in entry.arrays
            )
            answers = (entry.single and len(entry.gives) == 1) or not entry.gives
            entry.quick = plain and answers and not entry.fresh and entry.how in ("run", "placeholder", "constant")
            entry.place = entry.gives[0] if entry.gives else -1
            entry.positional = tuple(pair for pair in entry.constants if pair[0] < entry.size)
            entry.named = {entry.keys[at - entry.size]: value for at, value in entry.constants if at >= entry.size}

    def hand_out(self, entries: set[int]) -> None:
        """The script holds the arrays of these entries for longer than a step.

        Raises:
            NotAStep: of one that the step changes in place: a copy would miss that.
        """
        for number in entries:
            entry = self.entries[number]
            if self.written.intersection(entry.gives):
                raise NotAStep(f"the script holds arrays of earlier steps that are changed in place: {entry.name}")
            entry.fresh = True

    def segments(self) -> list[tuple[int, int]]:
        """Stretches of calls that are launched as one: they end where a call needs what they give."""
        found, first = [], 0
        for number, entry in enumerate(self.entries):
            if entry.how in ("look", "made") and (entry.arrays or entry.nested):
                if number > first:
                    found.append((first, number))
                first = number + 1
        if first < len(self.entries):
            found.append((first, len(self.entries)))
        return found

    def steps(self, segment: tuple[int, int]) -> list[Step]:
        """What runs in a segment, in order; without a plan each call by itself."""
        if segment in self.plans:
            return self.plans[segment]
        return [Step(number=n) for n in range(*segment) if self.entries[n].how == "run" and not self.entries[n].idle]

    def unwritten(self, segment: tuple[int, int]) -> list[int]:
        """Places of a segment whose values never go to memory."""
        return [place for step in self.plans.get(segment, ()) for cluster in step.clusters for place in cluster.dead]

    def forget(self, at: list[Any]) -> None:
        """Arrays of the recorded steps are the script's alone again; `at` has arrays like those that come in."""
        for entry in self.entries:
            entry.samples = []
        self.given = {place: at[place] for place in self.given}


def flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], tuple[str, ...]]:
    """All arguments in a row: those by position, then those by name in the order of their names."""
    if not kwargs:
        return list(args), ()
    keys = tuple(sorted(kwargs))
    return [*args, *(kwargs[key] for key in keys)], keys


def arrays_of(value: Any, array: Any) -> Iterator[Any]:
    """The arrays that a result holds, in order."""
    if isinstance(value, array):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            if isinstance(item, array):
                yield item


def same(a: Any, b: Any) -> bool:
    """Whether two arguments that are no arrays say the same."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    try:
        return bool(a == b)
    except Exception:  # NumPy's arrays, and what cannot be compared
        return False


def alike(a: Any, b: Any) -> bool:
    """Whether one array may stand for the other in a recorded call."""
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.strides == b.strides)
