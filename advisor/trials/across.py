"""The across mode: changes tried in all ranks of a training at once, in the running loop.

Every rank switches the same change at the same boundary: the course of a trial hangs on nothing that is one rank's alone. What a block of
steps takes is the slowest rank's; each rank writes its own on the board (distributed/board.py) and reads the others', so all decide
alike, and by rank 0's word where time is up. A change that one rank cannot make, or that leaves one rank's numbers wrong
(across_gate.py), is made by none. After each trial the ranks compare the norms of their weights: replicas that have come apart end it.
What fits together of the candidates is tried as one first, where that is ordered; what is not kept so, one by one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Generator, Sequence
from statistics import median
from typing import Any

from advisor.core import storage, transform_table
from advisor.core.errors import first_line
from advisor.core.findings import Recommendation
from advisor.core.transform_row import TOGETHER
from advisor.core.verdict import Blocks, Check, Status, Verdict
from advisor.distributed import board
from advisor.distributed.place import LOST
from advisor.loop import ranks
from advisor.loop.attach import attach_training
from advisor.loop.session import Session, tell
from advisor.loop.steps import StepWatcher
from advisor.loop.stop import stop
from advisor.loop.timing import step_times
from advisor.loop.training import StepEvent, Training
from advisor.transforms import registry
from advisor.transforms.base import Transform
from advisor.transforms.bundle import Bundle
from advisor.transforms.patch import parameters_of
from advisor.trials import planfile, planner, records, statistics, whole
from advisor.trials.across_gate import AcrossGate, GateFailed, rounds_to, sends
from advisor.trials.kept import KeptChanges
from advisor.trials.live.members import kept_with, of_member
from advisor.trials.live.switch import Switch
from advisor.trials.statistics import Decision

BLOCK_S, LEAST_STEPS, MOST_STEPS, SETTLE, FIRST_LOOKS = 0.3, 3, 40, 2, 10
PATIENCE_S = 60.0  # for a rank to come to a boundary; or so many steps
PATIENCE_STEPS = 50
SLOWEST_FILE = "slowest.json"  # rank → blocks in which it was

Steps = Generator[None, StepEvent, Any]


def attach_across(session: Session) -> None:
    """The across mode, in each rank, once torch is imported."""
    training, watcher = attach_training(session)
    AcrossDriver(training, session, watcher=watcher)


class AcrossDriver:
    """A `Training.on_step` listener; made at attach. Rank 0 writes the verdicts."""

    def __init__(
        self,
        training: Training,
        session: Session,
        place: board.Board | None = None,
        find: Callable[[str], Transform] = registry.get,
        watcher: StepWatcher | None = None,
    ) -> None:
        self.training, self.session, self.find, self.watcher = training, session, find, watcher
        self._kept = KeptChanges(training, session.kept, find)
        self._settled = self._kept.settle()
        self._seen = 0
        self._slowest: dict[int, int] = {}  # rank → blocks in which it was
        self._watch: board.Watch | None = None
        if place is not None:
            self._meet(place)
        self._work = self._search()
        next(self._work)
        training.on_step.append(self.on_step)

    def _meet(self, place: board.Board) -> None:
        self._board = place
        self._gate = AcrossGate(self.training, self.watcher, place)

    def on_step(self, event: StepEvent) -> None:
        """One boundary.

        Raises:
            StopTraining: when all is tried.
        """
        self._seen += 1
        if self._seen == 1 and not hasattr(self, "_board"):  # a script makes its group before it trains
            self._find_ranks()
        if self._watch is not None:
            self._watch.steps = self._seen
        if not self._settled:
            self._settled = self._kept.settle()
            return
        if self._seen <= self.session.warmup:
            return
        try:
            self._work.send(event)
        except StopIteration:
            stop(self.session, "searched")
        except board.Lost as lost:
            self._lost(lost)

    def _find_ranks(self) -> None:
        if not ranks.in_group():
            raise RuntimeError("the script trains in no process group, so there are no ranks to search in")
        folder = self.session.folder
        self._meet(board.of_run(folder, patience_s=PATIENCE_S))
        self._watch = board.watch(folder, patience_s=PATIENCE_S, lost=self._lost)

    def _lost(self, lost: board.Lost) -> None:
        """A rank is dead, hangs, or lags too far behind: this training is over. Ends the process; what started it ends the others."""
        tell(self.session, LOST, ranks=lost.ranks, error=str(lost))
        os._exit(1)

    # -- the search -------------------------------------------------------------------------------------------------

    def _search(self) -> Steps:
        yield
        slowest = 0.0
        for _ in range(FIRST_LOOKS):  # where epochs are short, steps of a first look may all be unclean
            step_us = yield from self._timed(LEAST_STEPS)
            slowest = max(self._board.exchange(step_us)) / 1e6 or slowest
            if slowest:
                break
        self._steps = max(LEAST_STEPS, min(MOST_STEPS, math.ceil(BLOCK_S / (slowest or BLOCK_S))))
        self._board.patience_s = max(PATIENCE_S, PATIENCE_STEPS * slowest)
        candidates = list(self.session.candidates)
        together = self._whole(candidates) if self.session.whole_first else ()
        if together:
            verdict = yield from self._tried(planner.as_one(together))
            if verdict.status == Status.KEPT:
                self._save_members(verdict, together)
                candidates = [c for c in candidates if c not in together]
            else:
                self._save(verdict)
        for candidate in candidates:
            self._save((yield from self._tried(candidate)))

    def _whole(self, candidates: Sequence[Recommendation]) -> tuple[Recommendation, ...]:
        """What fits together, and can be made in all ranks."""
        asked = [c for c in candidates if whole.kind(c)]
        told = self._board.exchange([self._unfit(self.find(c.transform), c) for c in asked])
        fit = [c for c, *whys in zip(asked, *told, strict=True) if not any(whys)]
        found = whole.members(fit)
        return found if len(found) > 1 else ()

    def _tried(self, candidate: Recommendation) -> Generator[None, StepEvent, Verdict]:
        if self._board.exchange(self.session.deadline_unix_s - time.time())[0] < 0 < self.session.deadline_unix_s:
            return records.verdict_on(candidate, Status.SKIPPED, "no time left")
        transform = self._transform(candidate.transform)
        if self._board.rank == 0:
            tell(self.session, "trial", transform=candidate.transform, title=records.title_of(candidate))
        return (yield from self._trial(transform, candidate))

    def _transform(self, identifier: str) -> Transform:
        names = identifier.split(TOGETHER)
        return Bundle(identifier, [self.find(name) for name in names]) if len(names) > 1 else self.find(identifier)

    def _trial(self, transform: Transform, candidate: Recommendation) -> Generator[None, StepEvent, Verdict]:
        matches = self._board.exchange(self._unfit(transform, candidate))
        if why := next((f"rank {r}: {m}" for r, m in enumerate(matches) if m), ""):
            return records.verdict_on(candidate, Status.NOT_APPLICABLE, why)
        switch = Switch(self.training, transform, dict(candidate.parameters), [])
        try:
            numerics = yield from self._judged(transform, switch)
        except GateFailed as failed:
            self._all(switch, on=False)
            return records.verdict_on(candidate, Status.FAILED, str(failed))
        known: dict[str, Any] = {"numerics": numerics, "semantics": transform.semantics}
        if not numerics.passed:
            self._all(switch, on=False)
            status, told = (
                (Status.REVERTED, "it changes the training")
                if numerics.passed is False
                else (Status.INCONCLUSIVE, "its numbers could not be checked")
            )
            return records.verdict_on(candidate, status, f"{told}: {numerics.detail}", **known)
        if why := self._all(switch, on=True):
            return records.verdict_on(candidate, Status.FAILED, why, **known)
        for _ in range(SETTLE):
            yield
        effects = self._board.exchange(dataclasses.asdict(transform.effect(self.training, None, None)))
        known["effect"] = effect = next((Check(**e) for e in effects if e["passed"] is False), Check(**effects[0]))
        if effect.passed is False:
            self._all(switch, on=False)
            return records.verdict_on(
                candidate, Status.REVERTED, f"applied, but without effect: {effect.detail}", **known
            )
        return (yield from self._paired(switch, candidate, known))

    def _judged(self, transform: Transform, switch: Switch) -> Generator[None, StepEvent, Check]:
        """The gate's word of all ranks; the change is on behind it."""
        if not (yield from self._gate.capture(transform)):
            return Check(passed=None, detail="no model call with gradients was seen to replay in all ranks")
        if self._watch is not None:
            self._watch.resting = True
        try:
            if sends(transform):
                return self._gate.judge_sent(transform, lambda on: self._all(switch, on=on))
            return self._gate.judge(transform, switch, rounds_to(), patience_s=self.session.trial_timeout_s)
        finally:
            self._gate.release()
            if self._watch is not None:
                self._watch.resting = False

    def _paired(
        self, switch: Switch, candidate: Recommendation, known: dict[str, Any]
    ) -> Generator[None, StepEvent, Verdict]:
        """Blocks of steps with the change and without, and what they say."""
        off: list[float] = []
        on: list[float] = []
        trial = statistics.trial(
            lambda: list(zip(off, on, strict=False)), True, self.session.min_gain, max_pairs=self.session.max_pairs
        )
        state = next(trial)
        while True:
            if state != switch.is_on:
                if why := self._all(switch, on=state):
                    return records.verdict_on(candidate, Status.FAILED, why, **known)
                for _ in range(SETTLE):
                    yield
            told = self._board.exchange((yield from self._timed(self._steps)))
            disturbed = "" if all(told) else f"what rank {told.index(0.0)} did beside its training"
            if not disturbed:
                slowest = max(range(len(told)), key=told.__getitem__)
                self._slowest[slowest] = self._slowest.get(slowest, 0) + 1
                (on if state else off).append(told[slowest])
            try:
                state = trial.send(disturbed)
            except StopIteration as ended:
                return self._concluded(switch, candidate, ended.value, (off, on), known)

    def _concluded(
        self,
        switch: Switch,
        candidate: Recommendation,
        decision: Decision,
        blocks: tuple[list[float], list[float]],
        known: dict[str, Any],
    ) -> Verdict:
        status, reason = decision.status, decision.reason
        if apart := self._apart():
            status, reason, known["numerics"] = Status.FAILED, apart, Check(passed=False, detail=apart)
        if why := self._all(switch, on=status == Status.KEPT):
            return records.verdict_on(candidate, Status.FAILED, why, **known)
        if status == Status.KEPT and switch.standing is not None:
            self._kept.standing.append(switch.standing)
        sites = switch.transform.sites(self.training)
        return records.verdict_on(
            candidate,
            status if status in (Status.KEPT, Status.REVERTED, Status.FAILED) else Status.INCONCLUSIVE,
            reason,
            gain=decision.gain,
            timing=Check(passed=status == Status.KEPT, detail=decision.reason),
            blocks=Blocks(off_us=tuple(blocks[0]), on_us=tuple(blocks[1]), steps_per_block=self._steps),
            matched=sites[0] if sites else switch.transform.match(self.training, candidate.parameters).sites,
            **known,
        )

    # -- in this rank, and in all -----------------------------------------------------------------------------------

    def _unfit(self, transform: Transform, candidate: Recommendation) -> str:
        """Why it cannot be made in this rank; "" where it can."""
        standing = [(s.transform.id, s.transform.conflicts) for s in self._kept.standing]
        if names := planner.conflicting(transform.id, transform.conflicts, standing):
            return f"it does not work together with {', '.join(map(transform_table.title, names))}, which is kept"
        try:
            match = transform.match(self.training, candidate.parameters)
        except Exception as error:
            return first_line(error)
        return "" if match.applies else match.reason or "it does not apply here"

    def _all(self, switch: Switch, *, on: bool) -> str:
        """Switch it in all ranks; off in all where one could not. Why, with the rank."""
        why = ""
        try:
            switch.on() if on else switch.off()
        except Exception as error:
            why = first_line(error)
        whys = self._board.exchange(why, patience_s=self.session.trial_timeout_s)
        found = next((f"rank {rank}: {told}" for rank, told in enumerate(whys) if told), "")
        if found:
            switch.off()
        return found

    def _timed(self, steps: int) -> Generator[None, StepEvent, float]:
        """µs of this rank's typical step in the next so many, those left out in which it did something else too; 0 where that were too many."""
        boundaries = [(yield)]
        for _ in range(steps):
            boundaries.append((yield))
        found = step_times(boundaries).step_us
        return median(found) if len(found) >= LEAST_STEPS else 0.0

    def _apart(self) -> str:
        """Which rank's weights are not rank 0's; "" where all are the same."""
        own = [float(p.detach().double().norm()) for p in parameters_of(self.training)]
        norms = self._board.exchange(math.fsum(value * value for value in own))
        other = [rank for rank, value in enumerate(norms) if value != norms[0]]
        return f"the weights of rank {other[0]} are no longer rank 0's" if other else ""

    # -- what is left behind ----------------------------------------------------------------------------------------

    def _save_members(self, verdict: Verdict, members: Sequence[Recommendation]) -> None:
        """What was kept as one: each of its changes has a verdict of its own."""
        made = [self.find(member.transform) for member in members]
        for member, transform in zip(members, made, strict=True):
            own = of_member(verdict, transform, member, members)
            self._save(kept_with(own, [other for other in made if other is not transform]))

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
                model=planfile.model_hash(root.module for root in self.training.roots),
            )
            counts = {str(rank): count for rank, count in sorted(self._slowest.items())}
            storage.write_text(self.session.folder / SLOWEST_FILE, json.dumps(counts))
