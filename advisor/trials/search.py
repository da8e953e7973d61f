"""The supervisor's side of `apply` and `run`: starts the script as often as the proof needs, and writes what came of it.

Live candidates are tried inside search processes; one that ends too early or crashes is started again with what is left.
What only a fresh process can show is tried in pairs of fresh processes. At the end the kept changes together run against
the plain script, twice each, in fresh processes, each pair with a seed of its own; what does not hold there is not kept.
Then, while time is left, the stack runs without each of its items: one that it is as fast without is dropped.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.findings import Interval, Recommendation, Semantics
from advisor.core.plan import Plan, PlanHashes, PlanItem
from advisor.core.profile import StepProfile
from advisor.core.units import percent_text
from advisor.core.verdict import Blocks, Check, Round, StackVerdict, TrialLog, Verdict
from advisor.ops import catalog
from advisor.profiling import environment, launcher
from advisor.profiling.assemble import assemble
from advisor.profiling.launcher import Exit, ScriptCommand
from advisor.profiling.session import Session
from advisor.trials import files, losses, planfile, planner, records, rounds, spent
from advisor.trials.statistics import (
    INCONCLUSIVE,
    KEPT,
    MORE,
    PROCESS_STAGES,
    REVERTED,
    bursty,
    decide,
    median,
    process_speedup,
)

Say = Callable[[str], None]
Launch = Callable[..., Exit]
Recommend = Callable[[StepProfile, Path], Sequence[Recommendation]]

TRIALS_FILE, PLAN_FILE, OUTPUT_FILE = "trials.json", "plan.yaml", "script-output.log"
KEPT_ITEMS, ROUND_DIR = "kept", "round"

# Steps before the first candidate: discovery looks for three, libraries set themselves up in the first.
WARMUP_STEPS = 5
# A fresh process is timed after this many steps (changes that wait for the optimizer's state settle within six) ...
ARM_WARMUP, ARM_STEPS = 12, 30
# ... which bounds one arm on a fast GPU at its start-up, and at 40 steps of 120 ms for a ResNet-50 in fp32.
SEED = 20_240_229
# Of the time allowed this share is kept for the comparison of the stack, which alone decides what the plan says.
STACK_SHARE, STACK_LEAST_S, STACK_MOST_SHARE = 0.25, 20.0, 0.5
# And no more than this one for the stack without each of its items: it explains what is proved already. With rounds more
# is kept, and each item costs two fresh runs of 8 s on an H200: a fifth would take `apply` on a ResNet-50 past four minutes.
LEFT_OUT_SHARE = 0.1
# Starting Python, torch and the script's data, before an arm's first step: 4 to 6 s for the examples on a CPU and an H200; 12 to
# 16 s where the kept changes are captured and other work runs on the machine, so what starts have taken counts where it is more.
ARM_START_S = 5.0
# A trial may take this share of the whole, and 120 s where there is less: torch.compile's first step takes 46 to 82 s for
# ResNet-50 class models on an H200. But never more than there is before the stack's turn.
TRIAL_SHARE, TRIAL_LEAST_S = 0.2, 120.0
# First steps that were measured above what a trial is given by default: not worth killing a process to find out again.
LONG_FIRST_STEP_S = {"compile_max_autotune": 240.0}
# Search processes that end without any progress (no verdict, no new pair of blocks) before a candidate is given up.
IDLE_LAUNCHES = 3  # the blocks are halved twice until then
# Crashes in a row, each with another candidate on, before the script itself is blamed.
CRASHES = 4
# What a profiler that goes wrong in native code ends a process with.
TRACER_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
# A process that trains on after all its limits is ended.
LAUNCH_GRACE_S = 60.0
ARM_TIMEOUT_S = 300.0
STACK_RUNS = ("plain", "stack", "stack", "plain")
STACK_TURNS = (0, 1)  # seeds of the runs without an item, or with one more: those of the stack's own
STACK_ROUNDS = 3  # while noise hides the answer and time is left


@dataclass(slots=True, eq=False)
class _Search:
    command: ScriptCommand
    run_dir: Path
    launch: Launch
    say: Say
    min_gain: float
    max_pairs: int
    trial_timeout_s: float
    max_time_s: float
    stack_deadline: float  # time.time() at which no further round of the stack begins
    step_s: float | None  # of the plain script
    candidates: Sequence[Recommendation] = ()
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False
    script_failed: bool = False
    model_hash: str = ""
    restarted: set[str] = field(default_factory=set)  # candidates that only fresh processes can try
    on_top: list[Recommendation] = field(default_factory=list)  # and those among them whose turn comes last
    fault: str = ""  # of advisor's own, in the latest child
    late: bool = False
    ended_early: int = 0  # search processes whose script came to its own end
    known: tuple[Recommendation, ...] = ()  # candidates of all rounds so far, in the order of trial
    history: list[Round] = field(default_factory=list)
    seconds: Counter[str] = field(default_factory=Counter)  # by phase of trials/spent.py
    _crashes: int = 0
    _starts_s: list[float] = field(default_factory=list)  # what search processes took until their first trial
    _arm_s: float = 0.0  # what the latest arm took
    _fresh: dict[str, list[records.Measurement]] = field(default_factory=dict)  # runs of the stack's comparison

    @property
    def deadline(self) -> float:
        """`time.time()` at which no new candidate begins: then it is the turn of the stack's comparison."""
        start_s = max(ARM_START_S, fmean(self._starts_s) if self._starts_s else 0.0)
        return self.stack_deadline - min(self.max_time_s, _stack_reserve_s(self.step_s, self.max_time_s, start_s))

    # -- live -------------------------------------------------------------------------------------------------------

    def live(self, candidates: Sequence[Recommendation]) -> None:
        """Try all candidates; afterwards each has a verdict on disk, or there is no more time, or the script fails."""
        idle = 0
        while not (self.interrupted or self.script_failed or self.late):
            left = [c for c in self.left(candidates) if c not in self.on_top]
            if not left:
                return
            if time.time() >= self.deadline:
                self.late = True
                self._look_last()
                return
            before, verdicts_before = self._progress(), len(records.verdicts(self.run_dir))
            (self.run_dir / records.SEARCH_FILE).unlink(missing_ok=True)
            (self.run_dir / records.TRIALS_DIR / records.FAULT_FILE).unlink(missing_ok=True)
            ended = self._run(
                "search",
                candidates=tuple(left),
                kept=self.kept_items(),
                min_gain=self.min_gain,
                max_pairs=self.max_pairs,
                trial_timeout_s=self.trial_timeout_s,
                deadline_unix_s=self.deadline,
                timeout_s=max(30.0, self.deadline - time.time()) + self.trial_timeout_s + LAUNCH_GRACE_S,
            )
            record = self._search_record()
            if record is not None:
                self.model_hash = record.model_hash or self.model_hash
                self.notes += [note for note in record.notes if note not in self.notes]
                self.late = self.late or record.out_of_time
                self.on_top += [c for c in left if c.transform in record.on_top]
                if record.restart:
                    self.restarted.add(record.restart)
                    records.clear_current(self.run_dir)
                    self.fresh(next(c for c in left if c.transform == record.restart))
                    idle = 0
                    continue
            if self.interrupted:
                return
            if self.fault:
                current = records.load_current(self.run_dir) or _in_trial(left[0])
                self._conclude_current(current, "failed", f"advisor switched itself off: {self.fault}")
                self.fault = ""
                continue
            if not ended.stopped_by_advisor and (ended.code != 0 or ended.timed_out):
                self._crashed(ended, verdicts_before)
                continue
            self.ended_early += not ended.stopped_by_advisor
            idle = 0 if self._progress() != before else idle + 1
            if idle >= IDLE_LAUNCHES:
                self._give_up(left)
                idle = 0

    def _crashed(self, ended: Exit, verdicts_before: int) -> None:
        current, status = records.load_current(self.run_dir), "failed"
        if current is None:
            self.script_failed = True
            self.notes.append(f"the script ended with exit code {ended.code} in the search; see {OUTPUT_FILE}")
            return
        if ended.signal == getattr(signal, "SIGALRM", None) or ended.timed_out:
            reason = f"its {current.phase} did not end within {current.limit_s:.0f} s"
            if time.time() >= self.deadline:
                status, reason = INCONCLUSIVE, f"out of time in its {current.phase}; give it more with --max-time"
        elif ended.signal == signal.SIGKILL:
            reason = f"the process was killed in its {current.phase}; the machine may have run out of memory"
        elif ended.signal:
            where = records.native_fault(self.run_dir)
            reason = f"the process died of signal {ended.signal} in its {current.phase}" + (
                f" ({where})" if where else ""
            )
        else:
            last = last_line(self.run_dir / OUTPUT_FILE)
            reason = f"the script failed in its {current.phase}" + (f": {last}" if last else "")
        self._crashes = self._crashes + 1 if len(records.verdicts(self.run_dir)) == verdicts_before else 1
        if self._crashes < CRASHES and current.phase == "effect" and current.traced and ended.signal in TRACER_FAULTS:
            # As likely the tracer's fault as the candidate's. Once more, without.
            records.save_current(self.run_dir, dataclasses.replace(current, traced=False))
            where = records.native_fault(self.run_dir)
            self.notes.append(
                f"the process died of signal {ended.signal} while the effect of {planner.title(current.transform)} was traced"
                f"{f' ({where})' if where else ''}; its effect was judged without a trace"
            )
            return
        if self._crashes >= CRASHES:
            # One candidate after the other "fails" without any of them coming to a verdict: it is the script.
            self.script_failed = True
            self.notes.append(f"the search ended: the script failed {CRASHES} times in a row; see {OUTPUT_FILE}")
        self._conclude_current(current, status, reason)

    def _look_last(self) -> None:
        """A trial that the script's end had cut short, and time now ends: what its pairs say is its verdict."""
        current = records.load_current(self.run_dir)
        if current is None or not current.off_us:
            return
        pairs = list(zip(current.off_us, current.on_us, strict=False))
        last = decide(pairs, self.min_gain, max_pairs=self.max_pairs, last=True)
        status = REVERTED if last.status == REVERTED else INCONCLUSIVE
        self._conclude_current(current, status, f"out of time: {last.reason}", last.gain)

    def _give_up(self, left: Sequence[Recommendation]) -> None:
        current = records.load_current(self.run_dir) or _in_trial(left[0])
        self._conclude_current(
            current, INCONCLUSIVE, "the script ends before a trial fits into it; let it run for more steps"
        )

    def _conclude_current(
        self, current: records.InTrial, status: str, reason: str, gain: Interval | None = None
    ) -> None:
        candidate = next(
            (
                c
                for c in self.candidates
                if (c.transform, dict(c.parameters)) == (current.transform, current.parameters)
            ),
            Recommendation(transform=current.transform, parameters=current.parameters),
        )
        verdict = Verdict(
            transform=candidate.transform,
            status=status,
            reason=reason,
            parameters=dict(candidate.parameters),
            title=planner.title(candidate.transform),
            round=candidate.round,
            semantics=candidate.semantics,
            predicted=candidate.predicted,
            gain=gain,
            numerics=current.numerics,
            effect=current.effect,
            first_step_us=current.first_step_us,
            blocks=Blocks(off_us=current.off_us, on_us=current.on_us, steps_per_block=current.steps_per_block),
        )
        records.save_verdict(self.run_dir, verdict)
        records.clear_current(self.run_dir)
        self.say(f"{verdict.title}: {status}, {reason}")

    def left(self, candidates: Sequence[Recommendation]) -> list[Recommendation]:
        """Candidates without a verdict."""
        done = {records.attempt(v) for v in records.verdicts(self.run_dir)}
        return [c for c in candidates if records.attempt(c) not in done]

    def kept_items(self, names: Sequence[str] | None = None) -> tuple[PlanItem, ...]:
        """Kept so far, in the order of trial."""
        return tuple(
            PlanItem(
                transform=v.transform, status=KEPT_ITEMS, parameters=dict(v.parameters), semantics=v.semantics.value
            )
            for v in records.verdicts(self.run_dir)
            if v.status == KEPT and (names is None or v.transform in names)
        )

    def _progress(self) -> tuple[object, ...]:
        current = records.load_current(self.run_dir)
        pairs = (current.transform, len(current.off_us)) if current is not None else ()
        return len(records.verdicts(self.run_dir)), pairs

    def _search_record(self) -> records.SearchRecord | None:
        try:
            return storage.load(self.run_dir / records.SEARCH_FILE, records.SearchRecord)
        except AdvisorError:
            return None

    # -- rounds -----------------------------------------------------------------------------------------------------

    def all_rounds(
        self,
        first: Sequence[Recommendation],
        profile: StepProfile | None,
        choose: Callable[[Sequence[Recommendation]], list[Recommendation]],
        recommend: Recommend | None,
    ) -> None:
        """Try the candidates, then what the step with the kept changes asks for, while that keeps something and time is left.

        `known` and `history` hold all candidates and the rounds made; interrupted, what there is of both.
        """
        number, step_us, folder = 1, _step_us(profile), ""
        found = tuple(c for c in first if c.transform not in planner.DEAR)
        waiting = tuple(c for c in first if c.transform in planner.DEAR)
        self.known += tuple(first)
        on: tuple[PlanItem, ...] = ()
        while True:
            self.history.append(Round(number=number, step_us=step_us, kept=_names(on), folder=folder))
            self._take_turns(choose(found))
            if waiting and not self._ended() and not self._step_has_changed(number, on):
                # It is what it was, and so are the predictions of what waits.
                self._take_turns(choose(waiting))
                waiting = ()
            if self._ended() or number == rounds.MOST or not self._step_has_changed(number, on):
                return
            number, on = number + 1, self.kept_items()
            if self.deadline - time.time() < rounds.LEAST_S + (rounds.WARMUP + rounds.STEPS) * step_us / 1e6:
                self.notes.append(f"no time was left for round {number}: the script with what is kept, profiled anew")
                return
            again, folder = None, f"{ROUND_DIR}-{number}"
            asked: Sequence[Recommendation] = ()
            if recommend is not None and profile is not None:
                again = self.profile(on, profile.environment, self.run_dir / folder, number)
                if self.interrupted:
                    return
                if again is not None:
                    asked = recommend(again, self.run_dir / folder)
            if again is None:
                folder = ""
            step_us = _step_us(again)
            found = rounds.candidates(
                number, records.verdicts(self.run_dir), self.known, asked, again, self.min_gain, waiting
            )
            chosen = {planner.identity(c) for c in found}
            for candidate in waiting:
                if planner.identity(candidate) not in chosen:
                    reason = "predicted to gain nothing worth its first step beside what is kept"
                    records.save_verdict(self.run_dir, _skipped(candidate, reason))
            self.known = (*(c for c in self.known if c not in waiting), *found)
            waiting = ()
            if not found:
                return

    def _take_turns(self, chosen: Sequence[Recommendation]) -> None:
        """Try these in the running round."""
        self.candidates = chosen
        tried = (*self.history[-1].tried, *_names(chosen))
        self.history[-1] = dataclasses.replace(self.history[-1], tried=tried)
        if chosen:
            self.live(chosen)

    def _ended(self) -> bool:
        return self.interrupted or self.script_failed or self.late

    def _step_has_changed(self, number: int, on: Sequence[PlanItem]) -> bool:
        """Whether round `number`, begun with `on`, has kept what another round may build on."""
        if set(_names(self.kept_items())) <= set(_names(on)):
            return False
        verdicts = records.verdicts(self.run_dir)
        return rounds.moved(verdicts, number) or bool(planner.second_look(verdicts, self.known))

    def profile(
        self, kept: tuple[PlanItem, ...], machine: Environment, folder: Path, number: int
    ) -> StepProfile | None:
        """A short profile of the script with these changes on, in a fresh process; None, with a note, when there is none."""
        self.say(
            f"round {number}: profiling the script with what is kept ({', '.join(map(planner.title, _names(kept)))})"
        )
        reason, ended = "", None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            ended = self._run(
                "profile",
                phase=spent.ROUNDS,
                run_dir=str(folder),
                files_dir=str(self.run_dir),
                kept=kept,
                warmup=rounds.WARMUP,
                steps=rounds.STEPS,
                detail_steps=rounds.TRACED,
                counters=False,
                deadline_unix_s=self.deadline,
                timeout_s=min(self.trial_timeout_s, rounds.PROFILE_TIMEOUT_S) + LAUNCH_GRACE_S,
            )
            if ended.code != 0 or ended.timed_out:
                reason = "it took too long" if ended.timed_out else f"the script ended with exit code {ended.code}"
            found = assemble(folder, machine, exit_code=ended.code)
        except (AdvisorError, OSError) as error:
            reason, found = reason or str(error), None
        fault, self.fault = self.fault, ""
        if self.interrupted:
            return None
        eager = tuple(item for item in kept if item.transform != "cuda_graphs")
        if ended is not None and ended.signal in TRACER_FAULTS and len(eager) < len(kept):
            # The tracer has been seen to die beside captured graphs; replays are paused in the traced window anyway.
            self.notes.append(
                f"round {number}: the process died of signal {ended.signal}; profiled without CUDA graphs"
            )
            return self.profile(eager, machine, folder, number)
        if found is None or (found.step_us is None and found.wall_us is None) or not found.kernels or reason or fault:
            told = fault or reason or "too little was measured"
            self.notes.append(f"round {number}: the script with what is kept could not be profiled: {told}")
            self.say(self.notes[-1])
            return None
        return found

    # -- fresh processes --------------------------------------------------------------------------------------------

    def arm(self, phase: str, kept: tuple[PlanItem, ...], turn: int = 0) -> records.Measurement | None:
        """One fresh process with these changes, seeded by its turn; None when it gave no measurement."""
        path = self.run_dir / records.MEASURE_FILE
        path.unlink(missing_ok=True)
        began = time.time()
        ended = self._run(
            "measure",
            phase=phase,
            kept=kept,
            warmup=ARM_WARMUP,
            steps=ARM_STEPS,
            seed=SEED + turn,
            timeout_s=max(ARM_TIMEOUT_S, self.trial_timeout_s + LAUNCH_GRACE_S),
        )
        self._arm_s = time.time() - began
        if ended.code != 0 or ended.timed_out:
            return None
        try:
            found = storage.load(path, records.Measurement)
        except AdvisorError:
            return None
        return found if found.step_us else None

    def fresh(self, candidate: Recommendation) -> None:
        """Try a candidate that must be on from the start, in ABBA pairs of fresh processes."""
        name = planner.title(candidate.transform)
        kept = self.kept_items()
        item = PlanItem(transform=candidate.transform, status=KEPT_ITEMS, parameters=dict(candidate.parameters))
        pairs: list[tuple[float, float]] = []
        off_runs: list[records.Measurement] = []
        on_runs: list[records.Measurement] = []
        status, reason, gain = INCONCLUSIVE, "no time was left for it", None
        numerics: Check | None = None
        while not self.interrupted:
            if time.time() >= self.deadline:
                break
            arms = {}
            for on in (False, True) if len(pairs) % 2 == 0 else (True, False):
                self.say(f"{name}: fresh runs, pair {len(pairs) + 1}, {'with' if on else 'without'} it")
                arms[on] = self.arm(spent.PAIRS, (*kept, item) if on else kept)
                if arms[on] is None:
                    break
            off, on_arm = arms.get(False), arms.get(True)
            if off is None or on_arm is None:
                if self.interrupted:
                    return
                status, reason = (
                    "failed",
                    "a fresh run with it gave no measurement" if off is not None else "fresh runs gave no measurement",
                )
                break
            if candidate.transform not in on_arm.applied:
                status, reason = "not applicable", on_arm.left_out.get(candidate.transform, "it was not applied")
                break
            off_runs.append(off)
            on_runs.append(on_arm)
            # Epoch starts count here: they are what worker processes make longer or shorter.
            pairs.append((_mean(off.every_us), _mean(on_arm.every_us)))
            if len(pairs) == 2 and all(b >= a for a, b in pairs):
                status, reason = REVERTED, "no faster in either of two pairs of fresh runs"
                break
            decision = decide(
                pairs, self.min_gain, max_pairs=min(self.max_pairs, PROCESS_STAGES[-1]), stages=PROCESS_STAGES
            )
            if decision.status != MORE:
                status, reason, gain = decision.status, decision.reason, decision.gain
                break
        if status == KEPT:
            numerics = losses.compare(
                [r.losses for r in off_runs],
                [r.losses for r in on_runs],
                precision=candidate.semantics is Semantics.PRECISION,
            )
            if numerics.passed is not True:
                status, reason = (
                    (REVERTED, f"it changes the training: {numerics.detail}")
                    if numerics.passed is False
                    else (INCONCLUSIVE, f"its losses could not be compared: {numerics.detail}")
                )
        records.save_verdict(
            self.run_dir,
            Verdict(
                transform=candidate.transform,
                status=status,
                reason=reason,
                parameters=dict(candidate.parameters),
                title=name,
                round=candidate.round,
                semantics=candidate.semantics,
                predicted=candidate.predicted,
                gain=gain,
                effect=Check(passed=True, detail="on from the start in fresh runs") if on_runs else None,
                numerics=numerics,
                timing=Check(passed=status == KEPT, detail=reason) if pairs else None,
                blocks=Blocks(
                    off_us=tuple(p[0] for p in pairs), on_us=tuple(p[1] for p in pairs), steps_per_block=ARM_STEPS
                ),
            ),
        )
        self.say(f"{name}: {status}, {reason}")

    def stack(self) -> StackVerdict | None:
        """The kept changes together against the plain script; drops the last ones until the rest holds. None: nothing kept."""
        kept = list(self.kept_items())
        if not kept or self.interrupted:
            return None
        runs: dict[str, list[records.Measurement]] = {"plain": [], "stack": []}
        verdict = StackVerdict(passed=None, detail="no time was left to compare the kept changes together")
        for turn in range(STACK_ROUNDS):
            # The first round has no deadline: without it nothing is proved.
            if turn and (verdict.passed is not None or time.time() > self.stack_deadline):
                break
            for arm in STACK_RUNS:
                told = "all kept changes" if arm == "stack" else "the plain script"
                self.say(f"comparing in fresh processes, round {turn + 1}: {told}")
                # A seed for each turn: the plain runs then span what chance does to the losses, where the same seed twice would
                # span nothing, and a training that rounding sends another way would look broken.
                found = self.arm(spent.STACK, tuple(kept) if arm == "stack" else (), turn=len(runs[arm]))
                if self.interrupted:
                    return StackVerdict(
                        passed=None, detail="interrupted before the kept changes were compared together"
                    )
                if found is not None:
                    self._drop_unapplied(found, kept)
                    runs[arm].append(found)
                elif arm == "stack":
                    break
            if not runs["plain"]:
                return self._unproved(kept, "the plain script gave no measurement in a fresh run")
            verdict = self._judge(runs["plain"], runs["stack"], kept)
        if verdict.passed is None:
            return self._unproved(
                kept, f"noise hides whether the kept changes together are faster: {verdict.detail}", verdict
            )
        while verdict.passed is not True:
            dropped = kept.pop()
            self._revert(dropped, f"on top of the changes before it, it did not hold in fresh runs: {verdict.detail}")
            if not kept or self.interrupted:
                return self._unproved(kept, f"nothing is kept: {verdict.detail}", verdict)
            self.say(f"without {planner.title(dropped.transform)}, in fresh processes")
            runs["stack"] = [
                m for m in (self.arm(spent.STACK, tuple(kept)), self.arm(spent.STACK, tuple(kept))) if m is not None
            ]
            verdict = self._judge(runs["plain"], runs["stack"], kept)
        self._fresh = runs
        return verdict

    def try_alone(self) -> None:
        """Nothing is kept, so there is no stack: what would be tried on top of it is tried in pairs of fresh runs."""
        if not self.kept_items():
            for candidate in self.on_top:
                if not (self.interrupted or self.script_failed):
                    self.fresh(candidate)

    def try_on_top(self, stack: StackVerdict | None) -> StackVerdict | None:
        """Try what waits for it on top of the stack: runs with it beside the stack's own, with the same seeds.

        Kept where they are certainly faster by `min_gain` and train as the plain script does; then they are the stack's runs.
        """
        for candidate in self.left(self.on_top):
            if self.interrupted or stack is None or stack.passed is not True:
                return stack
            kept, name = list(self.kept_items()), planner.title(candidate.transform)
            if time.time() + len(STACK_TURNS) * self._arm_s > self.stack_deadline:
                self.notes.append(f"no time was left to try {name} on top of what is kept")
                continue
            item = PlanItem(transform=candidate.transform, status=KEPT_ITEMS, parameters=dict(candidate.parameters))
            self.say(f"what is kept with {name}, in fresh processes")
            runs = [
                m for m in (self.arm(spent.ON_TOP, (*kept, item), turn=turn) for turn in STACK_TURNS) if m is not None
            ]
            if self.interrupted:
                return stack
            found, proved = self._judged_on_top(candidate, runs, [*kept, item])
            records.save_verdict(self.run_dir, found)
            self.say(f"{name}: {found.status}, {found.reason}")
            if found.status == KEPT:
                stack, self._fresh["stack"] = proved, runs
        return stack

    def _judged_on_top(
        self, candidate: Recommendation, runs: list[records.Measurement], kept: list[PlanItem]
    ) -> tuple[Verdict, StackVerdict]:
        """The verdict on a candidate that these fresh runs had on top of the stack, and theirs as the stack."""
        stack = self._fresh["stack"]
        verdict = _skipped(candidate, "a fresh run with it gave no measurement")
        verdict = dataclasses.replace(verdict, status="failed")
        proved = self._judge(self._fresh["plain"], runs, kept)
        if len(runs) < len(STACK_TURNS):
            return verdict, proved
        left_out = next((m.left_out[candidate.transform] for m in runs if candidate.transform in m.left_out), "")
        if left_out:
            return dataclasses.replace(verdict, status="not applicable", reason=left_out), proved
        ratio, (off_us, on_us) = self._ratio(stack, runs, kept)
        numerics = losses.compare([m.losses for m in stack], [m.losses for m in runs], precision=False)
        status, gain, reason = INCONCLUSIVE, None, "too few steps were timed in fresh runs"
        if ratio is not None:
            gain = Interval(low=1.0 - 1.0 / ratio[0], high=1.0 - 1.0 / ratio[2], basis="on top, fresh processes")
            told = f"{percent_text(gain.low)} to {percent_text(gain.high)} of the step saved on top of what is kept"
            if gain.low > self.min_gain:
                status, reason = KEPT, told
            elif gain.high < self.min_gain:
                status, reason = REVERTED, f"no gain above {percent_text(self.min_gain)}: {told}"
            else:
                reason = f"noise hides whether it gains {percent_text(self.min_gain)}: {told}"
        if status == KEPT and (numerics.passed is False or proved.passed is not True):
            status = REVERTED if numerics.passed is False or proved.passed is False else INCONCLUSIVE
            reason = f"it changes the training: {numerics.detail if numerics.passed is False else proved.detail}"
        verdict = dataclasses.replace(
            verdict,
            status=status,
            reason=reason,
            gain=gain,
            effect=Check(passed=True, detail="on from the start in fresh runs"),
            numerics=numerics,
            timing=Check(passed=status == KEPT, detail=reason),
            left_out_gain=gain,
            blocks=Blocks(off_us=off_us, on_us=on_us, steps_per_block=ARM_STEPS),
        )
        return verdict, proved

    def leave_one_out(self, verdict: StackVerdict) -> StackVerdict:
        """Run the proved stack without each of its items in turn, the least of them first, while time is left.

        An item without which the stack is certainly no slower by `min_gain` is dropped, if the rest is proved as well.
        """
        kept = list(self.kept_items())
        if verdict.passed is not True or len(kept) < 2:
            return verdict
        until = min(self.stack_deadline, time.time() + LEFT_OUT_SHARE * self.max_time_s)
        gains = {v.transform: v.gain.low for v in records.verdicts(self.run_dir) if v.gain is not None}
        known = {v.transform for v in records.verdicts(self.run_dir) if v.left_out_gain is not None}
        open_items = [item for item in kept if item.transform not in known]
        for item in sorted(open_items, key=lambda i: gains.get(i.transform, 0.0)):
            rest, name = [i for i in kept if i is not item], planner.title(item.transform)
            if len(kept) < 2:
                break
            if time.time() + len(STACK_TURNS) * self._arm_s > until:
                self.notes.append(f"no time was left to run the stack without {name}")
                continue
            self.say(f"the stack without {name}, in fresh processes")
            runs = []
            for turn in STACK_TURNS:
                found = self.arm(spent.LEFT_OUT, tuple(rest), turn=turn)
                if self.interrupted:
                    return verdict
                if found is not None and not found.left_out:  # without it another one may not apply: then it is needed
                    runs.append(found)
            slower, _ = self._ratio(runs, self._fresh["stack"], kept) if len(runs) == len(STACK_TURNS) else (None, ())
            if slower is None:
                continue
            gain = Interval(low=1.0 - 1.0 / slower[0], high=1.0 - 1.0 / slower[2], basis="left out, fresh processes")
            proved = self._judge(self._fresh["plain"], runs, rest) if gain.high < self.min_gain else None
            dropped = proved is not None and proved.passed is True
            for old in records.verdicts(self.run_dir):
                if old.transform == item.transform and old.status == KEPT:
                    records.save_verdict(self.run_dir, dataclasses.replace(old, left_out_gain=gain))
            if dropped and proved is not None:
                self._revert(item, "the whole stack is as fast without it")
                self.say(f"{name}: dropped, the whole stack is as fast without it")
                kept, verdict, self._fresh["stack"] = rest, proved, runs
        return verdict

    def _unproved(self, kept: list[PlanItem], reason: str, verdict: StackVerdict | None = None) -> StackVerdict:
        """Nothing stays kept that was not proved together with the rest."""
        for item in kept:
            self._revert(item, reason, status=INCONCLUSIVE)
        return dataclasses.replace(verdict or StackVerdict(passed=None, detail=""), detail=reason)

    def _drop_unapplied(self, found: records.Measurement, kept: list[PlanItem]) -> None:
        for name, reason in found.left_out.items():
            for item in [i for i in kept if i.transform == name]:
                kept.remove(item)
                self._revert(item, f"it could not be applied in a fresh run: {reason}", status=INCONCLUSIVE)

    def _revert(self, item: PlanItem, reason: str, status: str = REVERTED) -> None:
        for verdict in records.verdicts(self.run_dir):
            if verdict.transform == item.transform and verdict.status == KEPT:
                records.save_verdict(self.run_dir, dataclasses.replace(verdict, status=status, reason=reason))

    def _judge(
        self, plain: list[records.Measurement], stack: list[records.Measurement], kept: list[PlanItem]
    ) -> StackVerdict:
        if not stack:
            return StackVerdict(passed=False, detail="the stack gave no measurement in a fresh run")
        found, (plain_us, stack_us) = self._ratio(plain, stack, kept)
        precision = any(item.semantics == Semantics.PRECISION.value for item in kept)
        check = losses.compare([m.losses for m in plain], [m.losses for m in stack], precision=precision)
        batch = plain[0].batch_size

        def rate(times: tuple[float, ...]) -> float | None:
            return batch / (math.fsum(times) / len(times)) * 1e6 if batch and times else None

        passed: bool | None = True
        detail = check.detail
        if found is None:
            passed, detail = False, "too few steps were timed in fresh runs"
        elif check.passed is False:
            passed = False
        elif found[0] <= 1.0:
            # Above 1 but not beyond noise leaves it open; more runs may tell.
            passed = None if found[1] > 1.0 else False
            detail = f"not faster beyond noise in fresh runs ({found[1]:.2f}×, {found[0]:.2f} to {found[2]:.2f})"
        # Steps whose loss cannot be seen (hand-written gradients) have the numeric gate of each change as their proof.
        return StackVerdict(
            passed=passed,
            detail=detail,
            plain_us=plain_us,
            stack_us=stack_us,
            speedup=found[1] if found else None,
            speedup_low=found[0] if found else None,
            speedup_high=found[2] if found else None,
            samples_per_s_plain=rate(plain_us),
            samples_per_s_stack=rate(stack_us),
            losses_plain=plain[0].losses,
            losses_stack=stack[0].losses,
        )

    def _ratio(
        self, slow: list[records.Measurement], fast: list[records.Measurement], kept: list[PlanItem]
    ) -> tuple[tuple[float, float, float] | None, tuple[tuple[float, ...], tuple[float, ...]]]:
        """How many times as long a step of `slow` takes (low, point, high), and the centres of each one's runs, µs."""
        # Where batches come in bursts, or the loader was changed, only the whole flow of steps tells the rate.
        flow = any(bursty(m.step_us) for m in (*slow, *fast)) or any(i.transform in self.restarted for i in kept)
        slow_steps, fast_steps = ([m.every_us if flow else m.step_us for m in arm] for arm in (slow, fast))
        centre = _mean if flow else median
        centres = tuple(map(centre, slow_steps)), tuple(map(centre, fast_steps))
        return process_speedup(slow_steps, fast_steps, means=flow), centres

    # -- launching --------------------------------------------------------------------------------------------------

    def _run(self, mode: str, *, timeout_s: float, phase: str = "", **orders: Any) -> Exit:
        """Start the script in this mode; its time counts as `phase`, or as the phases that a search tells of."""
        began = time.monotonic()
        (self.run_dir / records.TRIALS_DIR / records.SPENT_FILE).unlink(missing_ok=True)
        session = Session(
            mode=mode,
            script=self.command.words[0],
            argv=self.command.words[1:],
            protect_files=True,
            **{"run_dir": str(self.run_dir), "warmup": WARMUP_STEPS, **orders},
        )
        try:
            ended = self.launch(
                self.command,
                session,
                on_progress=self._told,
                timeout_s=timeout_s,
                environment=files.tracker_environment(self.run_dir),
                output=self.run_dir / OUTPUT_FILE,
            )
        except KeyboardInterrupt:
            self.interrupted = True
            ended = Exit(code=130, signal=int(signal.SIGINT))
        finally:
            wall_s = time.monotonic() - began
            told = {} if phase else records.spent(self.run_dir)
            by_phase = {phase: wall_s} if phase else spent.of_process(wall_s, told)
            self.seconds.update(by_phase)
            if told:
                self._starts_s.append(by_phase[spent.START])
            for problem in files.restore(self.run_dir):
                self.notes.append(f"could not be put back: {problem}")
                self.script_failed = True  # another start would find other files
        if ended.code == 130 or ended.signal == signal.SIGINT:
            self.interrupted = True
        return ended

    def _told(self, event: dict[str, Any]) -> None:
        kind, name = event.get("event"), event.get("title") or event.get("transform")
        if kind == "trial":
            pairs = event.get("pairs")
            again = f"the script had ended; going on with {name} ({pairs} pairs so far)" if pairs else ""
            self.say(again or f"trying {name}")
        elif kind == "verdict":
            self.model_hash = str(event.get("model") or self.model_hash)
            self.say(f"{name}: {event.get('status')}, {event.get('reason')}")
        elif kind == "fault":
            self.fault = str(event.get("error"))
            self.say(f"advisor switched itself off in the script: {event.get('error')}")


def apply_search(
    command: ScriptCommand,
    recommendations: Sequence[Recommendation],
    profile: StepProfile | None,
    *,
    ask: Callable[[Recommendation], bool] | None = None,
    min_gain: float = 0.01,
    max_time_s: float = 600.0,
    max_pairs: int = 20,
    recommend: Recommend | None = None,
    profiled_s: float = 0.0,
    run_dir: Path,
    say: Say,
    launch: Launch = launcher.launch,
) -> tuple[TrialLog, Plan, int]:
    """Try what is recommended, keep what is proved, and write `trials.json` and `plan.yaml` into the run folder.

    Args:
        recommend: what the rules say to a profile, which lies in the folder given: asked in each round after the first.
            None leaves later rounds to `planner.second_look` alone.
        ask: asked before each candidate; None tries all of them (`--auto`).
        max_time_s: no candidate begins after this, less what the comparison of the stack needs.
        profiled_s: what the first profile took, for the account of the time; `max_time_s` is without it.
        max_pairs: most pairs of blocks, or of fresh runs, in a trial.

    Returns:
        The log, the plan, and the exit code: 0 when something is kept or there was nothing to do, 4 when noise, time or
        the script left it open.
    """
    started = time.time()
    files.hold(run_dir)
    step = profile.wall_us or profile.step_us if profile is not None else None
    step_s = step.median / 1e6 if step is not None else None
    reserve = _stack_reserve_s(step_s, max_time_s, ARM_START_S)
    search = _Search(
        command=command,
        run_dir=run_dir,
        launch=launch,
        say=say,
        min_gain=min_gain,
        max_pairs=max_pairs,
        trial_timeout_s=min(max(TRIAL_LEAST_S, TRIAL_SHARE * max_time_s), max(max_time_s - reserve, 1.0)),
        max_time_s=max_time_s,
        stack_deadline=started + max_time_s,
        step_s=step_s,
    )
    ordered = planner.order(recommendations, profile)
    stack: StackVerdict | None = None
    skipped: dict[object, str] = {}

    def choose(found: Sequence[Recommendation]) -> list[Recommendation]:
        wanted = []
        for candidate in found:
            reason = _not_tried(candidate, search.trial_timeout_s)
            if not reason and ask is not None and not ask(candidate):
                reason = "not wanted"
            if reason:
                skipped[records.attempt(candidate)] = reason
            else:
                wanted.append(candidate)
        return wanted

    try:
        search.all_rounds(ordered, profile, choose, recommend)
        search.try_alone()
        stack = search.try_on_top(search.stack())
        if stack is not None:
            stack = search.leave_one_out(stack)
    except KeyboardInterrupt:
        search.interrupted = True
    for candidate in search.left(search.known):
        reason = skipped.get(records.attempt(candidate)) or _why_open(search)
        records.save_verdict(run_dir, _skipped(candidate, reason))
    decided = records.verdicts(run_dir)
    verdicts = tuple(v for v in decided if planner.TOGETHER not in v.transform)
    for split in decided:
        if planner.TOGETHER in split.transform:
            search.notes.append(f"{split.title or split.transform}, tried as one: {split.status}, {split.reason}")
    written, temporary = files.written(run_dir)
    if temporary:
        what = "temporary file was" if temporary == 1 else "temporary files were"
        search.notes.append(f"{temporary} {what} written and put away, too")
    if search.ended_early > 1:
        search.notes.append(
            f"the script ended {search.ended_early} times before the search did; with more steps in a run it takes less time"
        )
    if search.interrupted:
        search.notes.append("interrupted: what was proved until then is kept here, the stack is not proved")
    seconds = time.time() - started + profiled_s
    log = TrialLog(
        script=command.words[0],
        argv=command.words[1:],
        verdicts=verdicts,
        rounds=tuple(search.history),
        stack=stack,
        files_written=written,
        seconds=seconds,
        spent=spent.whole(seconds, {spent.PROFILE: profiled_s, **search.seconds}),
        complete=not (search.interrupted or search.script_failed or search.late),
        notes=tuple(search.notes),
    )
    storage.save(run_dir / TRIALS_FILE, log)
    plan = _plan(command, log, profile, search.model_hash, run_dir)
    planfile.write(run_dir / PLAN_FILE, plan)
    return log, plan, _exit_code(log)


def run_plan(
    command: ScriptCommand,
    path: Path,
    plan: Plan,
    *,
    run_dir: Path,
    strict: bool = False,
    say: Say,
    launch: Launch = launcher.launch,
) -> int:
    """Train with the plan to the end; returns the script's own exit code.

    Another machine, torch or model: the plan's proof does not hold, so the plain script trains, and why is said. Another
    script text alone is said too; each item is still matched against the live model.

    Raises:
        AdvisorError: with `strict`, when anything has changed since the plan was proved.
    """
    kept = tuple(item for item in plan.items if item.status == KEPT_ITEMS)
    own_kernels = tuple(item for item in kept if item.transform in _OWN_KERNELS)
    now = PlanHashes(
        script=planfile.script_hash(Path(command.name)),
        environment=_environment_text(),
        kernels=planfile.kernels_hash(),
    )
    changed = planfile.mismatches(plan.hashes, now, uses_kernels=bool(own_kernels))
    if changed and strict:
        raise AdvisorError(
            f"{path} does not fit: " + "; ".join(changed),
            expected="what it was proved on",
            fix="Prove it again with `advisor apply --auto`, or leave --strict out.",
        )
    for change in changed:
        say(f"plan: {change}")
    if plan.hashes.environment and now.environment and plan.hashes.environment != now.environment:
        say("its gains are not proved here, so the plain script trains; prove a plan here with `advisor apply --auto`")
        kept = ()
    elif plan.hashes.kernels and plan.hashes.kernels != now.kernels and own_kernels:
        say("training without " + ", ".join(item.transform for item in own_kernels))
        kept = tuple(item for item in kept if item not in own_kernels)
    if not kept:
        say("the plan has no change to apply; the plain script trains")
    session = Session(
        mode="run",
        run_dir=str(run_dir),
        script=command.words[0],
        argv=command.words[1:],
        kept=kept,
        strict=strict,
        model_hash=plan.hashes.model,
    )
    planfile.write(run_dir / PLAN_FILE, plan)
    return launch(command, session).code


# Transforms that put bundled CUDA sources in place: their proof is of those sources.
_OWN_KERNELS = frozenset(catalog.transforms())


def _stack_reserve_s(step_s: float | None, max_time_s: float, start_s: float) -> float:
    """What the comparison of the stack needs: its fresh runs at the plain script's step time, up to half of the whole."""
    runs_s = len(STACK_RUNS) * (start_s + (ARM_WARMUP + ARM_STEPS) * step_s) if step_s is not None else 0.0
    return max(STACK_LEAST_S, STACK_SHARE * max_time_s, min(runs_s, STACK_MOST_SHARE * max_time_s))


def _not_tried(candidate: Recommendation, trial_timeout_s: float) -> str:
    if candidate.semantics is Semantics.TRAINING:
        return "it changes the recipe: advice for you, never applied"
    first = LONG_FIRST_STEP_S.get(candidate.transform, 0.0)
    if first > trial_timeout_s:
        needed = first / TRIAL_SHARE / 60
        return f"its first step takes about {first / 60:.0f} min; give it time with --max-time {needed:.0f}m"
    return ""


def _why_open(search: _Search) -> str:
    if search.interrupted:
        return "interrupted"
    if search.script_failed:
        return "the script failed in the search"
    return "out of time"


def _step_us(profile: StepProfile | None) -> float:
    step = profile.step_us or profile.wall_us if profile is not None else None
    return step.median if step is not None else 0.0


def _names(items: Sequence[PlanItem | Recommendation]) -> tuple[str, ...]:
    return tuple(item.transform for item in items)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


def _in_trial(candidate: Recommendation) -> records.InTrial:
    return records.InTrial(transform=candidate.transform, parameters=dict(candidate.parameters))


def _skipped(candidate: Recommendation, reason: str) -> Verdict:
    return Verdict(
        transform=candidate.transform,
        title=planner.title(candidate.transform),
        status="skipped",
        reason=reason,
        parameters=dict(candidate.parameters),
        round=candidate.round,
        semantics=candidate.semantics,
        predicted=candidate.predicted,
    )


def _exit_code(log: TrialLog) -> int:
    if any(v.status == KEPT for v in log.verdicts):
        return int(ExitCode.OK if log.stack is not None and log.stack.passed else ExitCode.INCONCLUSIVE)
    open_ended = any(v.status == INCONCLUSIVE for v in log.verdicts) or not log.complete
    return int(ExitCode.INCONCLUSIVE if open_ended else ExitCode.OK)


def _plan(command: ScriptCommand, log: TrialLog, profile: StepProfile | None, model_hash: str, run_dir: Path) -> Plan:
    stack = log.stack
    speedup = ""
    if stack is not None and stack.passed and stack.speedup is not None:
        speedup = f"{stack.speedup:.2f}× ({stack.speedup_low:.2f} to {stack.speedup_high:.2f})"
    latest = {planner.identity(v): v for v in log.verdicts}  # of a change that was tried in two rounds the later trial
    ordered = sorted(latest.values(), key=lambda v: v.status != KEPT)
    return Plan(
        script=command.words[0],
        argv=command.words[1:],
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        items=tuple(
            PlanItem(
                transform=v.transform,
                status=v.status,
                parameters=dict(v.parameters),
                semantics=v.semantics.value,
                reason=v.reason,
                predicted=_interval_text(v.predicted, v.round),
                measured=_interval_text(v.gain),
            )
            for v in ordered
        ),
        hashes=PlanHashes(
            script=planfile.script_hash(Path(command.name)),
            model=model_hash,
            environment=planfile.environment_text(profile.environment) if profile is not None else "",
            kernels=planfile.kernels_hash(),
        ),
        speedup=speedup,
        run=str(run_dir),
    )


def _interval_text(interval: Interval | None, number: int = 1) -> str:
    if interval is None:
        return ""
    of = f"the step as profiled for round {number}" if number > 1 else "the step"
    return f"{percent_text(interval.low)} to {percent_text(interval.high)} of {of}"


def _environment_text() -> str:
    try:
        return planfile.environment_text(environment.probe())
    except AdvisorError:
        return ""


def last_line(path: Path) -> str:
    """The last line of the script's output, where Python puts the error's own text."""
    try:
        with open(path, "rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - 8192))
            lines = stream.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")
