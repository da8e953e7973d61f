"""Finds the steps of a CuPy loop, and tells its listeners at each boundary.

While steps are looked for, every call of the surface is seen. Once their period shows, one kind of call alone is left wrapped: the one
that a step begins with, chosen so that the loop makes few of that kind. `advisor.step()` is a boundary of its own, and the only one from
the first on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from advisor.cupy_loops.clock import record
from advisor.cupy_loops.period import Anchor, find_anchor
from advisor.loop import stop
from advisor.loop.patches import Patches
from advisor.loop.sources import Lines
from advisor.loop.training import StepEvent
from advisor.profiling.inside.cupy_surface import Surface

# A batch comes to the device by one of these: where a step begins, if it is made once a step.
BATCHES = ("array", "asarray", "random.permutation", "get", "set")
FIRST_LOOK, MOST_CALLS = 64, 400_000  # of calls: the first look for a period, and when it is given up
LOOK_AGAIN = 1.3  # times as many calls as at the last look


class Watcher:
    """Steps of the loop that this thread runs, in order; `on_step` is called inside the user's call that begins the next one.

    Attributes:
        kind: "period", "marker", or "none" while nothing is known.
        anchor: the call that steps begin with, once it is known.
    """

    def __init__(self, module: Any, patches: Patches | None = None) -> None:
        self.module = module
        self.patches = patches if patches is not None else Patches()
        self.kind = "none"
        self.anchor: Anchor | None = None
        self.on_step: list[Callable[[StepEvent], None]] = []
        self.on_call: list[Callable[[str, str, Any], None]] = []  # name, line and result, while steps are looked for
        self.steps = 0
        self.lines = Lines()
        self.calls: list[tuple[str, str]] = []
        self._next_look = FIRST_LOOK
        self._count = 0
        self._search = Patches()
        self._anchored = Patches()
        self._search.on_fault.append(self._fault)
        self._anchored.on_fault.append(self._fault)
        self.patches.undo(self._search.restore_all)
        self.patches.undo(self._anchored.restore_all)
        Surface(module, self._seen, self._search).patch()

    def mark(self) -> None:
        """`advisor.step()`: a step ends here."""
        if not self.patches.active:
            return
        if self.kind != "marker":
            self.kind = "marker"
            self._search.restore_all()
            self._anchored.restore_all()
        self._boundary()

    def detach(self) -> None:
        """Nothing of this is left in the process."""
        self.patches.restore_all()

    def line(self, depth: int = 3) -> str:
        """The user's line that called, `depth` frames up."""
        return self.lines.users(sys._getframe(depth))

    def _seen(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        line = self.lines.call(sys._getframe(2))
        result = plain(*args, **kwargs)
        try:
            self._note(name, line, result)
        except Exception as error:
            self._search.switch_off(error)
        return result

    def _note(self, name: str, line: str, result: Any) -> None:
        for listener in self.on_call:
            listener(name, line, result)
        self.calls.append((name, line))
        if len(self.calls) < self._next_look:
            return
        self._next_look = int(LOOK_AGAIN * len(self.calls)) + 1
        found = find_anchor(self.calls, BATCHES)
        if found is not None:
            self._settle(found)
        elif len(self.calls) > MOST_CALLS:
            self.calls.clear()
            self._search.restore_all()

    def _settle(self, anchor: Anchor) -> None:
        self._search.restore_all()
        self.kind, self.anchor, self._count = "period", anchor, 0
        self.calls = self.calls[-anchor.period :]
        Surface(self.module, self._anchor_seen, self._anchored).patch([str(anchor.key[0]).partition(":")[0]])  # type: ignore[index]  # settled: the anchor's key is a pair

    def _anchor_seen(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        anchor = self.anchor
        if anchor is not None and (name, self.lines.call(sys._getframe(2))) == anchor.key:
            self._count += 1
            if self._count >= anchor.count:
                self._count = 0
                self._boundary()
        return plain(*args, **kwargs)

    def _boundary(self) -> None:
        if stop.requested():
            stop.insist()
        event = StepEvent(index=self.steps, host_ns=time.perf_counter_ns(), event=record(self.module), clean=True)  # type: ignore[arg-type]  # CuPy's event has what is asked of torch's
        self.steps += 1
        try:
            for listener in tuple(self.on_step):
                listener(event)
        except Exception as error:  # StopTraining is none
            self.patches.switch_off(error)

    def _fault(self, error: BaseException) -> None:
        self.patches.switch_off(error)
