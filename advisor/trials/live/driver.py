"""The search mode: candidates are tried one after the other in the running loop, each against the loop as it stands.

The search is one routine that waits at `yield` for the next step boundary, so it reads in the order in which things happen.
Each verdict is on disk before the next candidate begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from advisor.core import storage, transform_table
from advisor.core.findings import Recommendation
from advisor.core.verdict import Status, Verdict
from advisor.loop.attach import attach_training
from advisor.loop.session import Session, tell
from advisor.loop.steps import StepWatcher
from advisor.loop.stop import stop
from advisor.loop.timing import step_times
from advisor.loop.training import StepEvent, Training
from advisor.transforms import registry
from advisor.transforms.base import Transform
from advisor.transforms.bundle import Bundle
from advisor.trials import planfile, planner, records
from advisor.trials.kept import KeptChanges
from advisor.trials.live.beside import MODES, CompiledBeside
from advisor.trials.live.kernels import kernel_times
from advisor.trials.live.loop import Loop
from advisor.trials.live.members import each_hidden, each_kept, of_member
from advisor.trials.live.switch import OtherModel, Unclean, without_advice
from advisor.trials.live.trial import Trial
from advisor.trials.live.turns import Turn, Turns
from advisor.trials.records import InTrial

# A script that goes on to another model (k-fold) this often before a trial is done leaves it open.
MAX_MODELS = 4
WARMUP_PATIENCE = 20  # steps after the warm-up in which none was clean, before unclean ones have to do
# Long steps are warm sooner: caches and allocators settle within a few, and clocks within seconds.
WARM_S, WARM_STEPS = 6.0, 3

Steps = Generator[None, StepEvent, None]


def attach_search(session: Session) -> None:
    """The search mode, in the child, once torch is imported."""
    name_native_faults(session)
    training, watcher = attach_training(session)
    SearchDriver(training, session, watcher)


def name_native_faults(session: Session) -> None:
    """A process that dies in native code leaves in the run folder where in Python it was; a script's own handler stays."""
    if faulthandler.is_enabled():
        return
    with contextlib.suppress(OSError):
        path = session.folder / records.TRIALS_DIR / records.FAULT_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        # A plain descriptor, open for as long as the process lives: a file object would close it when it is collected.
        faulthandler.enable(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), all_threads=False)


@dataclass(frozen=True, slots=True)
class _Postponed:
    """A trial whose noise CUDA graphs may take away: as far as it came, beside which changes, and what it took."""

    trial: InTrial
    on: tuple[str, ...]
    seconds: float


class SearchDriver:
    """A `Training.on_step` listener; made at attach. `find` looks a transform up by id."""

    def __init__(
        self,
        training: Training,
        session: Session,
        watcher: StepWatcher | None = None,
        find: Callable[[str], Transform] = registry.get,
    ) -> None:
        self.training, self.session = training, session
        self.kept = KeptChanges(training, session.kept, find)
        self.kept.settle()
        training.draws = []
        self.loop = Loop(training, session, watcher, find, self.kept, parts=session.parts)
        self.beside = CompiledBeside(self.loop)
        self.turns = Turns(self.loop)
        self.waiting: list[Recommendation] = []
        self._restart, self._late = "", False  # what fresh processes are to try next; the time is over
        self._on_top: list[str] = []
        self._whole_kept = False  # what was tried as one, first of all, holds: it is to be proved at once
        self._postponed: dict[object, _Postponed] = {}
        self._moves: Counter[object] = Counter()  # to other models, by candidate
        self._steps = 0
        self._models: list[torch.nn.Module] = []  # what the running trial began with; none between trials
        self._routine = self._search()
        next(self._routine)
        if watcher is not None:
            watcher.patches.on_fault.append(self._on_fault)
        training.on_step.append(self.on_step)

    def on_step(self, event: StepEvent) -> None:
        """One boundary.

        Raises:
            StopTraining: when the search is done.
        """
        self._steps += 1
        models = [root.module for root in self.training.roots]
        try:
            if models and self._models and not any(new is old for new in models for old in self._models):
                self._routine.throw(OtherModel())
            else:
                self._routine.send(event)
        except StopIteration:
            stop(self.session, "search done")

    def _on_fault(self, error: BaseException) -> None:
        """Advisor is off in this process: nothing is to be measured here any more, and the training is thrown away."""
        with contextlib.suppress(Exception):
            self._routine.close()
        with contextlib.suppress(Exception):
            self.kept.undo()
        stop(self.session, "advisor switched itself off")

    # -- the search -------------------------------------------------------------------------------------------------

    def _search(self) -> Steps:
        session = self.session
        tell(session, "phase", phase="warm-up")
        yield from self._warm_up()
        for name, reason in self.kept.left_out.items():
            self.loop.notes.append(f"{name}, kept before, could not be applied: {reason}")
        yield from self._plain_kernels()
        self.waiting = records.untried(session.folder, session.candidates)
        complete = yield from self._take_turns()
        self._write(complete=complete)

    def _take_turns(self) -> Generator[None, StepEvent, bool]:
        """Try what waits, until that is all of it, or another process is to go on; whether it was all."""
        while True:
            if self.waiting and self.turns.out_of_time():
                self._late = True
                return False
            turn = self.turns.next(self.waiting)
            if turn is None:
                return True
            if self.loop.host_bound and self._graphs_may_tell(turn.candidate):
                self._postpone(turn.candidate, "the host's launches bound the step", 0.0)
            elif not turn.members and (yield from self._compiles_beside(turn.candidate)):
                continue
            elif not (yield from self._take(turn)):
                return False

    def _take(self, turn: Turn) -> Generator[None, StepEvent, bool]:
        """One trial; whether this process goes on to another."""
        candidate = turn.candidate
        current = self._resumed(candidate)
        title = transform_table.title(candidate.transform)
        tell(self.session, "trial", transform=candidate.transform, title=title, pairs=len(current.off_us))
        before = self._postponed.get(records.attempt(candidate))
        trial = Trial(
            self.loop,
            candidate,
            current,
            patient=not turn.first and not self._graphs_may_tell(candidate),
            provisional=turn.first,
            begun_s=before.seconds if before is not None else 0.0,
        )
        self._models = [root.module for root in self.training.roots]
        try:
            verdict = yield from trial.run()
        except OtherModel:
            goes_on = self._follow(turn, trial)
            if goes_on is not None:
                return goes_on
            verdict = trial.verdict(Status.INCONCLUSIVE, "the script goes on to another model before a trial is done")
        except Unclean as problem:
            self._conclude(trial.verdict(Status.FAILED, str(problem)))
            return False
        finally:
            self._models = []
        if verdict is None and self._goes_on_top(candidate):
            self._on_top.append(candidate.transform)
            records.clear_current(self.session.folder)
            return True
        if verdict is None:
            self._restart = candidate.transform
            return False
        return self._settle(turn, trial, verdict)

    def _settle(self, turn: Turn, trial: Trial, verdict: Verdict) -> bool:
        """What a trial's verdict is for each of those that it tried; whether the search goes on in this process."""
        members, brought = turn.members, turn.brought
        if verdict.status == Status.MORE:
            self._postpone(turn.candidate, verdict.reason, verdict.seconds)
        elif members and verdict.status == Status.KEPT:
            self.waiting = [c for c in self.waiting if c not in members]
            for own in each_kept(self.loop, members, verdict, trial.effects):
                self._conclude(own)
            if turn.first:
                self._whole_kept = True
                on_top = [c for c in self.waiting if c.transform in planner.ON_TOP and self.turns.applies(c)]
                self._on_top += [c.transform for c in on_top]
                return False
        elif brought is None and (blamed := self._blamed(trial, members)):
            # The others are tried as one again, without what does not go on at all.
            self.waiting.remove(blamed)
            self._conclude(of_member(verdict, self.loop.find(blamed.transform), blamed, members))
        elif brought is not None:
            own = of_member(verdict, self.loop.find(brought.transform), brought, members)
            self._conclude(dataclasses.replace(own, reason=f"with channels_last, which it needs: {verdict.reason}"))
        else:
            self._conclude(verdict)
            hidden = [m for m in planner.hidden_alone(members, verdict, self.session.min_gain) if m in self.waiting]
            self.waiting = [c for c in self.waiting if c not in hidden]
            for own in each_hidden(self.loop, hidden, members, verdict):
                self._conclude(own)
        return True

    def _warm_up(self) -> Steps:
        recent: list[StepEvent] = [(yield)]
        while not self.kept.settle():
            yield
        settled, since = self._steps, time.monotonic()
        while True:
            recent = [*recent[-9:], (yield)]
            warm = self._steps - settled - max(2, self.session.warmup)
            if warm >= 0 or (self._steps - settled >= WARM_STEPS and time.monotonic() - since > WARM_S):
                times = step_times(recent).step_us
                if times or warm > WARMUP_PATIENCE:
                    wall = [(b.host_ns - a.host_ns) / 1e3 for a, b in itertools.pairwise(recent)]
                    self.loop.step_us = median(times or wall)
                    return

    def _plain_kernels(self) -> Steps:
        """What was timed of the plain script while this process was profiled has its kernels' time too, where that is asked for."""
        known = records.load_plain(self.session.folder)
        if self.session.whole_first and self.session.kernel_steps and known is not None and not known.kernel_us:
            notes: list[str] = []
            # The first trace behind one with hardware counters has been seen to hold nothing; the next one does.
            yield from kernel_times(self.loop, 1, lambda why: None)
            found = yield from kernel_times(self.loop, self.session.kernel_steps, notes.append)
            self.loop.notes += notes if not found else ()
            records.save_plain(self.session.folder, dataclasses.replace(known, kernel_us=found))

    def _resumed(self, candidate: Recommendation) -> InTrial:
        """The record of this candidate's trial: where an earlier process left it, or a new one."""
        known = records.load_current(self.session.folder)
        parameters = dict(candidate.parameters)
        if known is not None and (known.transform, known.parameters) == (candidate.transform, parameters):
            return known
        left = self._postponed.get(records.attempt(candidate))
        if left is not None and left.on == self.loop.standing:
            return left.trial
        return InTrial(transform=candidate.transform, parameters=parameters)

    def _follow(self, turn: Turn, trial: Trial) -> bool | None:
        """What is kept is on in the script's next model (the next fold), and the candidate's trial begins there where it stood.

        Returns:
            Whether the search goes on in this process; None where this was so too often for this candidate.
        """
        try:
            self.kept.follow()
        except Exception as problem:
            why = f"not on again in the script's next model: {without_advice(problem)}"
            self._conclude(trial.verdict(Status.FAILED, why))
            return False
        self.loop.traced = None
        attempt = records.attempt(turn.candidate)
        self._moves[attempt] += 1
        if self._moves[attempt] >= MAX_MODELS:
            return None
        if turn.brought is not None:
            self.waiting.insert(0, turn.brought)
        elif not turn.members:
            self.waiting.insert(0, turn.candidate)
        return True

    def _compiles_beside(self, candidate: Recommendation) -> Generator[None, StepEvent, bool]:
        """Whether a process beside is compiling for this candidate, which then has its turn behind the others that wait."""
        if self.beside.wanted(candidate):
            yield from self.beside.begin(candidate)
            records.clear_current(self.session.folder)
        if candidate.transform not in MODES or not self.beside.running:
            return False
        if self.waiting:
            self.waiting.append(candidate)
            return True
        tell(self.session, "phase", phase="compiling beside")
        yield from self.beside.wait(self.session.deadline_unix_s)
        return False

    # -- half precision behind CUDA graphs --------------------------------------------------------------------------

    def _graphs_may_tell(self, candidate: Recommendation) -> bool:
        """Whether it is half precision and CUDA graphs are next: what the host's launches hide of it shows in a replayed step."""
        behind = next((c for c in self.waiting if c.transform not in planner.HALF), None)
        if candidate.transform not in planner.HALF or behind is None or behind.transform != planner.GRAPHS:
            return False
        return records.attempt(candidate) not in self._postponed and self.turns.applies(behind)

    def _postpone(self, candidate: Recommendation, reason: str, seconds: float) -> None:
        """Its turn comes again behind CUDA graphs: from its last pair where they are not kept, anew where they are."""
        self._postponed[records.attempt(candidate)] = _Postponed(self._resumed(candidate), self.loop.standing, seconds)
        place = next(i for i, c in enumerate(self.waiting) if c.transform == planner.GRAPHS)
        self.waiting.insert(place + 1, candidate)
        records.clear_current(self.session.folder)
        title = transform_table.title(candidate.transform)
        tell(self.session, "postponed", transform=candidate.transform, title=title, reason=reason)

    def _goes_on_top(self, candidate: Recommendation) -> bool:
        """Whether its fresh processes come last: beside those of what is kept, if that is anything."""
        if candidate.transform in planner.RESTARTED:
            return bool(self.kept.standing)
        return candidate.transform in planner.ON_TOP

    def _blamed(self, trial: Trial, members: Sequence[Recommendation]) -> Recommendation | None:
        """The one of these that could not be switched on with the others."""
        name = trial.transform.blamed if isinstance(trial.transform, Bundle) else ""
        return next((m for m in members if m.transform == name), None)

    # -- what is left behind ----------------------------------------------------------------------------------------

    def _conclude(self, verdict: Verdict) -> None:
        self.loop.tell_spent()
        records.save_verdict(self.session.folder, verdict)
        records.clear_current(self.session.folder)
        tell(
            self.session,
            "verdict",
            transform=verdict.transform,
            title=verdict.title,
            status=verdict.status,
            reason=verdict.reason,
            model=planfile.model_hash(root.module for root in self.training.roots),  # a killed process writes no record
        )

    def _write(self, *, complete: bool) -> None:
        record = records.SearchRecord(
            complete=complete,
            restart=self._restart,
            on_top=tuple(self._on_top),
            whole_kept=self._whole_kept,
            out_of_time=self._late,
            model_hash=planfile.model_hash(root.module for root in self.training.roots),
            steps=self._steps,
            step_us=self.loop.step_us,
            notes=tuple(dict.fromkeys(self.loop.notes)),
        )
        storage.save(self.session.folder / records.SEARCH_FILE, record)
        self.loop.tell_spent()
