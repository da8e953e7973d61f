"""A proved stack gets better: with what was left for last on top of it, and without what it is as fast without.

The first comes before the second where it takes little of the time left, since it may gain where the other explains; else behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from advisor.core import transform_table
from advisor.core.findings import Interval, Recommendation
from advisor.core.plan import PlanItem
from advisor.core.units import percent_text
from advisor.core.verdict import Blocks, Check, StackVerdict, Status, Verdict
from advisor.trials import fresh, losses, planner, proof, records, spent
from advisor.trials.proof import Proof, Ratio, in_flow
from advisor.trials.records import Measurement
from advisor.trials.stack import StackTrial

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


@dataclass(frozen=True, slots=True)
class StackParts:
    """Each method takes a proof and returns the one that holds after it; verdicts on disk say what became of each item."""

    trial: StackTrial

    def add_on_top(self, proved: Proof, candidates: Sequence[Recommendation], *, share: float = 1.0) -> Proof:
        """Try what waits for the stack on top of it: runs with it beside the stack's own, with the same seeds.

        Kept where they are certainly faster by `min_gain` and train as the plain script does; then they are the stack's runs.

        Args:
            share: of the time left; what would take more is passed over.
        """
        script = self.trial.script
        for candidate in records.untried(script.run_dir, candidates):
            if script.over or not proved.holds:
                break
            kept, title = records.kept_items(script.run_dir), transform_table.title(candidate.transform)
            if not self.trial.budget.allows_on_top(
                candidate.transform, len(TURNS), self.trial.runs.last_s, share=share
            ):
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
                and self.trial.budget.allows_on_top(
                    candidate.transform, len(MORE_TURNS), self.trial.runs.last_s, share=share
                )
            ):
                script.say(f"too noisy to tell what {title} gains; two more runs")
                runs += self._seeded(spent.ON_TOP, (*kept, item), settled, MORE_TURNS)
            if script.over:
                break
            whole = self.trial.judge(proved.plain, runs, (*kept, item))
            ratio = proof.ratio(proved.stack, runs, flow=in_flow((*kept, item)), alike=True)
            numerics = losses.compare([m.losses for m in proved.stack], [m.losses for m in runs], precision=False)
            verdict = self._on_top(candidate, runs, ratio, numerics, whole)
            records.save_verdict(script.run_dir, verdict)
            script.say(f"{title}: {verdict.status}, {verdict.reason}")
            if verdict.status == Status.KEPT:
                proved = Proof.of(whole, proved.plain, runs, (*kept, item))
        return proved

    def leave_one_out(self, proved: Proof) -> Proof:
        """Run the proved stack without each of its items in turn, the least of them first, while time is left.

        An item without which the stack is certainly no slower by `min_gain` is dropped, if the rest is proved as well. Of what was
        kept with others, whose gain together was above that, each needs only to be certainly faster than nothing, or to look faster by
        a quarter of that: several that save half of it each save it together.
        """
        script = self.trial.script
        kept = list(records.kept_items(script.run_dir))
        if not proved.holds or script.over:
            return proved
        until = self.trial.budget.left_out_until()
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
            if time.time() + self.trial.runs.last_s > until:
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
            if gain.high >= self.trial.min_gain or stays(gain):
                continue
            whole = self.trial.judge(proved.plain, runs, rest)
            if whole.passed is True:
                self.trial.revert(item, "the plan is as fast without it")
                script.say(f"{title}: removed, the plan is as fast without it")
                kept, proved = rest, Proof.of(whole, proved.plain, runs, rest)
        if unasked:
            script.notes.append(f"no time was left to run the plan without {', '.join(unasked)}")
        return proved

    # -- fresh runs -------------------------------------------------------------------------------------------------

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
            run = self.trial.runs.measure(phase, kept, turn=turn)
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
        few = self.trial.runs.measure(spent.LEFT_OUT, rest, turn=TURNS[0], steps=fresh.FEW_STEPS)
        if few is None or self.trial.script.over:
            return []
        if self._is_needed(proved, kept, stays, [few]):
            return [few]
        return self._seeded(spent.LEFT_OUT, rest, partial(self._is_needed, proved, kept, stays))

    def _stays_alone(self, gain: Interval) -> bool:
        return gain.low >= self.trial.min_gain

    def _stays_with_others(self, gain: Interval) -> bool:
        return gain.low >= 0.0 or 0.5 * (gain.low + gain.high) > LOOKS_FASTER * self.trial.min_gain

    def _gains_nothing(self, proved: Proof, kept: Sequence[PlanItem], runs: Sequence[Measurement]) -> bool:
        """Whether these runs with the last of `kept` on top of the others already say that it is not to be kept.

        Not where it looks much slower, which is rather the machine's doing.
        """
        gain = self._on_top_gain(proved, kept, runs)
        nothing = gain is not None and gain.high < self.trial.min_gain and 0.5 * (gain.low + gain.high) > -MUCH_SLOWER
        return kept[-1].transform in runs[-1].left_out or nothing

    def _may_gain_much(self, proved: Proof, kept: Sequence[PlanItem], runs: Sequence[Measurement]) -> bool:
        """Whether these runs with the last of `kept` on top of the others leave open whether it gains nothing or much."""
        gain = self._on_top_gain(proved, kept, runs)
        return gain is not None and gain.low <= self.trial.min_gain and gain.high >= planner.LARGE_GAIN

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
        return proof.ratio(proved.stack, runs, flow=in_flow(kept), alike=True).saved("on top, fresh runs")

    def _left_out_gain(self, proved: Proof, kept: Sequence[PlanItem], runs: Sequence[Measurement]) -> Interval | None:
        return proof.ratio(runs, proved.stack, flow=in_flow(kept), alike=True).saved("left out, fresh runs")

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
                candidate, Status.FAILED, f"a fresh run with it gave no measurement: {self.trial.runs.why_none}"
            )
        left_out = next((m.left_out[candidate.transform] for m in runs if candidate.transform in m.left_out), "")
        if left_out:
            return records.verdict_on(candidate, Status.NOT_APPLICABLE, left_out)
        gain = ratio.saved("on top, fresh runs")
        status, reason = Status.INCONCLUSIVE, "too few steps were timed in fresh runs"
        if gain is not None:
            told = f"{percent_text(gain.low)} to {percent_text(gain.high)} of the step saved on top of what is kept"
            if gain.low > self.trial.min_gain:
                status, reason = Status.KEPT, told
            elif gain.high < self.trial.min_gain:
                status, reason = Status.REVERTED, f"no gain above {percent_text(self.trial.min_gain)}: {told}"
            else:
                reason = f"too noisy to confirm a gain of {percent_text(self.trial.min_gain)}: {told}"
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
