"""The across mode: changes tried in all ranks of `--gpus N` at once, in the running training.

Every rank switches the same change at the same boundary: the course of a trial hangs on nothing that is one rank's alone. What a block of
steps takes is the slowest rank's; each rank writes its own on the board (distributed/board.py) and reads the others', so all decide
alike, and by rank 0's word where time is up. A change that one rank cannot make is made by none. After each trial the ranks compare the norms of
their weights: replicas that have come apart end it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Generator
from typing import Any

import torch

from advisor.core import storage
from advisor.core.errors import first_line
from advisor.core.findings import Recommendation
from advisor.core.verdict import FAILED, INCONCLUSIVE, KEPT, NOT_APPLICABLE, REVERTED, SKIPPED, Blocks, Check, Verdict
from advisor.distributed import board
from advisor.distributed.place import LOST
from advisor.loop.attach import attach_training
from advisor.loop.session import Session, tell
from advisor.loop.stop import stop
from advisor.loop.training import StepEvent, Training
from advisor.transforms import registry
from advisor.transforms.base import Transform, Undo
from advisor.transforms.patch import parameters_of
from advisor.trials import records, statistics
from advisor.trials.kept import KeptChanges

BLOCK_S, LEAST_STEPS, MOST_STEPS, SETTLE = 0.3, 3, 40, 2
PATIENCE_S = 60.0  # for a rank to come to a boundary; or so many steps
PATIENCE_STEPS = 50
SLOWEST_FILE = "slowest.json"  # rank → blocks in which it was

Steps = Generator[None, None, Any]


def attach_across(session: Session) -> None:
    """The across mode, in each rank, once torch is imported."""
    training, _ = attach_training(session)
    AcrossDriver(training, session)


class AcrossDriver:
    """A `Training.on_step` listener; made at attach. Rank 0 writes the verdicts."""

    def __init__(
        self,
        training: Training,
        session: Session,
        place: board.Board | None = None,
        find: Callable[[str], Transform] = registry.get,
    ) -> None:
        self.training, self.session, self.find = training, session, find
        self._board = place or board.of_group(patience_s=PATIENCE_S)
        self._watch = None if place is not None else board.watch(patience_s=PATIENCE_S, lost=self._lost)
        self._kept = KeptChanges(training, session.kept, find)
        self._settled = self._kept.settle()
        self._seen = 0
        self._slowest: dict[int, int] = {}  # rank → blocks in which it was
        self._work = self._search()
        training.on_step.append(self.on_step)

    def on_step(self, event: StepEvent) -> None:
        """One boundary.

        Raises:
            StopTraining: when all is tried.
        """
        self._seen += 1
        if self._watch is not None:
            self._watch.steps = self._seen
        if not self._settled:
            self._settled = self._kept.settle()
            return
        if self._seen <= self.session.warmup:
            return
        try:
            next(self._work)
        except StopIteration:
            stop(self.session, "searched")
        except board.Lost as lost:
            self._lost(lost)

    def _lost(self, lost: board.Lost) -> None:
        """A rank is dead, hangs, or lags too far behind: this training is over. Ends the process; the agent ends the others."""
        tell(self.session, LOST, ranks=lost.ranks, error=str(lost))
        os._exit(1)

    # -- the search -------------------------------------------------------------------------------------------------

    def _search(self) -> Steps:
        step_s = yield from self._timed(LEAST_STEPS)
        slowest = max(self._board.exchange(step_s))
        self._steps = max(LEAST_STEPS, min(MOST_STEPS, math.ceil(BLOCK_S / slowest)))
        self._board.patience_s = max(PATIENCE_S, PATIENCE_STEPS * slowest)
        for candidate in self.session.candidates:
            if self._board.exchange(self.session.deadline_unix_s - time.time())[0] < 0 < self.session.deadline_unix_s:
                self._save(records.verdict_on(candidate, SKIPPED, "no time left"))
                continue
            if self._board.rank == 0:
                tell(self.session, "trial", transform=candidate.transform, title=self.find(candidate.transform).title)
            self._save((yield from self._trial(candidate)))

    def _trial(self, candidate: Recommendation) -> Generator[None, None, Verdict]:
        transform = self.find(candidate.transform)
        matches = self._board.exchange(self._matches(transform, candidate))
        if (why := next((f"rank {r}: {m}" for r, m in enumerate(matches) if m), "")) or not matches:
            return records.verdict_on(candidate, NOT_APPLICABLE, why)
        off: list[float] = []
        on: list[float] = []
        undo: Undo | None = None
        trial = statistics.trial(
            lambda: list(zip(off, on, strict=False)), False, self.session.min_gain, max_pairs=self.session.max_pairs
        )
        state = next(trial)
        while True:
            if state != (undo is not None):
                undo, why = self._switch(transform, candidate, undo, on=state)
                if why:
                    return records.verdict_on(candidate, FAILED, why)
                for _ in range(SETTLE):
                    yield
            seconds = yield from self._timed(self._steps)
            told = self._board.exchange(seconds)
            slowest = max(range(len(told)), key=told.__getitem__)
            self._slowest[slowest] = self._slowest.get(slowest, 0) + 1
            (on if state else off).append(told[slowest] * 1e6)
            try:
                state = trial.send("")
            except StopIteration as ended:
                decision = ended.value
                break
        effect = transform.effect(self.training, None, None) if undo is not None else None
        apart = self._apart()
        status, reason = decision.status, decision.reason
        if apart:
            status, reason = FAILED, apart
        if (status == KEPT) != (undo is not None):
            undo, why = self._switch(transform, candidate, undo, on=status == KEPT)
            if why:
                return records.verdict_on(candidate, FAILED, why)
        return records.verdict_on(
            candidate,
            status if status in (KEPT, REVERTED, FAILED) else INCONCLUSIVE,
            reason,
            gain=decision.gain,
            effect=effect,
            numerics=Check(passed=not apart, detail=apart or "weights are the same on all ranks"),
            blocks=Blocks(off_us=tuple(off), on_us=tuple(on), steps_per_block=self._steps),
            semantics=transform.semantics,
            matched=transform.match(self.training, candidate.parameters).sites,
        )

    def _matches(self, transform: Transform, candidate: Recommendation) -> str:
        try:
            match = transform.match(self.training, candidate.parameters)
        except Exception as error:
            return first_line(error)
        return "" if match.applies else match.reason or "it does not apply here"

    def _switch(
        self, transform: Transform, candidate: Recommendation, undo: Undo | None, *, on: bool
    ) -> tuple[Undo | None, str]:
        """Switch it in this rank; taken back in all where one could not."""
        why = ""
        try:
            if on:
                undo = transform.apply(self.training, candidate.parameters)
            elif undo is not None:
                undo.run()
                undo = None
        except Exception as error:
            why = first_line(error)
        whys = self._board.exchange(why)
        found = next((f"rank {rank}: {told}" for rank, told in enumerate(whys) if told), "")
        if found and undo is not None:
            undo.run()
            undo = None
        return undo, found

    def _timed(self, steps: int) -> Generator[None, None, float]:
        """Seconds a step over the next steps, in this rank."""
        began = self._clock()
        for _ in range(steps):
            yield
        return (self._clock() - began) / steps

    def _clock(self) -> float:
        if self.training.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _apart(self) -> str:
        """Which rank's weights are not rank 0's; "" where all are the same."""
        own = [float(p.detach().double().norm()) for p in parameters_of(self.training)]
        norms = self._board.exchange(math.fsum(value * value for value in own))
        other = [rank for rank, value in enumerate(norms) if value != norms[0]]
        return f"the weights of rank {other[0]} are no longer rank 0's" if other else ""

    def _save(self, verdict: Verdict) -> None:
        if self._board.rank == 0:
            records.save_verdict(self.session.folder, verdict)
            title = verdict.title or verdict.transform
            tell(
                self.session,
                "verdict",
                transform=verdict.transform,
                title=title,
                status=verdict.status,
                reason=verdict.reason,
            )
            counts = {str(rank): count for rank, count in sorted(self._slowest.items())}
            storage.write_text(self.session.folder / SLOWEST_FILE, json.dumps(counts))
