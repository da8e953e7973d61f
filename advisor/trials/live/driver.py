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
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from advisor.core import storage, transform_table
from advisor.core.findings import Recommendation
from advisor.core.verdict import Blocks, Check, Status, Verdict
from advisor.loop.attach import attach_training
from advisor.loop.session import Session, tell
from advisor.loop.steps import StepWatcher
from advisor.loop.stop import stop
from advisor.loop.timing import step_times
from advisor.loop.training import StepEvent, Training
from advisor.transforms import registry
from advisor.transforms.base import Transform
from advisor.transforms.bundle import Bundle
from advisor.transforms.channels_last import in_nhwc
from advisor.trials import planfile, planner, records, whole
from advisor.trials.kept import KeptChanges
from advisor.trials.live.beside import MODES, CompiledBeside
from advisor.trials.live.kernels import kernel_times
from advisor.trials.live.loop import Loop
from advisor.trials.live.members import kept_with, of_member, tried_with
from advisor.trials.live.switch import OtherModel, Unclean, first_line
from advisor.trials.live.trial import Trial
from advisor.trials.records import InTrial

# A script that goes on to another model (k-fold) this often before a trial is done leaves it open.
MAX_MODELS = 4
WARMUP_PATIENCE = 20  # steps after the warm-up in which none was clean, before unclean ones have to do
# Long steps are warm sooner: caches and allocators settle within a few, and clocks within seconds.
WARM_S, WARM_STEPS = 6.0, 3
# Everything as one, with CUDA graphs, holds the step's memory this many times: in the graphs' pool, and for the eager calls before a capture.
GRAPHED_ROOM = 2.2

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
        restart, late = "", False
        waiting = records.untried(session.folder, session.candidates)
        while waiting or (left_open := self._left_open()):
            if waiting and self._out_of_time():
                late = True
                break
            first = self._whole(waiting)
            members = first or self._pair() or (self._bundle(waiting) if waiting else left_open)
            candidate = planner.as_one(members) if members else waiting.pop(0)
            brought: Recommendation | None = None  # for the sake of which channels_last is on trial with it
            if not members and len(pair := self._with_layout((candidate,))) > 1:
                brought, members, candidate = candidate, pair, planner.as_one(pair)
            if self.loop.host_bound and self._graphs_may_tell(candidate, waiting):
                self._postpone(candidate, "the host's launches bound the step", 0.0, waiting)
                continue
            if not members and (yield from self._compiles_beside(candidate, waiting)):
                continue
            current = self._resumed(candidate)
            title = transform_table.title(candidate.transform)
            tell(session, "trial", transform=candidate.transform, title=title, pairs=len(current.off_us))
            before = self._postponed.get(records.attempt(candidate))
            trial = Trial(
                self.loop,
                candidate,
                current,
                patient=not first and not self._graphs_may_tell(candidate, waiting),
                provisional=bool(first),
                begun_s=before.seconds if before is not None else 0.0,
            )
            self._models = [root.module for root in self.training.roots]
            try:
                verdict = yield from trial.run()
            except OtherModel:
                try:
                    moves = self._follow(candidate)
                except Exception as problem:
                    self._conclude(
                        trial.verdict(Status.FAILED, f"not on again in the script's next model: {first_line(problem)}")
                    )
                    break
                if moves < MAX_MODELS:
                    waiting[:0] = [brought] if brought is not None else [] if members else [candidate]
                    continue
                verdict = trial.verdict(
                    Status.INCONCLUSIVE, "the script goes on to another model before a trial is done"
                )
            except Unclean as problem:
                self._conclude(trial.verdict(Status.FAILED, str(problem)))
                break
            finally:
                self._models = []
            if verdict is None and self._goes_on_top(candidate):
                self._on_top.append(candidate.transform)
                records.clear_current(session.folder)
                continue
            if verdict is None:
                restart = candidate.transform
                break
            if verdict.status == Status.MORE:
                self._postpone(candidate, verdict.reason, verdict.seconds, waiting)
            elif members and verdict.status == Status.KEPT:
                waiting = [c for c in waiting if c not in members]
                self._conclude_members(members, verdict, trial.effects)
                if first:
                    self._whole_kept = True
                    self._on_top += [c.transform for c in waiting if c.transform in planner.ON_TOP and self._applies(c)]
                    break
            elif brought is None and (blamed := self._blamed(trial, members)):
                # The others are tried as one again, without what does not go on at all.
                waiting.remove(blamed)
                self._conclude(of_member(verdict, self.loop.find(blamed.transform), blamed, members))
            elif brought is not None:
                own = of_member(verdict, self.loop.find(brought.transform), brought, members)
                self._conclude(dataclasses.replace(own, reason=f"with channels_last, which it needs: {verdict.reason}"))
            else:
                self._conclude(verdict)
                hidden = [m for m in planner.hidden_alone(members, verdict, session.min_gain) if m in waiting]
                waiting = [c for c in waiting if c not in hidden]
                self._conclude_hidden(hidden, members, verdict)
        else:
            self._write(restart, complete=True)
            return
        self._write(restart, out_of_time=late)

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

    def _follow(self, candidate: Recommendation) -> int:
        """What is kept is on in the script's next model (the next fold); the candidate's trial begins there where it stood.

        Returns:
            How often that was so for this candidate.
        """
        self.kept.follow()
        self.loop.traced = None
        self._moves[records.attempt(candidate)] += 1
        return self._moves[records.attempt(candidate)]

    def _compiles_beside(
        self, candidate: Recommendation, waiting: list[Recommendation]
    ) -> Generator[None, StepEvent, bool]:
        """Whether a process beside is compiling for this candidate, which then has its turn behind the others that wait."""
        if self.beside.wanted(candidate):
            yield from self.beside.begin(candidate)
            records.clear_current(self.session.folder)
        if candidate.transform not in MODES or not self.beside.running:
            return False
        if waiting:
            waiting.append(candidate)
            return True
        tell(self.session, "phase", phase="compiling beside")
        yield from self.beside.wait(self.session.deadline_unix_s)
        return False

    # -- half precision behind CUDA graphs --------------------------------------------------------------------------

    def _graphs_may_tell(self, candidate: Recommendation, waiting: Sequence[Recommendation]) -> bool:
        """Whether it is half precision and CUDA graphs are next: what the host's launches hide of it shows in a replayed step."""
        behind = next((c for c in waiting if c.transform not in planner.HALF), None)
        if candidate.transform not in planner.HALF or behind is None or behind.transform != planner.GRAPHS:
            return False
        return records.attempt(candidate) not in self._postponed and self._applies(behind)

    def _postpone(self, candidate: Recommendation, reason: str, seconds: float, waiting: list[Recommendation]) -> None:
        """Its turn comes again behind CUDA graphs: from its last pair where they are not kept, anew where they are."""
        self._postponed[records.attempt(candidate)] = _Postponed(self._resumed(candidate), self.loop.standing, seconds)
        place = next(i for i, c in enumerate(waiting) if c.transform == planner.GRAPHS)
        waiting.insert(place + 1, candidate)
        records.clear_current(self.session.folder)
        title = transform_table.title(candidate.transform)
        tell(self.session, "postponed", transform=candidate.transform, title=title, reason=reason)

    # -- several as one ---------------------------------------------------------------------------------------------

    def _whole(self, waiting: Sequence[Recommendation]) -> tuple[Recommendation, ...]:
        """What is tried as one before anything else, while nothing is kept: everything that fits, then less of it."""
        verdicts = self.loop.verdicts()
        if not self.session.whole_first or self.kept.standing or any(v.status == Status.KEPT for v in verdicts):
            return ()
        tried = {v.transform for v in verdicts}
        asked = [c for c in waiting if whole.kind(c) and c.transform not in self.session.later]
        live = [c for c in asked if self.loop.find(c.transform).live and self._applies(c)]
        nhwc = self._nhwc() or not self._applies(Recommendation(transform=planner.LAYOUT))
        gross = any(whole.gross(v) for v in verdicts)
        attempts = whole.attempts(live, graphs_fit=self._graphs_fit(), nhwc=nhwc, gross=gross)
        return next((found for found in attempts if planner.as_one(found).transform not in tried), ())

    def _goes_on_top(self, candidate: Recommendation) -> bool:
        """Whether its fresh processes come last: beside those of what is kept, if that is anything."""
        if candidate.transform in planner.RESTARTED:
            return bool(self.kept.standing)
        return candidate.transform in planner.ON_TOP

    def _graphs_fit(self) -> bool:
        """Whether the device holds the step's memory once more, in graphs."""
        device = self.training.device
        if device.type != "cuda":
            return True
        _, total = torch.cuda.mem_get_info(device)
        return total >= GRAPHED_ROOM * torch.cuda.max_memory_allocated(device)

    def _blamed(self, trial: Trial, members: Sequence[Recommendation]) -> Recommendation | None:
        """The one of these that could not be switched on with the others."""
        name = trial.transform.blamed if isinstance(trial.transform, Bundle) else ""
        return next((m for m in members if m.transform == name), None)

    def _bundle(self, waiting: Sequence[Recommendation]) -> tuple[Recommendation, ...]:
        """Of the candidates whose turn it is, those to be tried as one: what applies now, unless that was tried before, or one of
        them is on trial already.
        """
        group = planner.bundle(waiting)
        current = records.load_current(self.session.folder)
        if current is not None and current.transform in {c.transform for c in group}:
            return ()
        members = self._with_layout(tuple(c for c in group if self._applies(c)))
        known = {v.transform for v in self.loop.verdicts()}
        return members if len(members) > 1 and planner.as_one(members).transform not in known else ()

    def _with_layout(self, members: tuple[Recommendation, ...]) -> tuple[Recommendation, ...]:
        """These, and channels_last before them where they need it and it can be had."""
        found = planner.with_layout(members, self.session.candidates, nhwc=self._nhwc())
        return found if len(found) == len(members) or self._applies(found[0]) else members

    def _nhwc(self) -> bool:
        """Whether the model is in NHWC, by the script's doing or by what is kept."""
        kept = {v.transform for v in self.loop.verdicts() if v.status == Status.KEPT}
        on = {standing.transform.id for standing in self.kept.standing}
        return planner.LAYOUT in kept | on or in_nhwc(self.training)

    def _left_open(self) -> tuple[Recommendation, ...]:
        """What is to be tried as one, once, behind everything else: what noise has left open, each by itself."""
        if self._out_of_time():
            return ()
        verdicts = self.loop.verdicts()
        return self._pair() or self._once(planner.left_open(verdicts, self.session.candidates, self.session.min_gain))

    def _pair(self) -> tuple[Recommendation, ...]:
        """Layout and half precision, once, where neither was kept alone."""
        return self._once(planner.layout_with_half(self.loop.verdicts(), self.session.candidates))

    def _once(self, members: Sequence[Recommendation]) -> tuple[Recommendation, ...]:
        """These, if they can be switched in the loop and were not tried as one before."""
        if not members or not all(self.loop.find(m.transform).live for m in members):
            return ()
        tried = {v.transform for v in self.loop.verdicts()}
        return () if planner.as_one(members).transform in tried else tuple(members)

    def _out_of_time(self) -> bool:
        return 0 < self.session.deadline_unix_s <= time.time()

    def _applies(self, candidate: Recommendation) -> bool:
        try:
            return self.loop.find(candidate.transform).match(self.training, {}).applies
        except Exception:
            return False  # its own trial tells why

    def _conclude_members(
        self, members: Sequence[Recommendation], verdict: Verdict, known: Mapping[str, Check]
    ) -> None:
        """A kept bundle: each member has a verdict of its own, with the effect it had itself; the gain is of all that had one."""
        transforms = [self.loop.find(m.transform) for m in members]
        effects = [known[transform.id] for transform in transforms]
        with_effect = [t for t, effect in zip(transforms, effects, strict=True) if effect.passed is not False]
        for member, transform, effect in zip(members, transforms, effects, strict=True):
            sites = transform.sites(self.training) or ((), ())
            own = dataclasses.replace(
                of_member(verdict, transform, member, members), effect=effect, matched=sites[0], unmatched=sites[1]
            )
            if transform not in with_effect:
                # It is on with the others, and nothing of it is in the graph.
                reason = f"applied, but without effect: {effect.detail}"
                own = dataclasses.replace(
                    own, status=Status.REVERTED, reason=reason, gain=None, timing=None, blocks=Blocks()
                )
            elif len(with_effect) > 1:
                own = kept_with(own, [t for t in with_effect if t is not transform])
            if transform not in with_effect[:1]:  # paid once, and so told once
                own = dataclasses.replace(own, first_step_us=0.0, break_even_steps=None, memory_delta_bytes=0)
            self._conclude(own)

    def _conclude_hidden(
        self, hidden: Sequence[Recommendation], members: Sequence[Recommendation], verdict: Verdict
    ) -> None:
        """What noise has left open as one is left open one by one, where a trial of its own could tell no more."""
        for member in hidden:
            together = tried_with(len(members) - 1)
            reason = f"{verdict.reason}; {together}; alone its predicted gain is below the noise"
            timing = Check(passed=False, detail=reason)
            own = of_member(verdict, self.loop.find(member.transform), member, members)
            self._conclude(dataclasses.replace(own, reason=reason, gain=None, timing=timing))

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

    def _write(self, restart: str, *, complete: bool = False, out_of_time: bool = False) -> None:
        record = records.SearchRecord(
            complete=complete,
            restart=restart,
            on_top=tuple(self._on_top),
            whole_kept=self._whole_kept,
            out_of_time=out_of_time,
            model_hash=planfile.model_hash(root.module for root in self.training.roots),
            steps=self._steps,
            step_us=self.loop.step_us,
            notes=tuple(dict.fromkeys(self.loop.notes)),
        )
        storage.save(self.session.folder / records.SEARCH_FILE, record)
        self.loop.tell_spent()
