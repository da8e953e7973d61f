"""The search mode: candidates are tried one after the other in the running loop, each against the loop as it stands.

The search is one routine that waits at `yield` for the next step boundary, so it reads in the order in which things happen:
match, numeric gate, warm-up, effect, ABBA blocks, decision. Each verdict is on disk before the next candidate begins.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import itertools
import math
import os
import signal
import statistics as stdlib_statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.findings import Recommendation, Semantics
from advisor.core.profile import StepProfile
from advisor.core.verdict import Blocks, Check, Verdict
from advisor.ops.verify import unusable
from advisor.profiling import graphs
from advisor.profiling.aggregate import aggregate
from advisor.profiling.attach import Attached, attach_training
from advisor.profiling.collector import TraceCollector
from advisor.profiling.discover import capture_next_step
from advisor.profiling.facts import model_facts
from advisor.profiling.patches import say
from advisor.profiling.session import Session, tell
from advisor.profiling.steps import BACKWARDS, SHAPES, StepWatcher
from advisor.profiling.stop import stop
from advisor.profiling.timing import step_times
from advisor.profiling.training import StepEvent, Training
from advisor.transforms import cuda_graphs, registry
from advisor.transforms.base import Transform
from advisor.transforms.bundle import Bundle
from advisor.trials import planfile, planner, records, spent
from advisor.trials.batches import BatchWatch
from advisor.trials.disturbance import MachineWatch
from advisor.trials.kept import KeptChanges, Standing
from advisor.trials.numerics.gate import Gate
from advisor.trials.statistics import (
    INCONCLUSIVE,
    KEPT,
    MORE,
    REVERTED,
    Decision,
    bursty,
    decide,
    gain_interval,
    median,
    stretch,
    trial,
)

# A block lasts this long, so that a timer, a straggler or a clock step weighs little in its median ...
BLOCK_S = 0.15
# ... but has steps enough for a median, and not more than a fast loop needs.
MIN_BLOCK_STEPS, MAX_BLOCK_STEPS = 3, 30
# Steps after a first enabling that are never timed, and at most waited for until their times agree.
MIN_SETTLE, MAX_SETTLE = 3, 12
SETTLED_SPREAD = 1.15  # longest over shortest of the last three
# Of a block's steps this many times as many may be unclean (short epochs, evaluation) before the trial is given up.
UNCLEAN_FACTOR = 4
CAPTURE_TRIES = 4
WARMUP_PATIENCE = 20  # steps after the warm-up in which none was clean, before unclean ones have to do
# Over a trial's own limit the process is ended by the kernel: a compiler that hangs cannot be asked to stop.
ALARM_GRACE_S = 20.0

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
        faulthandler.enable(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), all_threads=False)


class _OutOfTime(Exception):
    """The trial or the whole search has used up its time."""


class _Unclean(Exception):
    """A change could not be taken back, or the device is in error for good: the process is no basis for further trials."""


@dataclass(slots=True, eq=False)
class _Switch:
    """A candidate in the loop. On: what it cannot stand beside is off. Off: the loop as it stood before."""

    training: Training
    transform: Transform
    parameters: dict[str, str]
    rivals: list[Standing]
    standing: Standing | None = None

    @property
    def is_on(self) -> bool:
        return self.standing is not None

    def on(self) -> None:
        if self.standing is not None:
            return
        for rival in reversed(self.rivals):
            _take_back(rival)
        try:
            undo = self.transform.apply(self.training, self.parameters)
        except BaseException:
            self._rivals_on()
            raise
        self.standing = Standing(self.transform, self.parameters, undo)

    def off(self) -> None:
        if self.standing is None:
            return
        standing, self.standing = self.standing, None
        _take_back(standing)
        self._rivals_on()

    def _rivals_on(self) -> None:
        for rival in self.rivals:
            rival.undo = rival.transform.apply(self.training, rival.parameters)


@dataclass(slots=True)
class _Arm:
    """Blocks with the change off, or on: median and mean step, and on a GPU wall time a step, synchronised at both ends."""

    medians: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    peak_bytes: int = 0


@dataclass(slots=True)
class _Times:
    """All blocks of a trial so far."""

    off: _Arm = field(default_factory=_Arm)
    on: _Arm = field(default_factory=_Arm)
    steps: int = 0
    dropped: int = 0
    disturbed: int = 0  # blocks that did not count, for what the machine did meanwhile
    bursty: int = 0  # blocks whose steps come in bursts

    @classmethod
    def resumed(cls, found: records.InTrial) -> _Times:
        off = _Arm(list(found.off_us), list(found.off_mean_us), list(found.off_wall_us))
        on = _Arm(list(found.on_us), list(found.on_mean_us), list(found.on_wall_us))
        return cls(off, on, found.steps_per_block, bursty=found.bursty)

    def noted(self, current: records.InTrial) -> records.InTrial:
        """`current` with every whole pair."""
        pairs = len(self.pairs)
        return dataclasses.replace(
            current,
            off_us=tuple(self.off.medians[:pairs]),
            on_us=tuple(self.on.medians[:pairs]),
            off_mean_us=tuple(self.off.means[:pairs]),
            on_mean_us=tuple(self.on.means[:pairs]),
            off_wall_us=tuple(self.off.walls[:pairs]),
            on_wall_us=tuple(self.on.walls[:pairs]),
            steps_per_block=self.steps,
            bursty=self.bursty,
        )

    @property
    def by_means(self) -> bool:
        """Whether bursts make medians meaningless: in a quarter of the blocks or more."""
        return 4 * self.bursty >= len(self.off.medians) + len(self.on.medians) > 0

    @property
    def off_us(self) -> list[float]:
        return self.off.means if self.by_means else self.off.medians

    @property
    def on_us(self) -> list[float]:
        return self.on.means if self.by_means else self.on.medians

    @property
    def pairs(self) -> list[tuple[float, float]]:
        return list(zip(self.off_us, self.on_us, strict=False))


@dataclass(frozen=True, slots=True)
class _Postponed:
    """A trial whose noise CUDA graphs may take away: as far as it came, beside which changes, and what it took."""

    trial: records.InTrial
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
        self.training, self.session, self.watcher, self.find = training, session, watcher, find
        self.kept = KeptChanges(training, session.kept, find)
        self.kept.settle()
        self._notes: list[str] = []
        self._on_top: list[str] = []
        self._postponed: dict[object, _Postponed] = {}
        self._steps = 0
        self._step_us = 0.0
        self._stretch = 1.0  # of the next trial's blocks, for the noise of the last
        self._trace_before: StepProfile | None = None
        self._ends_at = math.inf
        self._watch = spent.Stopwatch(spent.START)
        self._machine: MachineWatch | None = None
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
        try:
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
            self._notes.append(f"{name}, kept before, could not be applied: {reason}")
        done = {records.attempt(v) for v in records.verdicts(session.folder)}
        restart, late = "", False
        waiting = [c for c in session.candidates if records.attempt(c) not in done]
        while waiting:
            if session.deadline_unix_s and time.time() >= session.deadline_unix_s:
                late = True
                break
            members = self._bundle(waiting)
            candidate = planner.as_one(members) if members else waiting.pop(0)
            tell(
                session,
                "trial",
                transform=candidate.transform,
                title=planner.title(candidate.transform),
                pairs=len(self._resumed(candidate).off_us),
            )
            try:
                verdict = yield from self._try(candidate, patient=not self._graphs_may_tell(candidate, waiting))
            except _Unclean as problem:
                self._conclude(self._verdict(candidate, None, "failed", str(problem)))
                break
            if verdict is None and candidate.transform in planner.ON_TOP:
                self._on_top.append(candidate.transform)
                records.clear_current(session.folder)
                continue
            if verdict is None:
                restart = candidate.transform
                break
            if verdict.status == MORE:
                self._postpone(candidate, verdict, waiting)
            elif members and verdict.status == KEPT:
                waiting = [c for c in waiting if c not in members]
                self._conclude_members(members, verdict)
            else:
                self._conclude(verdict)
        else:
            self._write(restart, complete=True)
            return
        self._write(restart, out_of_time=late)

    def _graphs_may_tell(self, candidate: Recommendation, waiting: Sequence[Recommendation]) -> bool:
        """Whether it is half precision and CUDA graphs are next: what the host's launches hide of it shows in a replayed step."""
        behind = next((c for c in waiting if c.transform not in planner.HALF), None)
        if candidate.transform not in planner.HALF or behind is None or behind.transform != planner.GRAPHS:
            return False
        return records.attempt(candidate) not in self._postponed and self._applies(behind)

    def _postpone(self, candidate: Recommendation, verdict: Verdict, waiting: list[Recommendation]) -> None:
        """Its turn comes again behind CUDA graphs: from its last pair where they are not kept, anew where they are."""
        current = self._resumed(candidate)
        on = tuple(s.transform.id for s in self.kept.standing)
        self._postponed[records.attempt(candidate)] = _Postponed(current, on, verdict.seconds)
        place = next(i for i, c in enumerate(waiting) if c.transform == planner.GRAPHS)
        waiting.insert(place + 1, candidate)
        records.clear_current(self.session.folder)
        tell(self.session, "postponed", transform=verdict.transform, title=verdict.title, reason=verdict.reason)

    def _bundle(self, waiting: Sequence[Recommendation]) -> tuple[Recommendation, ...]:
        """Of the candidates whose turn it is, those to be tried as one: what applies now, unless that was tried before, or one of
        them is on trial already.
        """
        group = planner.bundle(waiting)
        current = records.load_current(self.session.folder)
        if current is not None and current.transform in {c.transform for c in group}:
            return ()
        members = tuple(c for c in group if self._applies(c))
        known = {v.transform for v in records.verdicts(self.session.folder)}
        return members if len(members) > 1 and planner.as_one(members).transform not in known else ()

    def _applies(self, candidate: Recommendation) -> bool:
        try:
            return self.find(candidate.transform).match(self.training, {}).applies
        except Exception:
            return False  # its own trial tells why

    def _transform(self, identifier: str) -> Transform:
        names = identifier.split(planner.TOGETHER)
        return Bundle(identifier, [self.find(name) for name in names]) if len(names) > 1 else self.find(identifier)

    def _conclude_members(self, members: Sequence[Recommendation], verdict: Verdict) -> None:
        """A kept bundle: each member has a verdict of its own, with the effect it had itself; the gain is of all of them."""
        for place, member in enumerate(members):
            transform = self.find(member.transform)
            others = [m for m in members if m is not member]
            titles = " and ".join(self.find(m.transform).title for m in others)
            sites = transform.sites(self.training) or ((), ())
            self._conclude(
                dataclasses.replace(
                    verdict,
                    transform=member.transform,
                    title=transform.title,
                    reason=f"{verdict.reason}, together with {titles}",
                    round=member.round,
                    semantics=transform.semantics,
                    predicted=member.predicted,
                    gain=None,
                    together=tuple(m.transform for m in others),
                    effect=transform.effect(self.training, None, None),
                    seconds=verdict.seconds / len(members),
                    # Paid once, and so told once.
                    first_step_us=0.0 if place else verdict.first_step_us,
                    break_even_steps=None if place else verdict.break_even_steps,
                    memory_delta_bytes=0 if place else verdict.memory_delta_bytes,
                    matched=sites[0],
                    unmatched=sites[1],
                )
            )

    def _warm_up(self) -> Steps:
        recent: list[StepEvent] = [(yield)]
        while not self.kept.settle():
            yield
        settled = self._steps
        while True:
            recent = [*recent[-9:], (yield)]
            warm = self._steps - settled - max(2, self.session.warmup)
            if warm >= 0:
                times = step_times(recent).step_us
                if times or warm > WARMUP_PATIENCE:
                    wall = [(b.host_ns - a.host_ns) / 1e3 for a, b in itertools.pairwise(recent)]
                    self._step_us = median(times or wall)
                    return

    def _conclude(self, verdict: Verdict) -> None:
        self._tell_spent()
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
            out_of_time=out_of_time,
            model_hash=planfile.model_hash(root.module for root in self.training.roots),
            steps=self._steps,
            step_us=self._step_us,
            notes=tuple(self._notes),
        )
        storage.save(self.session.folder / records.SEARCH_FILE, record)
        self._tell_spent()

    def _tell_spent(self) -> None:
        told = records.Spent(seconds=self._watch.seconds())
        storage.save(self.session.folder / records.TRIALS_DIR / records.SPENT_FILE, told)

    # -- one candidate ----------------------------------------------------------------------------------------------

    def _try(self, candidate: Recommendation, *, patient: bool = True) -> Generator[None, StepEvent, Verdict | None]:
        """The verdict on one candidate; None when only fresh processes can try it. Without patience its status may be MORE."""
        self._watch.enter(spent.LOOK)
        limit, begun = self.session.trial_timeout_s, time.monotonic()
        before_s = found.seconds if (found := self._postponed.get(records.attempt(candidate))) is not None else 0.0
        self._ends_at = time.monotonic() + limit
        if self.session.deadline_unix_s:
            self._ends_at = min(self._ends_at, time.monotonic() + self.session.deadline_unix_s - time.time())
        parameters = dict(candidate.parameters)
        resumed = self._resumed(candidate)
        current = dataclasses.replace(resumed, limit_s=limit, starts=resumed.starts + 1)
        times = _Times.resumed(current)
        self._note(current)
        gate, switch, watch = Gate(self.training, self.watcher), None, BatchWatch(self.training)
        first_us, memory = current.first_step_us, 0
        sites: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        checks: dict[str, Check | None] = {"effect": current.effect, "numerics": current.numerics, "timing": None}
        proved = current.numerics is not None  # in an earlier process, with the same changes on

        def verdict(status: str, reason: str, decision: Decision | None = None) -> Verdict:
            saved = None if decision is None or decision.point is None else decision.point * self._step_us
            return self._verdict(
                candidate,
                transform,
                status,
                reason,
                gain=decision.gain if decision else None,
                blocks=Blocks(
                    off_us=tuple(times.off_us),
                    on_us=tuple(times.on_us),
                    steps_per_block=times.steps,
                    dropped=times.dropped,
                    disturbed=times.disturbed,
                ),
                first_step_us=first_us,
                break_even_steps=math.ceil(first_us / saved) if saved and saved > 0 else None,
                memory_delta_bytes=memory,
                seconds=before_s + time.monotonic() - begun,
                matched=sites[0],
                unmatched=sites[1],
                **checks,
            )

        transform: Transform | None = None
        lost = False
        try:
            transform = self._transform(candidate.transform)
            watch.start()
            captured = yield from self._capture(gate)
            fed = None if proved else watch.fed()
            watch.stop()
            if transform.id == "amp_fp16" and self._bf16_serves():
                # The same matrix rate with less range: loss scaling for nothing but cuDNN's fp16 batch norms.
                return verdict(
                    "skipped", "bf16 runs as fast on this GPU and needs no loss scaling; `--only amp_fp16` tries it"
                )
            match = transform.match(self.training, parameters)
            sites = (match.sites, match.unmatched)
            if not match.applies:
                return verdict("not applicable", match.reason or "it does not apply here")
            if not transform.live:
                return None
            switch = _Switch(self.training, transform, parameters, self._rivals(candidate, transform))
            states_effect = type(transform).effect is not Transform.effect
            traced = current.traced and transform.traced and not proved and states_effect
            if traced and self._trace_before is None and not graphs.alive():
                self._watch.enter(spent.TRACE)
                self._trace_before = yield from self._trace()
                self._watch.enter(spent.LOOK)
                captured = yield from self._capture(gate)

            if not proved:
                self._watch.enter(spent.GATE)
                self._note(dataclasses.replace(current, phase="gate"))
                if captured:
                    with self._alarm():
                        result = gate.judge(
                            switch.on, switch.off, transform.semantics, _precision(transform), self._computes_in()
                        )
                    numerics, first_us = result.check, result.first_us
                else:
                    numerics = Check(passed=None, detail="no model call with gradients was seen to replay")
                gate.release()
                checks["numerics"] = numerics
                if numerics.passed is False:
                    return verdict(REVERTED, f"it changes the training: {numerics.detail}")
                if numerics.passed is None:
                    return verdict(INCONCLUSIVE, f"its numbers could not be checked: {numerics.detail}")

            self._watch.enter(spent.SETTLE)
            self._note(dataclasses.replace(current, phase="warm-up"))
            switch.on()  # after the gate it is on already
            if fed:
                watch.start()
            with self._alarm():
                extra_us, still_fed = yield from self._settle(watch)
            first_us += 0.0 if proved else extra_us
            watch.stop()
            gate.release()  # what the watched steps left
            if fed and still_fed is False:
                checks["numerics"] = Check(passed=False, detail="the model does not get the loader's batches any more")
                return verdict(
                    REVERTED, "it changes the training: the model does not get the loader's batches any more"
                )

            sites = transform.sites(self.training) or sites
            after = None
            if not proved:
                self._watch.enter(spent.TRACE)
                self._note(dataclasses.replace(current, phase="effect"))
                # Processes died under the tracer beside captured graphs, and only there: what is on by then, and what has
                # run, is shown by the live state (docs/decisions/0018).
                after = (yield from self._trace()) if traced and not graphs.alive() else None
                before = self._trace_before if after is not None else None
                effect = checks["effect"] = transform.effect(self.training, before, after)
                if effect.passed is False:
                    return verdict(REVERTED, f"applied, but without effect: {effect.detail}")

            current = dataclasses.replace(
                current, numerics=checks["numerics"], effect=checks["effect"], first_step_us=first_us
            )
            self._watch.enter(spent.BLOCKS)
            self._note(times.noted(dataclasses.replace(current, phase="timing")))
            decision, memory = yield from self._time(switch, times, current, patient)
            if not patient and decision.status == INCONCLUSIVE:
                decision = dataclasses.replace(decision, status=MORE)
            checks["timing"] = Check(
                passed=decision.status == KEPT,
                detail=decision.reason,
                numbers={} if decision.point is None else {"gain": decision.point},
            )
            if decision.status == KEPT:
                switch.on()
                self._stand(switch, candidate)
                self._trace_before = after
            return verdict(decision.status, decision.reason, decision)
        except _OutOfTime:
            last = self._last_look(times)
            return verdict(last.status if last.status == REVERTED else INCONCLUSIVE, last.reason, last)
        except torch.cuda.OutOfMemoryError as error:
            return verdict("failed", f"out of memory: {_first_line(error)}")
        except Exception as error:
            lost = unusable(str(self.training.device))
            if lost:
                raise _Unclean(f"it left the GPU in error, which ends the process: {_first_line(error)}") from error
            if isinstance(error, _Unclean):
                raise
            return verdict("failed", f"{type(error).__name__}: {_first_line(error)}")
        finally:
            self._watch.enter(spent.UNDO)
            gate.release()
            watch.stop()
            # On a lost device nothing can be taken back; the process ends with it.
            if (
                not lost
                and switch is not None
                and switch.is_on
                and all(switch.standing is not s for s in self.kept.standing)
            ):
                switch.off()
                if transform is not None:
                    transform.release(self.training)
                if self.training.device.type == "cuda":
                    torch.cuda.empty_cache()

    def _resumed(self, candidate: Recommendation) -> records.InTrial:
        """The record of this candidate's trial: where an earlier process left it, or a new one."""
        known = records.load_current(self.session.folder)
        parameters = dict(candidate.parameters)
        if known is not None and (known.transform, known.parameters) == (candidate.transform, parameters):
            return known
        left = self._postponed.get(records.attempt(candidate))
        if left is not None and left.on == tuple(s.transform.id for s in self.kept.standing):
            return left.trial
        return records.InTrial(transform=candidate.transform, parameters=parameters)

    def _bf16_serves(self) -> bool:
        """Whether bf16 is, or was, a candidate on a GPU with bf16 matrix units."""
        if self.training.device.type != "cuda" or torch.cuda.get_device_capability(self.training.device) < (8, 0):
            return False
        tried = (v.transform for v in records.verdicts(self.session.folder))
        return "amp_bf16" in {*tried, *(c.transform for c in self.session.candidates)}

    def _computes_in(self) -> str:
        """What the loop as it stands rounds to inside its models, as far as a look from outside cannot tell."""
        discovery = Attached.discovery
        if discovery is not None and discovery.seen.autocast is not None:
            return "half"
        kept = {_precision(s.transform) for s in self.kept.standing if s.transform.semantics is Semantics.PRECISION}
        return "half" if "half" in kept else "tf32" if kept else "fp64"

    def _rivals(self, candidate: Recommendation, transform: Transform) -> list[Standing]:
        conflicts = {*candidate.conflicts, *transform.conflicts}
        names = planner.conflicting(
            transform.id, conflicts, [(s.transform.id, s.transform.conflicts) for s in self.kept.standing]
        )
        return [s for s in self.kept.standing if s.transform.id in names]

    def _stand(self, switch: _Switch, candidate: Recommendation) -> None:
        """The candidate is part of the loop from now on; what it replaced is not."""
        assert switch.standing is not None  # it was switched on by the caller
        for rival in switch.rivals:
            self.kept.standing.remove(rival)
            for old in records.verdicts(self.session.folder):
                if old.transform == rival.transform.id and old.status == KEPT:
                    reason = f"replaced by {candidate.transform}, which is faster; it had gained: {old.reason}"
                    records.save_verdict(self.session.folder, dataclasses.replace(old, status=REVERTED, reason=reason))
        self.kept.standing.append(switch.standing)

    def _capture(self, gate: Gate) -> Generator[None, StepEvent, bool]:
        for _ in range(CAPTURE_TRIES):
            gate.arm()
            event = yield
            if gate.captured() and event.reason not in (SHAPES, BACKWARDS):
                return True
        return False

    def _settle(self, watch: BatchWatch) -> Generator[None, StepEvent, tuple[float, bool | None]]:
        """Wait until step times agree.

        Returns:
            What the steps until then took more than later ones, µs, and whether `watch` saw the loader's batches arrive
            in all of them (None: not watched, or nothing to compare).
        """
        times: list[float] = []
        fed: bool | None = None
        while True:
            watching = watch.active and len(times) < MIN_SETTLE
            if watching:
                capture_next_step(self.training)  # a root's inputs are those of its latest captured call
            self._synchronize()
            start = time.perf_counter()
            yield
            self._synchronize()
            times.append((time.perf_counter() - start) * 1e6)
            if watching:
                arrived = watch.fed()
                fed = arrived if fed is None else fed and arrived is not False
            self._check_time()
            last = times[-3:]
            if len(times) >= MAX_SETTLE or (len(times) >= MIN_SETTLE and max(last) <= SETTLED_SPREAD * min(last)):
                usual = stdlib_statistics.median(last)
                return math.fsum(max(0.0, t - usual) for t in times[:-3]), fed

    def _trace(self) -> Generator[None, StepEvent, StepProfile | None]:
        """A trace of one clean step, as far as an effect check reads it; None where there is no profiler to be had."""
        plain = dataclasses.replace(self.session, counters=False)
        for _ in range(3):
            collector = TraceCollector(self.training.device, plain)
            ends: list[int] = []
            try:
                with cuda_graphs.paused():  # the kernels of a replay belong to no operator
                    collector.start()
                    ends.append(time.perf_counter_ns())
                    event = yield
                    ends.append(event.host_ns)
            finally:
                trace = collector.stop(ends)  # also when the search is given up here: a profiler must not stay on
            found = aggregate(trace, Environment(device=self.training.device.type))
            if found.kernels:
                return StepProfile(
                    script=self.session.script,
                    argv=self.session.argv,
                    created="",
                    environment=Environment(device=self.training.device.type),
                    step_kind=self.watcher.kind if self.watcher is not None else "optimizer",
                    step_us=None,
                    wall_us=None,
                    kernels=found.kernels,
                    launches=found.launches,
                    launch_us=found.launch_us,
                    busy_us=found.busy_us,
                    idle=found.idle,
                    syncs=found.syncs,
                    copies=found.copies,
                    model=model_facts(self.training),
                )
        return None

    # -- timing -----------------------------------------------------------------------------------------------------

    def _time(
        self, switch: _Switch, times: _Times, current: records.InTrial, patient: bool
    ) -> Generator[None, StepEvent, tuple[Decision, int]]:
        step_s = max(self._step_us, 1.0) / 1e6
        # A process that ended before a pair was whole may be too short for one: the next tries with half as long ones.
        # The last trial's noise is the best guess at this one's.
        wanted = int(self._stretch * min(MAX_BLOCK_STEPS, math.ceil(BLOCK_S / step_s))) >> (current.starts - 1)
        times.steps = times.steps or max(MIN_BLOCK_STEPS, wanted)
        course = trial(
            lambda: times.pairs, switch.is_on, self.session.min_gain, self.session.max_pairs, patient=patient
        )
        watch = self._machine = self._machine or MachineWatch(self.training.device)
        watch.renew()
        try:
            state = next(course)
            while True:
                self._synchronize()
                switch.on() if state else switch.off()
                before = len(times.pairs)
                reason = yield from self._block(times, state, watch)
                if len(times.pairs) > before:
                    self._note(times.noted(dataclasses.replace(current, phase="timing")))
                state = course.send(reason)
        except StopIteration as done:
            decision: Decision = done.value
        except _OutOfTime:
            decision = self._last_look(times)
        self._stretch = stretch(times.pairs, self.session.min_gain, self._stretch)
        if times.off_us:
            self._step_us = median(times.on_us if decision.status == KEPT else times.off_us)
        return _against_the_wall(decision, times), times.on.peak_bytes - times.off.peak_bytes

    def _last_look(self, times: _Times) -> Decision:
        last = decide(times.pairs, self.session.min_gain, max_pairs=self.session.max_pairs, last=True)
        return dataclasses.replace(last, reason=f"out of time: {last.reason}")

    def _block(self, times: _Times, on: bool, watch: MachineWatch) -> Generator[None, StepEvent, str]:
        """Time one block. The step after a switch or a synchronisation is not timed: it pays for them.

        Returns:
            What disturbed it, so that it does not count; empty when it is in `times`.
        """
        arm = times.on if on else times.off
        on_gpu = self.training.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.training.device)
        start = time.perf_counter()
        boundaries = [(yield)]
        watch.begin()
        clean = 0
        while clean < times.steps:
            event = yield
            boundaries.append(event)
            clean += event.clean
            self._check_time()
            if len(boundaries) > UNCLEAN_FACTOR * times.steps + 10:
                raise _OutOfTime
        disturbed = watch.end(on)
        self._synchronize()
        if disturbed:
            times.disturbed += 1
            return disturbed
        wall = (time.perf_counter() - start) * 1e6
        measured = step_times(boundaries).step_us
        unclean = len(boundaries) - 1 - clean
        times.dropped += unclean
        times.bursty += bursty(measured)
        arm.medians.append(median(measured))
        arm.means.append(math.fsum(measured) / len(measured))
        if on_gpu:
            # An unclean step in the block (an epoch's end) is in its wall time too, which then stands for nothing.
            arm.walls.append(math.nan if unclean else wall / len(boundaries))
            arm.peak_bytes = max(arm.peak_bytes, torch.cuda.max_memory_allocated(self.training.device))
        return ""

    def _check_time(self) -> None:
        if time.monotonic() > self._ends_at:
            raise _OutOfTime

    @contextlib.contextmanager
    def _alarm(self) -> Iterator[None]:
        """The kernel ends this process when what is inside takes longer than the trial may, whatever it waits for."""
        if signal.getsignal(signal.SIGALRM) is not signal.SIG_DFL:
            yield  # the script uses the alarm itself
            return
        seconds = max(1.0, self._ends_at - time.monotonic()) + ALARM_GRACE_S
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
        except (OSError, ValueError):
            yield
            return
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)

    # -- small things -----------------------------------------------------------------------------------------------

    def _verdict(
        self, candidate: Recommendation, transform: Transform | None, status: str, reason: str, **more: object
    ) -> Verdict:
        return Verdict(
            transform=candidate.transform,
            status=status,
            reason=reason,
            parameters=dict(candidate.parameters),
            title=transform.title if transform is not None else planner.title(candidate.transform),
            round=candidate.round,
            semantics=transform.semantics if transform is not None else candidate.semantics,
            predicted=candidate.predicted,
            **more,  # type: ignore[arg-type]
        )

    def _note(self, current: records.InTrial) -> None:
        self._tell_spent()
        records.save_current(self.session.folder, current)

    def _synchronize(self) -> None:
        if self.training.device.type == "cuda":
            torch.cuda.synchronize(self.training.device)


def _take_back(standing: Standing) -> None:
    try:
        standing.undo.run()
    except Exception as error:
        say(f"{standing.transform.id} could not be taken back: {error}")
        raise _Unclean(f"{standing.transform.id} could not be taken back: {_first_line(error)}") from error


def _against_the_wall(decision: Decision, times: _Times) -> Decision:
    """A gain by CUDA events that wall time excludes is work moved out of the events' sight, and is not kept."""
    if decision.status != KEPT or decision.gain is None:
        return decision
    walls = [p for p in zip(times.off.walls, times.on.walls, strict=False) if not any(map(math.isnan, p))]
    by_wall = gain_interval(walls) if len(walls) >= 4 else None
    # The two clocks differ by what the host does after its last launch; hidden work leaves no gain on the wall at all.
    if by_wall is None or by_wall[0].high >= 0.5 * decision.gain.low:
        return decision
    reason = f"CUDA events and wall clock disagree: {decision.reason}, by wall clock at most {by_wall[0].high:+.1%}"
    return dataclasses.replace(decision, status=INCONCLUSIVE, reason=reason)


def _precision(transform: Transform) -> str:
    """The class that a change of precision computes in."""
    return "tf32" if transform.semantics is Semantics.PRECISION and transform.id == "tf32" else "half"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
