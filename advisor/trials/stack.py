"""The stack: all kept changes together, in fresh processes, against the plain script.

First the whole is proved; what does not hold there is not kept. Then it runs without each of its items while time is left: one
that it is as fast without is dropped. What was left for last is tried on top of the whole: before that where it takes little of the
time left, since it may gain where the other explains, else behind it.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from advisor.core import transform_table
from advisor.core.findings import Interval, Recommendation
from advisor.core.plan import PlanItem
from advisor.core.units import percent_text
from advisor.core.verdict import Blocks, Check, StackVerdict, Status, Verdict
from advisor.trials import fresh, losses, planner, proof, records, spent
from advisor.trials.budget import Budget
from advisor.trials.fresh import FreshRuns
from advisor.trials.proof import PLAIN, STACK, Proof, Ratio
from advisor.trials.records import Measurement
from advisor.trials.script import Script
from advisor.trials.whole import LEFT_OUT, kind_of

ROUNDS = 3  # while noise hides the answer and time is left
# Seeds of the runs without an item, or with one more: those of the stack's own. One run may do: its blocks tell a clear answer, and
# nothing is dropped or added on the word of one.
TURNS = (0, 1)
# Two more with what is tried on top, where those two leave open whether it gains much: of a ResNet-18 on CIFAR with cuDNN's algorithms
# chosen by timing one took 2.10 ms a step, one 1.87, and three of the next day 1.81 each.
MORE_TURNS = (2, 3)
# A change that was chosen for its prediction is hardly ever slower by as much: with cuDNN's algorithms chosen by timing a step took 2.51 ms
# in a run beside other programs, 2.16 without; a minute later 2.00 and 2.21.
MUCH_SLOWER = 0.05
# The share of `min_gain` that one of several changes kept together has to seem to save, to stay where fresh runs leave it open.
LOOKS_FASTER = 0.25


@dataclass(slots=True, eq=False)
class _Runs:
    """Fresh runs so far, by kind; `begun` counts the failed ones too."""

    plain: list[Measurement] = field(default_factory=list)
    stack: list[Measurement] = field(default_factory=list)
    begun: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class StackTrial:
    """Each method that takes a proof returns the one that holds after it; verdicts on disk say what became of each item."""

    script: Script
    runs: FreshRuns
    budget: Budget
    min_gain: float

    def prove(self, before: Proof | None = None, *, quick: bool = False) -> Proof | None:
        """The kept changes together against the plain script; drops some until the rest holds. None: nothing kept.

        Args:
            quick: one run of each kind does where it is clear by that; `confirm` adds the others.
            before: an earlier proof, of a part of them. Its plain runs serve again, and where the rest does not hold on top of that
                part, that part stays proved.
        """
        kept = list(records.kept_items(self.script.run_dir))
        before = before if before is not None and before.holds and set(before.items) <= _names(kept) else None
        if before is not None and set(before.items) == _names(kept):
            return before
        if not kept or self.script.over:
            return before
        runs = _Runs(plain=list(before.plain), begun=Counter({PLAIN: len(before.plain)})) if before else _Runs()
        verdict = StackVerdict(passed=None, detail="no time was left to compare the kept changes together")
        for number in range(1, ROUNDS + 1):
            # The first round has no deadline: without it nothing is proved.
            if number > 1 and (verdict.passed is not None or time.time() > self.budget.until):
                break
            if number > 1:
                self.script.say(f"{verdict.detail}; more runs")
            kinds: tuple[str, ...] = (STACK, STACK) if before is not None and number == 1 else proof.ROUND
            what = f"comparing in fresh runs, round {number}"
            if quick and number == 1 and before is None:
                profiled = self._profiled()
                runs.plain += profiled
                runs.begun[PLAIN] += len(profiled)
                self._gather(runs, kinds[len(profiled) : 2], kept, what)
                if runs.plain and runs.stack and kept and not self.script.over:
                    verdict = self._judge(runs.plain, runs.stack, kept)
                    if proof.clear(verdict):
                        break
                    self.script.say(
                        f"{verdict.detail}; more runs" if verdict.passed is None else "more runs, to be sure"
                    )
                kinds = kinds[2:]
            self._gather(runs, kinds, kept, what, while_time=bool(runs.plain and runs.stack))
            if self.script.over:
                return before or self._cut_short()
            if not kept:
                return Proof(verdict=StackVerdict(passed=None, detail="no kept change could be applied in a fresh run"))
            if not runs.plain:
                return self._unproved(
                    kept, f"the plain script gave no measurement in a fresh run: {self.runs.why_none}"
                )
            verdict = self._judge(runs.plain, runs.stack, kept)
            if verdict.passed is False and number == 1 and proof.apart(runs.plain, runs.stack, kept):
                # Two plain runs say little of how far chance takes a training whose losses still swing.
                why = "the losses differ; measuring how much the plain script's losses vary"
                self._gather(runs, (PLAIN, PLAIN), kept, why, while_time=True)
                if self.script.over:
                    return before or self._cut_short()
                verdict = self._judge(runs.plain, runs.stack, kept)
        if verdict.passed is None:
            return self._back_to(before, kept, verdict) or self._unproved(kept, verdict.detail, verdict)
        while verdict.passed is not True:
            if self.budget.overrun and len(kept) > 1:
                why = f"no time was left to find out which change is to blame: {verdict.detail}"
                told = dataclasses.replace(verdict, passed=None, detail=why)
                return self._back_to(before, kept, told) or self._unproved(kept, why, told)
            dropped = self._least_trusted(kept)
            kept = [item for item in kept if item not in dropped]
            hidden = proof.leaves_open(verdict, self.min_gain)
            why = "noise hides what it does" if hidden else "together with the other changes it did not hold"
            for item in dropped:
                status = Status.INCONCLUSIVE if hidden else Status.REVERTED
                self._revert(item, f"{why} in fresh runs: {verdict.detail}", status=status)
            if before is not None and _names(kept) == set(before.items):
                return before
            if kept:
                runs = _Runs(plain=runs.plain)
                without = ", ".join(transform_table.title(item.transform) for item in dropped)
                self._gather(runs, (STACK, STACK), kept, f"without {without}", while_time=True)
                if self.script.over:
                    return before or self._cut_short()
                if not runs.stack:
                    late = StackVerdict(passed=None, detail=f"the plan without {without} was not measured")
                    return self._back_to(before, kept, late) or self._unproved(kept, late.detail, late)
            if not kept:
                open_yet = dataclasses.replace(verdict, passed=None) if hidden else verdict
                return self._unproved(kept, f"nothing is kept: {verdict.detail}", open_yet)
            verdict = self._judge(runs.plain, runs.stack, kept)
        return self._proof(verdict, runs.plain, runs.stack, kept)

    def with_plain(self, proved: Proof) -> Proof:
        """The proof with a fresh plain run in the place of the steps that were timed while the script was profiled: what another loader
        changes is told by the flow of all steps, and those are few."""
        runs = _Runs(stack=list(proved.stack))
        if proved.plain != tuple(self._profiled()):
            return proved
        self._gather(runs, (PLAIN,), list(records.kept_items(self.script.run_dir)), "for what feeds the loop")
        return dataclasses.replace(proved, plain=tuple(runs.plain)) if runs.plain else proved

    def _profiled(self) -> list[Measurement]:
        found = self.runs.profiled()
        return [] if found is None else [found]

    def confirm(self, proved: Proof) -> Proof:
        """A proof that rests on one run of each kind rests on two, where time is left for them, whatever they say."""
        runs_s = 2 * self.runs.last_s
        if not proved.holds or len(proved.plain) > 1 or self.script.over or time.time() + runs_s > self.budget.until:
            return proved
        kept = list(records.kept_items(self.script.run_dir))
        if _names(kept) != set(proved.items):
            return proved
        begun = Counter({PLAIN: len(proved.plain), STACK: len(proved.stack)})
        runs = _Runs(plain=list(proved.plain), stack=list(proved.stack), begun=begun)
        self._gather(runs, (STACK, PLAIN), kept, "more fresh runs, for a narrower interval")
        if self.script.over or not kept or len(runs.plain) < len(proved.plain) + 1 or not runs.stack:
            return proved
        verdict = self._judge(runs.plain, runs.stack, kept)
        if not verdict.passed:
            why = f"more fresh runs took the proof back: {verdict.detail}"
            self.script.say(why)
            if proof.leaves_open(verdict, self.min_gain):
                verdict = dataclasses.replace(verdict, passed=None)
            return self._unproved(kept, why, verdict)
        return self._proof(verdict, runs.plain, runs.stack, kept)

    def _least_trusted(self, kept: Sequence[PlanItem]) -> list[PlanItem]:
        """What is dropped first of what does not hold together: the latest change, or of those that were tried as one, a class."""
        verdicts = records.verdicts(self.script.run_dir)
        as_one = {v.transform for v in verdicts if v.status == Status.KEPT and v.together}
        alone = [item for item in kept if item.transform not in as_one]
        classes = [kind for kind in LEFT_OUT if any(kind_of(item.transform) == kind for item in kept)]
        if alone or not classes:
            return [(alone or list(kept))[-1]]
        return [item for item in kept if kind_of(item.transform) == classes[0]]

    def _back_to(self, before: Proof | None, kept: Sequence[PlanItem], verdict: StackVerdict) -> Proof | None:
        """What was proved before stays; what came since is not confirmed. None where nothing was proved before."""
        if before is not None:
            for item in kept:
                if item.transform not in before.items:
                    self._revert(
                        item, f"not confirmed on top of what is proved: {verdict.detail}", status=Status.UNCONFIRMED
                    )
        return before

    @staticmethod
    def _proof(
        verdict: StackVerdict, plain: Sequence[Measurement], stack: Sequence[Measurement], kept: Sequence[PlanItem]
    ) -> Proof:
        return Proof(
            verdict=verdict, plain=tuple(plain), stack=tuple(stack), items=tuple(item.transform for item in kept)
        )

    def add_on_top(self, proved: Proof, candidates: Sequence[Recommendation], *, share: float = 1.0) -> Proof:
        """Try what waits for the stack on top of it: runs with it beside the stack's own, with the same seeds.

        Kept where they are certainly faster by `min_gain` and train as the plain script does; then they are the stack's runs.

        Args:
            share: of the time left; what would take more is passed over.
        """
        script = self.script
        for candidate in records.untried(script.run_dir, candidates):
            if script.over or not proved.holds:
                break
            kept, title = records.kept_items(script.run_dir), transform_table.title(candidate.transform)
            if not self.budget.allows_on_top(candidate.transform, len(TURNS), self.runs.last_s, share=share):
                if share == 1.0:
                    script.notes.append(f"no time was left to try {title} with the kept changes")
                continue
            item = PlanItem(transform=candidate.transform, status=Status.KEPT, parameters=dict(candidate.parameters))
            script.say(f"the kept changes with {title}, in fresh runs")
            settled = partial(self._gains_nothing, proved, (*kept, item))
            runs = self._seeded(spent.ON_TOP, (*kept, item), settled)
            if (
                self._may_gain_much(proved, (*kept, item), runs)
                and not script.over
                and self.budget.allows_on_top(candidate.transform, len(MORE_TURNS), self.runs.last_s, share=share)
            ):
                script.say(f"too noisy to tell what {title} gains; two more runs")
                runs += self._seeded(spent.ON_TOP, (*kept, item), settled, MORE_TURNS)
            if script.over:
                break
            whole = self._judge(proved.plain, runs, (*kept, item))
            ratio = proof.ratio(proved.stack, runs, flow=self._flow((*kept, item)), alike=True)
            numerics = losses.compare([m.losses for m in proved.stack], [m.losses for m in runs], precision=False)
            verdict = self._on_top(candidate, runs, ratio, numerics, whole)
            records.save_verdict(script.run_dir, verdict)
            script.say(f"{title}: {verdict.status}, {verdict.reason}")
            if verdict.status == Status.KEPT:
                proved = self._proof(whole, proved.plain, runs, (*kept, item))
        return proved

    def leave_one_out(self, proved: Proof) -> Proof:
        """Run the proved stack without each of its items in turn, the least of them first, while time is left.

        An item without which the stack is certainly no slower by `min_gain` is dropped, if the rest is proved as well. Of what was
        kept with others, whose gain together was above that, each needs only to be certainly faster than nothing, or to look faster by
        a quarter of that: several that save half of it each save it together.
        """
        script = self.script
        kept = list(records.kept_items(script.run_dir))
        if not proved.holds or script.over:
            return proved
        until = self.budget.left_out_until()
        verdicts = records.verdicts(script.run_dir)
        gains = {v.transform: v.gain.low for v in verdicts if v.gain is not None}
        together = {v.transform for v in verdicts if v.status == Status.KEPT and v.together}
        known = {v.transform for v in verdicts if v.left_out_gain is not None}
        open_items = [item for item in kept if item.transform not in known]
        unasked: list[str] = []
        for item in sorted(open_items, key=lambda i: gains.get(i.transform, 0.0)):
            rest, title = [i for i in kept if i is not item], transform_table.title(item.transform)
            if not rest:
                break
            if time.time() + self.runs.last_s > until:
                unasked.append(title)
                continue
            script.say(f"the plan without {title}, in fresh runs")
            stays = self._stays_with_others if item.transform in together else self._stays_alone
            runs = self._without(rest, proved, kept, stays)
            if script.over:
                break
            # Where another one does not apply without it, it is needed, whatever the runs took.
            if not runs or any(m.left_out for m in runs):
                continue
            gain = self._left_out_gain(proved, kept, runs)
            if gain is None:
                continue
            records.revise_kept(script.run_dir, item.transform, left_out_gain=gain)
            if gain.high >= self.min_gain or stays(gain):
                continue
            whole = self._judge(proved.plain, runs, rest)
            if whole.passed is True:
                self._revert(item, "the plan is as fast without it")
                script.say(f"{title}: removed, the plan is as fast without it")
                kept, proved = rest, self._proof(whole, proved.plain, runs, rest)
        if unasked:
            script.notes.append(f"no time was left to run the plan without {', '.join(unasked)}")
        return proved

    # -- fresh runs -------------------------------------------------------------------------------------------------

    def _gather(
        self, runs: _Runs, kinds: Sequence[str], kept: list[PlanItem], what: str, *, while_time: bool = False
    ) -> None:
        """Add runs of these kinds, in this order; what they cannot apply leaves `kept`, with the runs that had it.

        while_time: only runs that end before the time allowed does, by what the last one took, or hardly later.
        """
        waiting = list(kinds)
        while waiting and kept and not self.script.over:
            if while_time and time.time() + self.runs.last_s > self.budget.latest:
                return
            kind = waiting.pop(0)
            # Worded alike, whichever arm it is: how long the others take is told by those that are over.
            self.script.say(f"{what}: run {len(kinds) - len(waiting)} of {len(kinds)}")
            # A seed for each turn: the plain runs then span what chance does to the losses, where the same seed twice would
            # span nothing, and a training that rounding sends another way would look broken.
            turn = runs.begun[kind]
            runs.begun[kind] += 1
            found = self.runs.measure(spent.STACK, kept if kind == STACK else (), turn=turn)
            if found is None:
                if kind == STACK:
                    return
            elif kind == PLAIN:
                runs.plain.append(found)
            else:
                if self._drop_unapplied(found, kept):
                    waiting += [STACK] * len(runs.stack)
                    runs.stack.clear()
                runs.stack.append(found)

    def _seeded(
        self,
        phase: str,
        kept: Sequence[PlanItem],
        settled: Callable[[Sequence[Measurement]], bool],
        turns: Sequence[int] = TURNS,
    ) -> list[Measurement]:
        """Runs with these changes, with the seeds of the stack's own, until they have `settled` it; none where one failed."""
        found: list[Measurement] = []
        for turn in turns:
            run = self.runs.measure(phase, kept, turn=turn)
            if run is None:
                return []
            found.append(run)
            if settled(found):
                break
        return found

    def _without(
        self, rest: Sequence[PlanItem], proved: Proof, kept: Sequence[PlanItem], stays: Callable[[Interval], bool]
    ) -> list[Measurement]:
        """Runs with what is left of `kept`: a short one where that says already that more `stays`, else whole ones, whose losses can
        be held against the others'."""
        few = self.runs.measure(spent.LEFT_OUT, rest, turn=TURNS[0], steps=fresh.FEW_STEPS)
        if few is None or self.script.over:
            return []
        if self._is_needed(proved, kept, stays, [few]):
            return [few]
        return self._seeded(spent.LEFT_OUT, rest, partial(self._is_needed, proved, kept, stays))

    def _stays_alone(self, gain: Interval) -> bool:
        return gain.low >= self.min_gain

    def _stays_with_others(self, gain: Interval) -> bool:
        return gain.low >= 0.0 or 0.5 * (gain.low + gain.high) > LOOKS_FASTER * self.min_gain

    def _gains_nothing(self, proved: Proof, kept: Sequence[PlanItem], runs: Sequence[Measurement]) -> bool:
        """Whether these runs with the last of `kept` on top of the others already say that it is not to be kept.

        Not where it looks much slower, which is rather the machine's doing.
        """
        gain = self._on_top_gain(proved, kept, runs)
        nothing = gain is not None and gain.high < self.min_gain and 0.5 * (gain.low + gain.high) > -MUCH_SLOWER
        return kept[-1].transform in runs[-1].left_out or nothing

    def _may_gain_much(self, proved: Proof, kept: Sequence[PlanItem], runs: Sequence[Measurement]) -> bool:
        """Whether these runs with the last of `kept` on top of the others leave open whether it gains nothing or much."""
        gain = self._on_top_gain(proved, kept, runs)
        return gain is not None and gain.low <= self.min_gain and gain.high >= planner.LARGE_GAIN

    def _is_needed(
        self,
        proved: Proof,
        kept: Sequence[PlanItem],
        stays: Callable[[Interval], bool],
        runs: Sequence[Measurement],
    ) -> bool:
        """Whether these runs without one of `kept` already say that it stays."""
        gain = self._left_out_gain(proved, kept, runs)
        return bool(runs[-1].left_out) or (gain is not None and stays(gain))

    def _on_top_gain(self, proved: Proof, kept: Sequence[PlanItem], runs: Sequence[Measurement]) -> Interval | None:
        return proof.ratio(proved.stack, runs, flow=self._flow(kept), alike=True).saved("on top, fresh runs")

    def _left_out_gain(self, proved: Proof, kept: Sequence[PlanItem], runs: Sequence[Measurement]) -> Interval | None:
        return proof.ratio(runs, proved.stack, flow=self._flow(kept), alike=True).saved("left out, fresh runs")

    def _judge(
        self, plain: Sequence[Measurement], stack: Sequence[Measurement], kept: Sequence[PlanItem]
    ) -> StackVerdict:
        verdict = proof.judge(plain, stack, kept, flow=self._flow(kept))
        return verdict if stack else dataclasses.replace(verdict, detail=f"{verdict.detail}: {self.runs.why_none}")

    def _flow(self, kept: Sequence[PlanItem]) -> bool:
        return any(item.transform in planner.RESTARTED for item in kept)

    # -- what becomes of the items ----------------------------------------------------------------------------------

    def _on_top(
        self,
        candidate: Recommendation,
        runs: Sequence[Measurement],
        ratio: Ratio,
        numerics: Check,
        whole: StackVerdict,
    ) -> Verdict:
        """The verdict on a candidate that these runs had on top of the stack.

        Args:
            ratio, numerics: the stack's own runs against these.
            whole: the plain script's runs against these.
        """
        if not runs:
            return records.verdict_on(
                candidate, Status.FAILED, f"a fresh run with it gave no measurement: {self.runs.why_none}"
            )
        left_out = next((m.left_out[candidate.transform] for m in runs if candidate.transform in m.left_out), "")
        if left_out:
            return records.verdict_on(candidate, Status.NOT_APPLICABLE, left_out)
        gain = ratio.saved("on top, fresh runs")
        status, reason = Status.INCONCLUSIVE, "too few steps were timed in fresh runs"
        if gain is not None:
            told = f"{percent_text(gain.low)} to {percent_text(gain.high)} of the step saved on top of what is kept"
            if gain.low > self.min_gain:
                status, reason = Status.KEPT, told
            elif gain.high < self.min_gain:
                status, reason = Status.REVERTED, f"no gain above {percent_text(self.min_gain)}: {told}"
            else:
                reason = f"too noisy to confirm a gain of {percent_text(self.min_gain)}: {told}"
        if status == Status.KEPT and numerics.passed is False:
            status, reason = Status.REVERTED, f"it changes the training: {numerics.detail}"
        elif status == Status.KEPT and whole.passed is not True:
            status = Status.REVERTED if whole.passed is False else Status.INCONCLUSIVE
            reason = f"with it the plan does not hold: {whole.detail}"
        return records.verdict_on(
            candidate,
            status,
            reason,
            gain=gain,
            effect=Check(passed=True, detail="on in fresh runs"),
            numerics=numerics,
            timing=Check(passed=status == Status.KEPT, detail=reason),
            left_out_gain=gain if status == Status.KEPT else None,
            blocks=Blocks(
                off_us=ratio.slow_us,
                on_us=ratio.fast_us,
                steps_per_block=min(len(m.step_us) for m in runs),
            ),
        )

    def _cut_short(self) -> Proof:
        """What is kept until now is not proved."""
        detail = f"{self.script.why_over} before the kept changes were compared together"
        return Proof(verdict=StackVerdict(passed=None, detail=detail))

    def _unproved(self, kept: Sequence[PlanItem], why: str, verdict: StackVerdict | None = None) -> Proof:
        """Nothing stays kept that was not proved together with the rest; what that leaves open is unconfirmed."""
        for item in kept:
            self._revert(item, f"not confirmed in fresh runs: {why}", status=Status.UNCONFIRMED)
        return Proof(verdict=dataclasses.replace(verdict or StackVerdict(passed=None, detail=""), detail=why))

    def _drop_unapplied(self, found: Measurement, kept: list[PlanItem]) -> bool:
        """Take out of `kept` what this run could not apply; whether there was any."""
        dropped = [item for item in kept if item.transform in found.left_out]
        for item in dropped:
            kept.remove(item)
            reason = f"it could not be applied in a fresh run: {found.left_out[item.transform]}"
            self._revert(item, reason, status=Status.INCONCLUSIVE)
        return bool(dropped)

    def _revert(self, item: PlanItem, reason: str, status: Status = Status.REVERTED) -> None:
        records.revise_kept(self.script.run_dir, item.transform, status=status, reason=reason)


def _names(items: Sequence[PlanItem]) -> set[str]:
    return {item.transform for item in items}
