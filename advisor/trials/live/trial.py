"""One candidate's trial, in the order in which things happen: match, numeric gate, warm-up, effect, timed blocks, verdict."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Generator
from typing import Any

import torch

from advisor.core.findings import Recommendation
from advisor.core.profile import StepProfile
from advisor.core.verdict import Check, Status, Verdict
from advisor.loop import graphs
from advisor.loop.recorded import capture_next_step
from advisor.loop.training import StepEvent
from advisor.ops.verify import unusable
from advisor.transforms.base import Transform
from advisor.transforms.bundle import Bundle
from advisor.trials import planner, records, spent, whole
from advisor.trials.kept import StandingChange
from advisor.trials.live.batches import BatchWatch
from advisor.trials.live.blocks import TimedBlocks
from advisor.trials.live.limit import Limit, OutOfTime
from advisor.trials.live.loop import Loop
from advisor.trials.live.precision import bf16_serves, computes_in, precision_of
from advisor.trials.live.release import give_back
from advisor.trials.live.step_to_replay import step_to_replay
from advisor.trials.live.switch import OtherModel, Switch, Unclean, without_advice
from advisor.trials.live.times import Times
from advisor.trials.live.trace import traced_step
from advisor.trials.numerics.gate import Gate
from advisor.trials.records import InTrial
from advisor.trials.statistics import Decision

# Steps after a first enabling that are never timed, and at most waited for until their times agree.
MIN_SETTLE, MAX_SETTLE = 3, 12
SETTLED_SPREAD = 1.15  # longest over shortest of the last three
# What is judged by fresh processes next is given to them where the running loop has it faster by so many times the least gain.
LOOKS_FASTER = 2.0
# Steps without the change in which a script shows that it makes other images of the loader's itself, now and then (mixing some): one
# that does so in a tenth of its steps shows it in 92 of 100 such rows.
OWN_IMAGES = 24
UNFED = "the model does not get the loader's batches any more"

Course = Generator[None, StepEvent, Verdict | None]


class Trial:
    """`run` once; it waits at `yield` for the next step boundary.

    current: the trial as an earlier process left it, or a new one. patient: False where noise shall not be waited out: the
    verdict's status may be Status.MORE then. provisional: fresh processes are to judge it next, so that blocks need not: what is right, has its
    effect and is rather faster than not is kept. begun_s: what it took before, where it was put off.
    """

    def __init__(
        self,
        loop: Loop,
        candidate: Recommendation,
        current: InTrial,
        *,
        patient: bool = True,
        provisional: bool = False,
        begun_s: float = 0.0,
    ) -> None:
        self.loop, self.candidate, self.patient, self.provisional = loop, candidate, patient, provisional
        self.limit = Limit.of(loop.session)
        self.current = dataclasses.replace(current, limit_s=loop.session.trial_timeout_s, starts=current.starts + 1)
        self.transform: Transform | None = None
        self.switch: Switch | None = None
        self.times = Times.resumed(current)
        self._begun = time.monotonic() - begun_s
        self._gate, self._batches = Gate(loop.training, loop.watcher), BatchWatch(loop.training)
        self._proved = current.numerics is not None  # in an earlier process, with the same changes on
        self._first_us = current.first_step_us
        self._settled_us = 0.0  # of a step with the change, when its warm-up was over
        self._sites: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
        self._numerics, self._effect = current.numerics, current.effect
        self._timing: Check | None = None
        self.effects: dict[str, Check] = {}  # of changes tried as one, each one's own

    def run(self) -> Course:
        """The verdict; None when only fresh processes can try the candidate. What is not kept is off again.

        Raises:
            Unclean: when the process is no basis for another trial.
            OtherModel: as it was raised at a `yield`.
        """
        self.loop.spent.enter(spent.LOOK)
        self.loop.note(self.current)
        lost = False
        try:
            return (yield from self._course())
        except OutOfTime as late:
            self._see_effect_late()
            session = self.loop.session
            last = self._for_fresh_runs(self.times.last_look(str(late), session.min_gain, session.max_pairs))
            if last.status == Status.KEPT and self.switch is not None:
                return self._keep(self.switch, None, last)
            status = Status.REVERTED if last.status == Status.REVERTED else Status.INCONCLUSIVE
            return self.verdict(status, last.reason, last)
        except torch.cuda.OutOfMemoryError as error:
            return self.verdict(Status.FAILED, f"{whole.FULL}: {without_advice(error)}")
        except Exception as error:
            lost = bool(unusable(str(self.loop.training.device)))
            if lost:
                raise Unclean(
                    f"it left the GPU in an error state, so the process had to end: {without_advice(error)}"
                ) from error
            if isinstance(error, (Unclean, OtherModel)):
                raise
            return self.verdict(Status.FAILED, f"{type(error).__name__}: {without_advice(error)}")
        finally:
            self.loop.spent.enter(spent.UNDO)
            self._gate.release()
            self._batches.stop()
            if not lost:  # a lost device's changes go with its process
                self._take_back()

    def verdict(self, status: Status, reason: str, decision: Decision | None = None) -> Verdict:
        """The verdict with all that is known by now."""
        known: dict[str, Any] = {}
        if self.transform is not None:
            known = {"title": self.transform.title, "semantics": self.transform.semantics}
        return records.verdict_on(
            self.candidate,
            status,
            reason,
            gain=decision.gain if decision is not None else None,
            gain_of="device" if decision is not None and decision.step_point is not None else "step",
            effect=self._effect,
            numerics=self._numerics,
            timing=self._timing,
            blocks=self.times.blocks,
            first_step_us=self._first_us,
            break_even_steps=self.times.break_even_steps(self._first_us, decision),
            memory_delta_bytes=self.times.memory_bytes,
            seconds=time.monotonic() - self._begun,
            matched=self._sites[0],
            unmatched=self._sites[1],
            **known,
        )

    def _course(self) -> Course:
        loop = self.loop
        transform = self.transform = loop.transform(self.candidate.transform)
        self._batches.start()
        missing = yield from step_to_replay(self._gate, guides=transform.guides)
        fed = None if self._proved else self._batches.fed()
        self._batches.stop()
        refused = self._match(transform)
        if refused is not None or not transform.live:
            return refused
        switch = self.switch = Switch(
            loop.training, transform, dict(self.candidate.parameters), self._rivals(transform)
        )
        states_effect = type(transform).effect is not Transform.effect
        # What fresh processes judge next shows its effect by the live state: a trace takes some steps, and is read for seconds.
        traced = self.current.traced and transform.traced and states_effect and not (self._proved or self.provisional)
        if traced and loop.traced is None and not graphs.alive():
            loop.spent.enter(spent.TRACE)
            loop.traced = yield from traced_step(loop)
            loop.spent.enter(spent.LOOK)
            missing = yield from step_to_replay(self._gate, guides=transform.guides)
        if not self._proved:
            refused = self._judge(transform, switch, missing)
            if refused is not None:
                return refused
        refused = yield from self._settle(switch, fed)
        if refused is not None:
            return refused
        self._sites = transform.sites(loop.training) or self._sites
        if isinstance(transform, Bundle):
            # Now, with steps behind them: what is counted begins anew wherever a change is switched on.
            self.effects = transform.effects(loop.training)
            yield from self._drop_idle(transform, switch)
        after: StepProfile | None = None
        if not self._proved:
            self._enter(spent.TRACE, "effect")
            # Processes died under the tracer beside captured graphs, and only there: what is on by then, and what has
            # run, is shown by the live state (docs/notes/profiling.md#cuptis-teardown).
            if traced and not graphs.alive():
                after = yield from traced_step(loop)
            self._effect = transform.effect(loop.training, loop.traced if after is not None else None, after)
            if self._effect.passed is False:
                return self.verdict(Status.REVERTED, f"applied, but without effect: {self._effect.detail}")
        return (yield from self._time(switch, after))

    # -- match ------------------------------------------------------------------------------------------------------

    def _match(self, transform: Transform) -> Verdict | None:
        if transform.id == "amp_fp16" and bf16_serves(self.loop):
            # The same matrix rate with less range: loss scaling for nothing but cuDNN's fp16 batch norms.
            return self.verdict(
                Status.SKIPPED, "bf16 runs as fast on this GPU and needs no loss scaling; `--only amp_fp16` tries it"
            )
        match = transform.match(self.loop.training, dict(self.candidate.parameters))
        self._sites = (match.sites, match.unmatched)
        if not match.applies:
            return self.verdict(Status.NOT_APPLICABLE, match.reason or "it does not apply here")
        return None

    def _rivals(self, transform: Transform) -> list[StandingChange]:
        standing = self.loop.kept.standing
        names = planner.conflicting(
            transform.id, transform.conflicts, [(s.transform.id, s.transform.conflicts) for s in standing]
        )
        return [s for s in standing if s.transform.id in names]

    # -- numeric gate -----------------------------------------------------------------------------------------------

    def _judge(self, transform: Transform, switch: Switch, missing: str) -> Verdict | None:
        self._enter(spent.GATE, "gate")
        numerics = Check(passed=None, detail=missing)
        if not missing:
            with self.limit.alarm():
                result = self._gate.judge(
                    switch.on, switch.off, transform.semantics, precision_of(transform), computes_in(self.loop)
                )
            numerics, self._first_us = result.check, result.first_us
            self.loop.spent.charge(spent.FIRST, result.first_us / 1e6)
        self._gate.release()
        self._numerics = numerics
        if numerics.passed is False:
            return self.verdict(Status.REVERTED, f"it changes the training: {numerics.detail}")
        if numerics.passed is None:
            return self.verdict(Status.INCONCLUSIVE, f"its numbers could not be checked: {numerics.detail}")
        return None

    # -- warm-up ----------------------------------------------------------------------------------------------------

    def _settle(self, switch: Switch, fed: bool | None) -> Course:
        """Switch on and wait until step times agree; `fed`: whether the loader's batches arrived without the change."""
        self._enter(spent.SETTLE, "warm-up")
        switch.on()  # after the gate it is on already
        if fed:
            self._batches.start()
        with self.limit.alarm():
            extra_us, still_fed = yield from self._agree()
        self._first_us += 0.0 if self._proved else extra_us
        self._batches.stop()
        self._gate.release()  # what the watched steps left
        if fed and still_fed is False:
            if (yield from self._fed_without(switch)):
                self._numerics = Check(passed=False, detail=UNFED)
                return self.verdict(Status.REVERTED, f"it changes the training: {UNFED}")
            switch.on()
            with self.limit.alarm():
                yield from self._agree()
        return None

    def _fed_without(self, switch: Switch) -> Generator[None, StepEvent, bool]:
        """Whether the loader's batches arrive in step after step without the change, which is off then."""
        switch.off()
        self._batches.start()
        try:
            for _ in range(OWN_IMAGES):
                capture_next_step(self.loop.training)
                yield
                if self._batches.fed() is False:
                    return False
                self.limit.check()
            return True
        finally:
            self._batches.stop()
            self._gate.release()

    def _agree(self) -> Generator[None, StepEvent, tuple[float, bool | None]]:
        """
        Returns:
            What the steps until their times agreed took more than later ones, µs, and whether the loader's batches were seen to
            arrive in all of them (None: not watched, or nothing to compare).
        """
        times: list[float] = []
        fed: bool | None = None
        while True:
            watching = self._batches.active and len(times) < MIN_SETTLE
            if watching:
                capture_next_step(self.loop.training)  # a root's inputs are those of its latest captured call
            self.loop.synchronize()
            start = time.perf_counter()
            yield
            self.loop.synchronize()
            times.append((time.perf_counter() - start) * 1e6)
            if watching:
                arrived = self._batches.fed()
                fed = arrived if fed is None else fed and arrived is not False
            self.limit.check()
            last = times[-3:]
            agreed = len(times) >= MIN_SETTLE and max(last) <= SETTLED_SPREAD * min(last)
            if agreed and self.transform is not None and self.transform.warming(self.loop.training):
                agreed = False  # three eager calls before a capture agree too
            if len(times) >= MAX_SETTLE or agreed:
                usual = self._settled_us = statistics.median(last)
                return math.fsum(max(0.0, t - usual) for t in times[:-3]), fed

    def _drop_idle(self, bundle: Bundle, switch: Switch) -> Generator[None, StepEvent, None]:
        """Members without any effect are off before anything is timed: switching them on again may cost seconds in each pair (CUDA graphs
        that are captured anew and never replayed: 9 s a pair of RAFT's on an H200)."""
        idle = [m for m in bundle.members if self.effects[m.id].passed is False]
        if not idle or len(idle) == len(bundle.members):
            return
        switch.off()
        for member in idle:
            member.release(self.loop.training)
        bundle.members = tuple(m for m in bundle.members if m not in idle)
        switch.on()
        with self.limit.alarm():
            yield from self._agree()

    # -- timed blocks -----------------------------------------------------------------------------------------------

    def _time(self, switch: Switch, after: StepProfile | None) -> Course:
        self.current = dataclasses.replace(
            self.current, numerics=self._numerics, effect=self._effect, first_step_us=self._first_us
        )
        self.loop.spent.enter(spent.BLOCKS)
        self.loop.note(self.times.noted(dataclasses.replace(self.current, phase="timing")))
        blocks = TimedBlocks(self.loop, self.limit, self.times)
        decision = yield from blocks.run(switch, self.current, patient=self.patient, hasty=self.provisional)
        # What the host's launches have slowed may be faster once they do not bound the step.
        slowed = decision.status == Status.REVERTED and self.times.on.host_bound
        if self.provisional:
            decision = self._for_fresh_runs(decision)
        elif not self.patient and (decision.status == Status.INCONCLUSIVE or slowed):
            decision = dataclasses.replace(decision, status=Status.MORE)
        numbers = {} if decision.point is None else {"gain": decision.point}
        if decision.step_point is not None:
            numbers = {"gain": decision.step_point, "device_gain": decision.point or 0.0}
        self._timing = Check(passed=decision.status == Status.KEPT, detail=decision.reason, numbers=numbers)
        if decision.status == Status.KEPT:
            return self._keep(switch, after, decision)
        return self.verdict(decision.status, decision.reason, decision)

    def _keep(self, switch: Switch, after: StepProfile | None, decision: Decision) -> Verdict:
        switch.on()
        self._stand(switch)
        self.loop.traced = after
        return self.verdict(Status.KEPT, decision.reason, decision)

    def _for_fresh_runs(self, decision: Decision) -> Decision:
        """What blocks have left open, as fresh processes are to take it up: kept where it looks faster, or where nothing was timed (an
        evaluation in between took the trial's time, or epochs are too short for a block); as it was where the check or the effect is missing.
        """
        effect = self._effect is not None and self._effect.passed is not False
        proved = effect and self._numerics is not None and self._numerics.passed
        if not (self.provisional and proved and decision.status in (Status.MORE, Status.INCONCLUSIVE)):
            return decision
        # Where the host's noise hides it, fresh processes have the kernels' time beside the step's.
        least = 0.0 if self.times.off.host_bound else LOOKS_FASTER * self.loop.session.min_gain
        if decision.point > least if decision.point is not None else not self._seen_slower():
            return dataclasses.replace(decision, status=Status.KEPT, reason=f"{decision.reason}; {records.UNDECIDED}")
        return dataclasses.replace(decision, status=Status.INCONCLUSIVE)  # there will be no more pairs

    def _see_effect_late(self) -> None:
        """Of what was found right and had no time left to settle: whether it is in effect, as the live state says."""
        if self.provisional and self._numerics and self._effect is None and isinstance(self.transform, Bundle):
            self.effects |= self.transform.effects(self.loop.training)  # those dropped as idle have theirs
            self._effect = self.transform.effect(self.loop.training, None, None)

    def _seen_slower(self) -> bool:
        """Whether what was seen of it without a verdict of blocks, one pair or the steps of its warm-up, speaks against fresh processes."""
        if self.times.pairs:
            return any(on >= off for off, on in self.times.pairs)
        return self._settled_us > SETTLED_SPREAD * max(self.loop.step_us, 1.0)

    def _stand(self, switch: Switch) -> None:
        """The candidate is part of the loop from now on; what it replaced is not."""
        assert switch.standing is not None  # it was switched on by the caller
        for rival in switch.rivals:
            self.loop.kept.standing.remove(rival)
            records.replace_kept(self.loop.session.folder, rival.transform.id, by=self.candidate.transform)
        self.loop.kept.standing.append(switch.standing)

    def _take_back(self) -> None:
        """The loop is as it stands, without the candidate unless it is part of it."""
        if self.switch is None or self.transform is None:
            return
        if not self.switch.is_on or all(self.switch.standing is not s for s in self.loop.kept.standing):
            self.switch.off()  # its last block may have left it so; what it has compiled or captured is there all the same
            self.transform.release(self.loop.training)
            give_back(self.loop.training.device)

    def _enter(self, phase: str, named: str) -> None:
        """The next part begins: `phase` is its time's, `named` its name on disk, should the process die in it."""
        self.loop.spent.enter(phase)
        self.loop.note(dataclasses.replace(self.current, phase=named))
