"""Sees every call of a CuPy loop, records a step when its period shows, and from then on answers the calls of each step from arrays that
are filled by a graph: at the end of the step, or as soon as somebody looks.

A call that is not the recorded one ends the replay of that step: what was answered so far is made for real, in order, and the step goes on
as it was written. A loop in which that happens too often is left alone from then on.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from advisor.core.errors import first_line
from advisor.cupy_loops.replay import augmented, checked, naive, quick
from advisor.cupy_loops.replay.arena import Arena
from advisor.cupy_loops.replay.beside import around, loaded_beside, used_by_script
from advisor.cupy_loops.replay.calls import Entry, NotAStep, Program, arrays_of, flat, same
from advisor.cupy_loops.replay.finding import Finder
from advisor.cupy_loops.replay.incoming import Incoming
from advisor.cupy_loops.replay.making import make, set_apart
from advisor.cupy_loops.replay.understand import understand
from advisor.cupy_loops.replay.worth import Worth
from advisor.loop.patches import Patches

ATTEMPTS = 8  # programs made, before the loop is left alone
STEADY = 200  # replayed steps behind which earlier attempts are forgotten
LEARN_AGAIN = 2  # broken steps in a row
MOST_COLLECTED = 5  # full collections of Python's garbage, which may take as long as a step
JUDGED, LEAST_REPLAYED = 60, 0.7  # steps, and the share of them that must have been replayed to the end
FIND, REPLAY, OFF = "find", "replay", "off"


class Recorder(quick.state()):  # type: ignore[misc]  # a class known at run time
    """The handler of a `Surface`.

    Args:
        backend: makes what makes arenas and launches them (`arena.Plain`, `cuda.Graphs`), once there is a step: a script may still choose
            its device.
    """

    inside: bool
    expected: Entry | None
    at: list[Any]

    def __init__(self, module: Any, patches: Patches, backend: Callable[[], Any]) -> None:
        super().__init__()
        self.module, self.patches = module, patches
        self.array = module.ndarray
        self.backend: Any = None
        self.worth = Worth(module)
        self.finder = Finder(self.array, self.worth)
        self.phase, self.why = FIND, ""
        self.refused: list[str] = []  # calls that a graph cannot hold, and why
        self.naive: list[str] = []  # kernels of the script's that others stand for, and what they compute
        self.replayed = self.broken = self.programs = 0
        self.wrong = ""  # how a graph has given other values than its calls; the loop is left alone behind this step
        self.unfused = ""  # why calls of a graph run one by one
        self.apart: set[str] = set()  # calls that do, of those that could be fused: a graph has got them wrong
        self.program: Program | None = None
        self.segments: list[tuple[int, int]] = []
        self._make_backend = backend
        self._beside: set[str] = set()
        self._varying: set[tuple[int, int]] = set()
        self._arenas: list[Arena] = []
        self._turn = 0
        self._incoming = Incoming()
        self._missed = False  # the script holds what the kernels of a segment do not write
        self._alive: set[int] = set()  # entries whose arrays it holds while they are to be filled
        self._kept_by_script: set[int] = set()  # entries whose arrays it holds for longer than a step
        self._collected = self._judged = self._since = self._in_a_row = 0

    def seen(self) -> None:
        """All that is loaded by now is seen called, as patches are in their places: they load parts of cupyx themselves."""
        self._beside = loaded_beside()

    def seen_too(self, name: str) -> None:
        """So is this part of cupyx, and what it has brought with it."""
        self._beside |= around(name)

    # -- calls ------------------------------------------------------------------------------------------------------

    def wrap(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """What stands in the place of `plain`."""
        return quick.wrapped(self, name, plain)

    def handle(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One outermost call of the loop's."""
        if self.phase == FIND:
            begins, result = self.finder.see(name, plain, args, kwargs)
            if self.finder.given_up:
                self.leave(self.finder.given_up)
            if not begins:
                return result
            self._build()
        if self.phase == REPLAY:
            return self._replay(name, plain, args, kwargs)
        return plain(*args, **kwargs)

    def look(self) -> None:
        """Somebody is about to look at memory past the calls: all that was answered is made."""
        if self.phase == REPLAY and self.cursor > self.launched:
            self._break("somebody looks at memory")

    def leave(self, why: str) -> None:
        """The loop is left alone from now on."""
        self.finish()
        self.phase, self.why, self.expected = OFF, why, None
        self._arenas, self.at, self.program = [], [], None
        self.patches.restore_all()

    def finish(self) -> None:
        """What was answered in this step is filled: nobody will see its end."""
        inside, self.inside = self.inside, True  # what is done here is none of the loop's calls
        try:
            if self.phase == REPLAY and self.cursor > self.launched:
                self._make_real()
        finally:
            self.inside = inside

    # -- making a program -------------------------------------------------------------------------------------------

    def _build(self) -> None:
        self.programs += 1
        steps = self.finder.take()
        if unseen := used_by_script(loaded_beside() - self._beside):
            self.leave(f"the script uses {unseen[0]}, whose calls are not seen")
            return
        try:
            self.backend = self.backend or self._make_backend()
            program = understand(steps[0], steps[1], self.array, self._varying)
            augmented.fold(program, steps[1], self.backend.masked)
            self.naive += [
                told for told in naive.replace(program, steps[1], self.module, self.backend) if told not in self.naive
            ]
            program.hand_out(self._kept_by_script)
            program.alive = self._alive
            steps.clear()
            made = make(program, self.module, self.backend, self.unfused, self.apart)
        except NotAStep as error:
            self.finder.fail(str(error))
            if self.finder.given_up:
                self.leave(self.finder.given_up)
            return
        except Exception as error:
            self.leave(f"the step cannot be replayed: {first_line(error)}")
            return
        program.link()
        quick.link(program.entries, type(self))
        self._arenas, self.segments, self.unfused = made.arenas, made.segments, made.unfused
        self.refused += made.refused
        self.worth.recorded()
        self.program, self.phase = program, REPLAY
        self._turn = self.cursor = self.launched = self._since = 0

    # -- replaying --------------------------------------------------------------------------------------------------

    def _replay(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        program = self._program()
        cursor = self.cursor
        entry = program.entries[cursor]
        if cursor == 0:
            if not self._begins(entry, name, args, kwargs):
                return plain(*args, **kwargs)
        elif entry.name != name or not self._fits(entry, args, kwargs):
            return self._differs(entry, name, plain, args, kwargs)
        self.cursor, self.expected = cursor + 1, entry.next
        if entry.how in ("look", "made"):
            result = self._make(entry, cursor, plain, args, kwargs)
        elif entry.fresh:
            result = self._promise(entry)
        elif entry.single:
            result = self.at[entry.gives[0]]
        else:
            result = [self.at[place] for place in entry.gives] if entry.gives else entry.value
        if self.program is program and self.cursor == len(program.entries):
            self.end()
        return result

    def _program(self) -> Program:
        assert self.program is not None  # while a step is replayed
        return self.program

    def _begins(self, entry: Entry, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a step begins with this call, and may be replayed: nobody holds what is to be overwritten."""
        if self.wrong and self._program().plans:
            if not set_apart(self.wrong, self.apart):
                self.unfused = self.wrong
            self.wrong = ""
            self._anew()
            return False
        if self.wrong:
            self.leave(self.wrong)
            return False
        if entry.name != name or not self.finder.at_anchor(name, sys._getframe(4)):
            return False
        self.at = []
        if self._arenas[self._turn].held() and not self._other_turn():
            return False
        self.at = list(self._arenas[self._turn].at)
        self._incoming.clear()
        return self._fits(entry, args, kwargs)

    def _other_turn(self) -> bool:
        """Whether there is an arena of which nobody holds anything, behind Python's own collection of what only holds itself."""
        first, second = self._turn, 1 - self._turn
        if not self._arenas[second].held():
            self._turn = second
            return True
        gc.collect(1)
        if self._arenas[first].held() and self._collected < MOST_COLLECTED:
            self._collected += 1
            gc.collect()
        # What the first has given has been held for two steps; the other's may be the last step's.
        if held := self._arenas[first].held():
            self._hand_out(held)
            return False
        return True

    def _fits(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if len(args) != entry.size or ((kwargs or entry.keys) and tuple(sorted(kwargs)) != entry.keys):
            return False
        values: Any = args if not kwargs else flat(args, kwargs)[0]
        at = self.at
        for position, place in entry.arrays:
            value = values[position]
            if value is not at[place] and not self._comes_in(place, value):
                return False
        for position, constant in entry.constants:
            value = values[position]
            if value is not constant and not same(value, constant):
                return False
        for position, kind in entry.types:
            if type(values[position]) is not kind:
                return False
        for position, number in entry.scalars:
            value = values[position]
            if type(value) not in (float, int, np.float64):
                return False
            self._incoming.numbers[number] = value
        for position, places in entry.nested:
            items = values[position]
            if not isinstance(items, (list, tuple)) or len(items) != len(places):
                return False
            for item, (place, constant) in zip(items, places, strict=True):
                if place < 0:
                    if item is not constant and not same(item, constant):
                        return False
                elif item is not at[place] and not self._comes_in(place, item):
                    return False
        return True

    def _comes_in(self, place: int, value: Any) -> bool:
        """Whether this array may come in at a place that is filled from outside; then it does, once a step."""
        program = self._program()
        like = program.given.get(place)
        if like is None or place in self._incoming.outside or not isinstance(value, self.array):
            return False
        if value.shape != like.shape or value.dtype != like.dtype:
            return False
        if value.base is not None and id(value.base) in self._arenas[self._turn].owned:
            return False  # a view that no call made, of what is still to be filled
        self.at[place] = self._incoming.bound[place] = self._incoming.outside[place] = value
        return True

    def _make(self, entry: Entry, cursor: int, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call that is made in each step: its arrays go to where the graph reads them."""
        if entry.arrays or entry.nested:
            self._launch(cursor)
        result = plain(*args, **kwargs)
        for _, place in entry.arrays:
            if place in self._incoming.outside:  # it may have been changed
                self._incoming.bound[place] = self._incoming.outside[place]
        if entry.how != "made":
            return result
        values, arena = list(arrays_of(result, self.array)), self._arenas[self._turn]
        alike = len(values) == len(entry.gives) and all(
            value.shape == arena.at[place].shape and value.dtype == arena.at[place].dtype
            for place, value in zip(entry.gives, values, strict=True)
        )
        if not alike:
            self._break(f"{entry.name} gives another shape")
            return result
        for place, value in zip(entry.gives, values, strict=True):
            if value is not self.at[place]:
                self.at[place] = self._incoming.bound[place] = self._incoming.outside[place] = value
        return result

    def _promise(self, entry: Entry) -> Any:
        """Arrays of the script's own, filled as soon as the graph is launched."""
        for place in entry.gives:
            self.at[place] = made = self.module.empty_like(self._arenas[self._turn].at[place])
            self._incoming.promised.append((place, made))
        found = [self.at[place] for place in entry.gives]
        return found[0] if entry.single else found

    def _hand_out(self, places: list[int]) -> None:
        """The script holds these arrays for longer than a step: record anew, and give it arrays of its own there."""
        program = self._program()
        self._kept_by_script.update(program.results[place] for place in places)
        self._in_a_row = LEARN_AGAIN
        self._note_broken("the script holds arrays of earlier steps")

    def _launch(self, until: int) -> None:
        """Fill what the calls up to `until` have promised."""
        arena, program = self._arenas[self._turn], self._program()
        self._incoming.fill(arena)
        for segment in self.segments:
            if self.launched <= segment[0] and segment[1] <= until:
                if missed := arena.missed(segment):
                    self._alive.update(program.results[place] for place in missed)
                    self._missed = True
                    arena.again(*segment)
                elif segment in arena.checked:
                    self.backend.launch(arena, segment)
                else:
                    arena.checked.add(segment)
                    wrong = checked.launched(self.backend, arena, segment)
                    self.wrong = self.wrong or wrong
        self.launched = until
        self._incoming.give_back(arena, program.written)

    def end(self) -> None:
        program = self._program()
        self._launch(len(program.entries))
        self.cursor = self.launched = 0
        self.expected = None
        self._turn = 1 - self._turn
        self.at = []
        self._incoming.clear()
        self.replayed += 1
        self._since += 1
        self._in_a_row = 0
        if self._since > STEADY:
            self.programs = 0
        if self.backend.timed and (why := self.worth.replayed()):
            self.leave(why)
            return
        if self._missed:
            self._anew()
            if self.programs >= ATTEMPTS:
                self.leave("the script holds other arrays in each step")
                return
        self._judge()

    # -- steps that go another way ----------------------------------------------------------------------------------

    def _differs(self, entry: Entry, name: str, plain: Any, args: Any, kwargs: Any) -> Any:
        if entry.name == name and len(args) == entry.size:
            for position, constant in entry.constants:
                if position < len(args) and not same(args[position], constant) and type(args[position]) in (float, int):
                    self._varying.add((self.cursor, position))
        self._break(f"{name} in the place of {entry.name}")
        return plain(*args, **kwargs)

    def _break(self, why: str) -> None:
        """This step goes on as it was written."""
        self._make_real()
        self._note_broken(why)

    def _make_real(self) -> None:
        """What was answered in this step and not filled is made, call by call."""
        arena = self._arenas[self._turn]
        self._incoming.fill(arena)
        arena.again(self.launched, self.cursor)
        self._incoming.give_back(arena, self._program().written)
        self.cursor = self.launched = 0
        self.expected = None
        self._turn = 1 - self._turn
        self.at = []
        self._incoming.clear()

    def _note_broken(self, why: str) -> None:
        self.broken += 1
        self.worth.broken()
        self.why = why
        self._in_a_row += 1
        if self._in_a_row >= LEARN_AGAIN:  # the loop has changed: another epoch's arrays, a number that varies
            self._anew()
            if self.programs >= ATTEMPTS:
                self.leave(why)
                return
        self._judge()

    def _anew(self) -> None:
        """Record the step again."""
        self._in_a_row, self._missed = 0, False
        self.finder.anew()
        self.phase, self.expected = FIND, None
        self._arenas, self.program, self.at = [], None, []

    def _judge(self) -> None:
        self._judged += 1
        if self._judged >= JUDGED:
            if self.replayed < LEAST_REPLAYED * self._judged:
                self.leave(f"too few of its steps are alike: {self.why}")
            self._judged = self.replayed = self.broken = 0
