"""Steps behind the traced window: some more where memory grew, and one for each look that slows a step down: what it holds, and how its
layers round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from advisor.core import storage
from advisor.core.held import HELD_FILE
from advisor.core.precision import PRECISION_FILE
from advisor.core.profile import MemoryStats
from advisor.loop.compiles import compiled_code_in_use
from advisor.loop.records import FACTS_FILE, FactsRecord
from advisor.loop.session import Session, tell
from advisor.loop.training import Training
from advisor.profiling.inside.growth import LEAST_READINGS
from advisor.profiling.inside.memory import MemoryProbe
from advisor.profiling.inside.timed import MEMORY_READINGS

LONGEST_S = 10.0  # a longer step is not made once more to see what it holds
# Memory that has grown is watched for so many steps more, or as many as take so long: CycleGAN's pools of images are full after 50.
WATCHED_STEPS, WATCHED_S = 64, 10.0


class LooksBehind:
    """The looks that a session has ordered, each with a step of its own. What fails is a note in `notes`, never the training's."""

    def __init__(
        self,
        training: Training,
        session: Session,
        notes: list[str],
        memory: MemoryStats,
        *,
        step_us: float,
        steps: int,
    ) -> None:
        self._training, self._session, self._notes, self._memory = training, session, notes, memory
        self._step_us, self._steps = step_us, steps
        self._looks = self._ordered()
        self._end: Callable[[], None] | None = None
        self._leave: Callable[[], None] | None = None  # takes the hooks off, and says nothing
        self._more: Callable[[], bool] | None = None  # whether the look wants another step

    def next(self) -> bool:
        """End the look at the step that is over, and begin the next one; False when there is none left."""
        if self._more is not None and self._more():
            return True
        if self._end is not None:
            self._guarded(self._end)
            self._end = self._leave = self._more = None
        for what, begin in self._looks:
            tell(self._session, "phase", phase=what, done=0, total=0)
            self._guarded(begin)
            if self._end is not None:
                return True
        return False

    def abandon(self) -> None:
        """Let go of the step: the script ends within it, or has raised. May be called twice."""
        leave, self._end, self._leave, self._more = self._leave, None, None, None
        if leave is not None:
            self._guarded(leave)

    def _ordered(self) -> Iterator[tuple[str, Callable[[], None]]]:
        grown = self._memory.growth_steady or self._memory.host_growth_bytes
        if grown and self._session.course and not self._session.brief and self._watched_steps() > LEAST_READINGS:
            yield "watching whether memory goes on growing", self._watch_growth
        if self._session.course and self._step_us < LONGEST_S * 1e6 and not compiled_code_in_use():
            yield "watching what a step holds", self._watch
        if self._session.precision:
            yield "comparing a step's layers with fp64", self._audit

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self._notes.append(f"a look behind the trace failed: {type(error).__name__}: {error}")

    def _watched_steps(self) -> int:
        return min(WATCHED_STEPS, int(WATCHED_S * 1e6 / max(self._step_us, 1.0)))

    def _watch_growth(self) -> None:
        wanted, count = self._watched_steps(), 0
        probe = MemoryProbe(self._training.device)

        def more() -> bool:
            nonlocal count
            count += 1
            if count % max(1, wanted // MEMORY_READINGS) == 0:
                probe.note(count)
            return count < wanted

        def end() -> None:
            path = self._session.folder / FACTS_FILE
            facts = storage.load(path, FactsRecord)
            storage.save(path, replace(facts, memory=still_growing(facts.memory, probe.stats(count))))

        self._more, self._end = more, end

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


def still_growing(before: MemoryStats, later: MemoryStats) -> MemoryStats:
    """`before`, without growth that had ended by the steps that `later` is of: a pool or a cache that is full."""
    host = before.host_growth_bytes
    return replace(
        before,
        growth_steady=before.growth_steady and later.growth_steady,
        host_growth_bytes=0.0 if host and not later.host_growth_bytes else host,
    )
