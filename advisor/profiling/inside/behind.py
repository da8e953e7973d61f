"""Steps behind the traced window, one for each look that slows a step down: what it holds, and how its layers round."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from advisor.core import storage
from advisor.core.held import HELD_FILE
from advisor.core.precision import PRECISION_FILE
from advisor.loop.compiles import compiled_code_in_use
from advisor.loop.session import Session, tell
from advisor.loop.training import Training

LONGEST_S = 10.0  # a longer step is not made once more to see what it holds


class LooksBehind:
    """The looks that a session has ordered, each with a step of its own. What fails is a note in `notes`, never the training's."""

    def __init__(self, training: Training, session: Session, notes: list[str], *, step_us: float, steps: int) -> None:
        self._training, self._session, self._notes = training, session, notes
        self._step_us, self._steps = step_us, steps
        self._looks = self._ordered()
        self._end: Callable[[], None] | None = None
        self._leave: Callable[[], None] | None = None  # takes the hooks off, and says nothing

    def next(self) -> bool:
        """End the look at the step that is over, and begin the next one; False when there is none left."""
        if self._end is not None:
            self._guarded(self._end)
            self._end = self._leave = None
        for what, begin in self._looks:
            tell(self._session, "phase", phase=what, done=0, total=0)
            self._guarded(begin)
            if self._end is not None:
                return True
        return False

    def abandon(self) -> None:
        """Let go of the step: the script ends within it, or has raised. May be called twice."""
        leave, self._end, self._leave = self._leave, None, None
        if leave is not None:
            self._guarded(leave)

    def _ordered(self) -> Iterator[tuple[str, Callable[[], None]]]:
        if self._session.course and self._step_us < LONGEST_S * 1e6 and not compiled_code_in_use():
            yield "watching what a step holds", self._watch
        if self._session.precision:
            yield "comparing a step's layers with fp64", self._audit

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._notes.append(f"a look behind the trace failed: {type(error).__name__}: {error}")

    def _watch(self) -> None:
        from advisor.profiling.inside.held import Look

        look = Look(self._training)
        self._leave = look.end
        look.begin()

        def end() -> None:
            look.end()
            self._save(HELD_FILE, look.result(step_us=self._step_us, steps=self._steps, applied=()))

        self._end = end

    def _audit(self) -> None:
        from advisor.profiling.inside.precision import Audit

        audit = Audit(self._training)
        self._leave = audit.leave
        audit.begin()
        self._end = lambda: self._save(PRECISION_FILE, audit.end())

    def _save(self, name: str, found: Any) -> None:
        storage.save(self._session.folder / name, found)
