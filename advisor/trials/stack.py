"""The stack: all kept changes together, in fresh processes, against the plain script.

What does not hold there is not kept. `stack_parts` goes on with what is proved.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from advisor.core import transform_table
from advisor.core.plan import PlanItem
from advisor.core.verdict import StackVerdict, Status
from advisor.trials import proof, records, spent
from advisor.trials.budget import Budget
from advisor.trials.fresh import FreshRuns
from advisor.trials.proof import PLAIN, STACK, Proof, in_flow
from advisor.trials.records import Measurement
from advisor.trials.script import Script
from advisor.trials.whole import LEFT_OUT, kind_of

ROUNDS = 3  # while noise hides the answer and time is left


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
        return _Proving(self, kept, before).prove(quick=quick)

    def with_plain(self, proved: Proof) -> Proof:
        """The proof with a fresh plain run in the place of the steps that were timed while the script was profiled: what another loader
        changes is told by the flow of all steps, and those are few."""
        runs = _Runs(stack=list(proved.stack))
        if proved.plain != tuple(self.profiled()):
            return proved
        self.gather(runs, (PLAIN,), list(records.kept_items(self.script.run_dir)), "for what feeds the loop")
        return dataclasses.replace(proved, plain=tuple(runs.plain)) if runs.plain else proved

    def profiled(self) -> list[Measurement]:
        """The plain steps that were timed while the script was profiled, as a run; none where there were too few."""
        found = self.runs.profiled()
        return [] if found is None else [found]

    def confirm(self, proved: Proof) -> Proof:
        """A proof that rests on one run of each kind rests on two, where time is left for them, whatever they say; on more where noise hides
        it by then: the plain steps of a loop that the host bounds are a third apart from process to process.
        """
        runs_s = 2 * self.runs.last_s
        if not proved.holds or len(proved.plain) > 1 or self.script.over or time.time() + runs_s > self.budget.until:
            return proved
        kept = list(records.kept_items(self.script.run_dir))
        if _names(kept) != set(proved.items):
            return proved
        begun = Counter({PLAIN: len(proved.plain), STACK: len(proved.stack)})
        runs = _Runs(plain=list(proved.plain), stack=list(proved.stack), begun=begun)
        self.gather(runs, (STACK, PLAIN), kept, "more fresh runs, for a narrower interval")
        if self.script.over or not kept or len(runs.plain) < len(proved.plain) + 1 or not runs.stack:
            return proved
        verdict = self.judge(runs.plain, runs.stack, kept)
        for _ in range(ROUNDS):
            if verdict.passed is not None or time.time() + runs_s > self.budget.latest:
                break
            self.script.say(f"{verdict.detail}; more runs")
            self.gather(runs, (PLAIN, STACK), kept, "more fresh runs", while_time=True)
            if self.script.over or not (kept and runs.stack):
                return proved
            verdict = self.judge(runs.plain, runs.stack, kept)
        if not verdict.passed:
            why = f"more fresh runs took the proof back: {verdict.detail}"
            self.script.say(why)
            if proof.leaves_open(verdict, self.min_gain):
                verdict = dataclasses.replace(verdict, passed=None)
            return self.unproved(kept, why, verdict)
        return Proof.of(verdict, runs.plain, runs.stack, kept)

    # -- fresh runs -------------------------------------------------------------------------------------------------

    def gather(
        self, runs: _Runs, kinds: Sequence[str], kept: list[PlanItem], what: str, *, while_time: bool = False
    ) -> None:
        """Add runs of these kinds, in this order; what they cannot apply leaves `kept`, with the runs that had it.

        while_time: only runs that end before the time allowed does, by what the last one took, or hardly later.
        """
        waiting = list(kinds)
        while waiting and kept and not self.script.over:
            if while_time and time.time() + self.runs.last_s > self.budget.latest:
                return
            if time.time() >= self.runs.last_call():
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

    def judge(
        self, plain: Sequence[Measurement], stack: Sequence[Measurement], kept: Sequence[PlanItem]
    ) -> StackVerdict:
        """`proof.judge`, with the reason where there is no run."""
        verdict = proof.judge(plain, stack, kept, flow=in_flow(kept))
        return verdict if stack else dataclasses.replace(verdict, detail=f"{verdict.detail}: {self.runs.why_none}")

    # -- what becomes of the items ----------------------------------------------------------------------------------

    def unproved(self, kept: Sequence[PlanItem], why: str, verdict: StackVerdict | None = None) -> Proof:
        """Nothing stays kept that was not proved together with the rest; what that leaves open is unconfirmed."""
        for item in kept:
            self.revert(item, f"not confirmed in fresh runs: {why}", status=Status.UNCONFIRMED)
        return Proof(verdict=dataclasses.replace(verdict or StackVerdict(passed=None, detail=""), detail=why))

    def _drop_unapplied(self, found: Measurement, kept: list[PlanItem]) -> bool:
        """Take out of `kept` what this run could not apply; whether there was any."""
        dropped = [item for item in kept if item.transform in found.left_out]
        for item in dropped:
            kept.remove(item)
            reason = f"it could not be applied in a fresh run: {found.left_out[item.transform]}"
            self.revert(item, reason, status=Status.INCONCLUSIVE)
        return bool(dropped)

    def revert(self, item: PlanItem, reason: str, status: Status = Status.REVERTED) -> None:
        records.revise_kept(self.script.run_dir, item.transform, status=status, reason=reason)


@dataclass(slots=True, eq=False)
class _Proving:
    """One proof on its way. Each step returns the proof that ends it, or None: go on."""

    trial: StackTrial
    kept: list[PlanItem]
    before: Proof | None
    runs: _Runs = field(init=False)
    verdict: StackVerdict = field(init=False)

    def __post_init__(self) -> None:
        plain = list(self.before.plain) if self.before is not None else []
        self.runs = _Runs(plain=plain, begun=Counter({PLAIN: len(plain)}))
        late = "no time was left to compare the kept changes together"
        self.verdict = StackVerdict(passed=None, detail=late)

    def prove(self, *, quick: bool) -> Proof | None:
        """As `StackTrial.prove` has it."""
        for number in range(1, ROUNDS + 1):
            if number > 1:
                # The first round has no deadline: without it nothing is proved.
                if self.verdict.passed is not None or time.time() > self.trial.budget.until:
                    break
                self.trial.script.say(f"{self.verdict.detail}; more runs")
            kinds: tuple[str, ...] = (STACK, STACK) if self.before is not None and number == 1 else proof.ROUND
            what = f"comparing in fresh runs, round {number}"
            if quick and number == 1 and self.before is None:
                if self._clear_at_once(kinds[:2], what):
                    break
                kinds = kinds[2:]
            if (ended := self._round(kinds, what, first=number == 1)) is not None:
                return ended
        if self.verdict.passed is None:
            return self._give_up(self.verdict)
        while self.verdict.passed is not True:
            if (ended := self._with_less()) is not None:
                return ended
        return Proof.of(self.verdict, self.runs.plain, self.runs.stack, self.kept)

    def _clear_at_once(self, kinds: Sequence[str], what: str) -> bool:
        """Whether one run of each kind is enough; what was timed while the script was profiled is the plain one, if there is that."""
        profiled, runs, script = self.trial.profiled(), self.runs, self.trial.script
        runs.plain += profiled
        runs.begun[PLAIN] += len(profiled)
        self._gather(kinds[len(profiled) :], what)
        if not (runs.plain and runs.stack and self.kept) or script.over:
            return False
        self._judge()
        if proof.clear(self.verdict):
            return True
        script.say(f"{self.verdict.detail}; more runs" if self.verdict.passed is None else "more runs, to be sure")
        return False

    def _round(self, kinds: Sequence[str], what: str, *, first: bool) -> Proof | None:
        runs, trial = self.runs, self.trial
        self._gather(kinds, what, while_time=bool(runs.plain and runs.stack))
        if trial.script.over:
            return self._cut_short()
        if not self.kept:
            return Proof(verdict=StackVerdict(passed=None, detail="no kept change could be applied in a fresh run"))
        if not runs.plain:
            why = f"the plain script gave no measurement in a fresh run: {trial.runs.why_none}"
            return trial.unproved(self.kept, why)
        if not runs.stack and time.time() >= trial.runs.last_call():
            return trial.unproved(
                self.kept, f"the plan gave no measurement: {trial.runs.why_none or 'no time was left'}"
            )
        self._judge()
        if self.verdict.passed is False and first and proof.apart(runs.plain, runs.stack, self.kept):
            # Two plain runs say little of how far chance takes a training whose losses still swing.
            why = "the losses differ; measuring how much the plain script's losses vary"
            self._gather((PLAIN, PLAIN), why, while_time=True)
            if trial.script.over:
                return self._cut_short()
            self._judge()
        return None

    def _with_less(self) -> Proof | None:
        """Drop what is least trusted of what does not hold together, and judge the rest."""
        if self.trial.budget.overrun and len(self.kept) > 1:
            why = f"no time was left to find out which change is to blame: {self.verdict.detail}"
            return self._give_up(dataclasses.replace(self.verdict, passed=None, detail=why))
        dropped = self._least_trusted()
        self.kept = [item for item in self.kept if item not in dropped]
        hidden = proof.leaves_open(self.verdict, self.trial.min_gain)
        why = "noise hides what it does" if hidden else "together with the other changes it did not hold"
        status = Status.INCONCLUSIVE if hidden else Status.REVERTED
        for item in dropped:
            self.trial.revert(item, f"{why} in fresh runs: {self.verdict.detail}", status=status)
        if self.before is not None and _names(self.kept) == set(self.before.items):
            return self.before
        if self.kept:
            self.runs = _Runs(plain=self.runs.plain)
            without = ", ".join(transform_table.title(item.transform) for item in dropped)
            self._gather((STACK, STACK), f"without {without}", while_time=True)
            if self.trial.script.over:
                return self._cut_short()
            if not self.runs.stack:
                return self._give_up(
                    StackVerdict(passed=None, detail=f"no time was left to measure the plan without {without}")
                )
        if not self.kept:
            open_yet = dataclasses.replace(self.verdict, passed=None) if hidden else self.verdict
            return self.trial.unproved(self.kept, f"nothing is kept: {self.verdict.detail}", open_yet)
        self._judge()
        return None

    def _least_trusted(self) -> list[PlanItem]:
        """The latest change, or of those that were tried as one, a class."""
        verdicts = records.verdicts(self.trial.script.run_dir)
        as_one = {v.transform for v in verdicts if v.status == Status.KEPT and v.together}
        alone = [item for item in self.kept if item.transform not in as_one]
        classes = [kind for kind in LEFT_OUT if any(kind_of(item.transform) == kind for item in self.kept)]
        if alone or not classes:
            return [(alone or self.kept)[-1]]
        return [item for item in self.kept if kind_of(item.transform) == classes[0]]

    def _gather(self, kinds: Sequence[str], what: str, *, while_time: bool = False) -> None:
        self.trial.gather(self.runs, kinds, self.kept, what, while_time=while_time)

    def _judge(self) -> None:
        self.verdict = self.trial.judge(self.runs.plain, self.runs.stack, self.kept)

    def _give_up(self, verdict: StackVerdict) -> Proof:
        """What was proved before stays; what came since is not confirmed."""
        if self.before is None:
            return self.trial.unproved(self.kept, verdict.detail, verdict)
        why = f"not confirmed on top of what is proved: {verdict.detail}"
        for item in self.kept:
            if item.transform not in self.before.items:
                self.trial.revert(item, why, status=Status.UNCONFIRMED)
        return self.before

    def _cut_short(self) -> Proof:
        """What was proved before is; what is kept until now is not."""
        detail = f"{self.trial.script.why_over} before the kept changes were compared together"
        return self.before or Proof(verdict=StackVerdict(passed=None, detail=detail))


def _names(items: Sequence[PlanItem]) -> set[str]:
    return {item.transform for item in items}
