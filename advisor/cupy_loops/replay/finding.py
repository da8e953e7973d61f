"""Finds the step of a loop in its calls, and records two of them in a row."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from advisor.cupy_loops.period import Anchor, find_anchor
from advisor.cupy_loops.replay import augmented
from advisor.cupy_loops.replay.calls import CupyCall
from advisor.cupy_loops.replay.worth import Worth
from advisor.cupy_loops.watch import BATCHES, FIRST_LOOK, LOOK_AGAIN
from advisor.loop.sources import Lines

MOST_CALLS = 200_000  # without a period
SETTLING = 3  # steps that pass between the period and the recording: state that comes with the first steps is there
TIMED = 8  # of them before the first recording, which are timed
MOST_FAILED = 8  # recordings that were no two steps in a row


class Finder:
    """Given every call until two steps are recorded.

    Attributes:
        given_up: why there will be none; "" while there may.
    """

    def __init__(self, array: Any, worth: Worth) -> None:
        self.array, self.worth = array, worth
        self.given_up = ""
        self.anchor: Anchor | None = None
        self.failed = 0
        self._lines = Lines()
        self._calls: list[tuple[str, str]] = []
        self._next_look = FIRST_LOOK
        self._count = self._settled = 0
        self._steps: list[list[CupyCall]] = []
        self._timed = False  # plain steps are

    def anew(self) -> None:
        """Record two steps again, of the same period."""
        self._count = self._settled = 0
        self._steps = []

    def take(self) -> list[list[CupyCall]]:
        """The two recorded steps; they are forgotten here."""
        steps, self._steps = self._steps, []
        return steps

    def at_anchor(self, name: str, frame: FrameType) -> bool:
        """Whether a call of this name that `frame` makes is the one that steps begin with."""
        return self.anchor is not None and (name, self._lines.call(frame)) == self.anchor.key

    def see(
        self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """Make one call: (False, its result). (True, None): it is not made, two steps are recorded and it begins the third."""
        started = self.worth.now()
        line = self._lines.call(sys._getframe(3))
        if self.anchor is None:
            self._look_for_period(name, line)
        elif not self._steps:
            self._pass(name, line)
        if self._steps:
            return self._record(name, plain, args, kwargs, line)
        self.worth.seeing_s += self.worth.now() - started
        return False, plain(*args, **kwargs)

    def _look_for_period(self, name: str, line: str) -> None:
        self._calls.append((name, line))
        if len(self._calls) < self._next_look:
            return
        self._next_look = int(LOOK_AGAIN * len(self._calls)) + 1
        self.anchor = find_anchor(self._calls, BATCHES)
        if self.anchor is not None:
            self._calls = []
        elif len(self._calls) > MOST_CALLS:
            self.given_up = "its calls have no period"

    def _pass(self, name: str, line: str) -> None:
        anchor = self.anchor
        if anchor is None or (name, line) != anchor.key:
            return
        self._count += 1
        if self._count >= anchor.count:
            self._count = 0
            self._settled += 1
            settling = SETTLING if self.failed or self._timed else TIMED
            last = self._settled > settling
            if not self._timed:
                self.worth.plain(self._settled == 1, last)
            if last:
                self._steps, self._timed = [[]], True

    def _record(
        self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], line: str
    ) -> tuple[bool, Any]:
        anchor = self.anchor
        assert anchor is not None
        if len(self._steps[-1]) == anchor.period:
            if (name, line) != anchor.key:  # an evaluation, a print
                self.fail("no two steps in a row are alike")
                return False, plain(*args, **kwargs)
            if len(self._steps) == 2:
                return True, None
            self._steps.append([])
        call = CupyCall(name, plain, args, kwargs, None, line.partition("+")[0])
        call.augmented = name == "__getitem__" and augmented.begins(sys._getframe(4), args, self.array)
        call.result = plain(*args, **kwargs)
        self._steps[-1].append(call)
        return False, call.result

    def fail(self, why: str) -> None:
        """What was recorded was no step."""
        self.anew()
        self.failed += 1
        if self.failed >= MOST_FAILED:
            self.given_up = why
