"""Search processes, one after the other, until each candidate has a verdict.

In each one live/driver.py tries what is left. One that ends too early, or dies, is followed by another; whoever was on trial when
it died is to blame, unless nobody comes to a verdict any more, or the same error ends it with another one on trial: then it is the
script's own, and such an end is one that came too early.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from advisor.core import transform_table
from advisor.core.findings import Interval, Recommendation
from advisor.core.verdict import Blocks, Status, Verdict
from advisor.profiling.beside.launcher import NATIVE_FAULTS, Exit
from advisor.trials import planner, proved_before, records, statistics
from advisor.trials.budget import Budget
from advisor.trials.fresh import FreshRuns
from advisor.trials.pairs import try_in_pairs
from advisor.trials.proved_before import Whole
from advisor.trials.records import InTrial
from advisor.trials.script import GRACE_S, Ended, Script
from advisor.trials.statistics import decide

# Search processes that end without any progress (no verdict, no new pair of blocks) before a candidate is given up.
IDLE_STARTS = 3  # the blocks are halved twice until then
# Crashes in a row, each with another candidate on, before the script itself is blamed.
CRASHES = 4
# Processes in a row in which advisor has switched itself off before that is not laid to what was on trial.
FAULTS = 2
# The least that a search process gets, however late it is.
LEAST_S = 30.0


@dataclass(frozen=True, slots=True)
class Handed:
    """A search process that was not started as one, how it ended, and what was known when it was given its orders."""

    ended: Ended
    progress: tuple[object, ...]
    verdicts: int


@dataclass(slots=True, eq=False)
class SearchProcesses:
    """Tries candidates on `script`; `try_all` once a round, then what came of it is in the fields."""

    script: Script
    budget: Budget
    runs: FreshRuns
    min_gain: float
    max_pairs: int
    noise: float | None = None  # of the plain loop (statistics.noise)
    later: tuple[str, ...] = ()  # what an earlier search has refused for what it does
    before: Whole | None = None  # what was proved here of the same workload: tried as one, first of all
    late: bool = False  # candidates were left when their time was up
    ended_early: int = 0  # processes whose script came to its own end
    on_whole: Callable[[], None] | None = None  # called once what was tried as one, first of all, is kept
    proved: bool = False  # something kept has been compared with the plain script
    on_top: list[Recommendation] = field(default_factory=list)  # and candidates among them whose turn comes last
    handed: Handed | None = None  # a search process that has ended already: it was profiled before, and went on
    _crashes: int = 0
    _faults: int = 0  # of advisor's own, in processes one after the other
    _blamed: dict[str, Verdict] = field(default_factory=dict)  # by the error that ended the process
    _own_errors: set[str] = field(default_factory=set)  # the script's, whatever is on trial

    @property
    def ended(self) -> bool:
        """Nothing more can be tried: no time, no script that runs, or the user has said so."""
        return self.late or self.script.failed or self.script.over

    @property
    def deadline(self) -> float:
        """`time.time()` at which no new candidate begins."""
        return self.budget.candidates_until(
            self.script.start_s,
            self.left,
            proved=self.proved,
            quick=not self.proved,
            plain=self.runs.profiled() is not None,
        )

    @property
    def why_late(self) -> str:
        """Why nothing more begins behind the deadline, though `--max-time` is not used up."""
        reserve_s = self.budget.until - self.deadline
        if reserve_s < 1.0:
            return "out of time"
        return f"out of time: the remaining {reserve_s:.0f} s are for the final comparison"

    @property
    def left(self) -> float:
        """The share of the plain script's step that is left with what is kept, as far as that is known."""
        return records.left(records.verdicts(self.script.run_dir)) or 1.0

    def try_all(self, candidates: Sequence[Recommendation]) -> None:
        """Afterwards each candidate has a verdict on disk, or waits in `on_top`, or the search has ended."""
        idle = 0
        while not self.ended:
            left = [c for c in records.untried(self.script.run_dir, candidates) if c not in self.on_top]
            left = self._worth(left)
            if not left:
                return
            if self.handed is None and time.time() >= self.deadline:
                self.late = True
            else:
                idle = 0 if self._process(left) else idle + 1
                if idle >= IDLE_STARTS:
                    self._give_up(left)
                    idle = 0
        if self.late:
            self._look_last(candidates)

    def _worth(self, left: Sequence[Recommendation]) -> list[Recommendation]:
        """Of these, once something is proved, what may gain enough of the step that is left; the others are skipped.

        A wrapper's detour, 0.1 % of a UNet's step at most, had a trial of 44 s on an H200, of the 61 s that were left for trials. Before a
        proof they go along, as parts of what is tried as one.
        """
        share = records.left(records.verdicts(self.script.run_dir)) if self.proved else None
        if share is None:
            return list(left)
        found = planner.worth(left, self.min_gain * share)  # predictions are shares of the plain step
        records.skip(self.script.run_dir, (c for c in left if c not in found), planner.TOO_SMALL)
        return list(found)

    def try_alone(self, candidate: Recommendation) -> None:
        """Try a candidate that must be on from the start in pairs of fresh processes."""
        verdict = try_in_pairs(
            self.runs,
            candidate,
            records.kept_items(self.script.run_dir),
            min_gain=self.min_gain,
            max_pairs=self.max_pairs,
            until=self.deadline,
        )
        if verdict is not None:
            records.save_verdict(self.script.run_dir, verdict)
            self.script.say(f"{verdict.title}: {verdict.status}, {verdict.reason}")

    def orders(self, left: Sequence[Recommendation]) -> dict[str, Any]:
        """Of a search process for these. What the last one has left of its end is gone."""
        run_dir = self.script.run_dir
        (run_dir / records.SEARCH_FILE).unlink(missing_ok=True)
        (run_dir / records.TRIALS_DIR / records.FAULT_FILE).unlink(missing_ok=True)
        return {
            "candidates": tuple(left),
            "later": (*self.later, *(proved_before.others(self.before, left) if self.before is not None else ())),
            "whole_first": self.on_whole is not None,
            "kept": records.kept_items(run_dir),
            "min_gain": self.min_gain,
            "max_pairs": self.max_pairs,
            "parts": statistics.parts_for(self.noise, self.min_gain) if self.noise is not None else 1,
            "kernel_steps": self.runs.kernel_steps,
            "trial_timeout_s": self.budget.trial_s,
            "deadline_unix_s": self.deadline,
        }

    @property
    def timeout_s(self) -> float:
        """The most that a search process may take that begins now."""
        return max(LEAST_S, self.deadline - time.time()) + self.budget.trial_s + GRACE_S

    def _process(self, left: Sequence[Recommendation]) -> bool:
        """One search process for what is left; whether it got on with it."""
        run_dir = self.script.run_dir
        if self.handed is None:
            before, verdicts = self.progress(), len(records.verdicts(run_dir))
            ended = self.script.start("search", timeout_s=self.timeout_s, **self.orders(left))
        else:
            ended, before, verdicts = self.handed.ended, self.handed.progress, self.handed.verdicts
            self.handed = None
        record = records.load_search(run_dir)
        if record is not None:
            self.script.model_hash = record.model_hash or self.script.model_hash
            self.script.notes += [note for note in record.notes if note not in self.script.notes]
            self.late = self.late or record.out_of_time
            self.on_top += [c for c in left if c.transform in record.on_top and c not in self.on_top]
            if record.whole_kept and self.on_whole is not None:
                self.on_whole()
        if self.script.over:
            return True
        # Another setting of the same transform may have had its verdict in this process already.
        asking = record.restart if record is not None else ""
        restart = next((c for c in records.untried(run_dir, left) if c.transform == asking), None)
        if restart is not None:
            records.clear_current(run_dir)
            self.try_alone(restart)
            return True
        if ended.fault:
            self._faulted(ended.fault, left)
            return True
        self._faults = 0
        if ended.failed and not ended.exit.stopped_by_advisor and not self._scripts_own(ended.exit):
            self._crashes = self._crashes + 1 if len(records.verdicts(run_dir)) == verdicts else 1
            self._crashed(ended.exit, left)
            return True
        self.ended_early += not ended.exit.stopped_by_advisor
        return self.progress() != before

    def _faulted(self, fault: str, left: Sequence[Recommendation]) -> None:
        """Advisor has switched itself off: in the trial of a candidate, which may be why, or whatever is on."""
        current = records.load_current(self.script.run_dir)
        self._faults += 1
        if current is not None:
            self._conclude(current, left, Status.FAILED, f"advisor switched itself off in its {current.phase}: {fault}")
        last = time.time() >= self.deadline and not records.kept_items(self.script.run_dir)  # no other will show it
        if current is None or self._faults >= FAULTS or last:
            self.script.fault = f"advisor switched itself off in the script: {fault}"

    def _scripts_own(self, ended: Exit) -> bool:
        """Whether a Python error that is the script's own has ended this process. A verdict that blamed a candidate for it is withdrawn."""
        current, error = records.load_current(self.script.run_dir), self._error(ended)
        if current is None or not error:
            return False
        blamed = self._blamed.get(error)
        if blamed is not None and (blamed.transform, blamed.parameters) != (current.transform, current.parameters):
            del self._blamed[error]
            self._own_errors.add(error)
            records.withdraw(self.script.run_dir, blamed)
            self.script.notes.append(f"the script itself ends with “{error}”; the search went on in further runs of it")
            self.script.say(f"{blamed.title}: not to blame, {self.script.notes[-1]}")
        return error in self._own_errors

    def _error(self, ended: Exit) -> str:
        """The Python error that this process ended with; "" where something else ended it, or it told none."""
        return "" if ended.signal or ended.timed_out else self.script.last_line

    def progress(self) -> tuple[object, ...]:
        current = records.load_current(self.script.run_dir)
        pairs = (current.transform, current.parts, len(current.off_us)) if current is not None else ()
        return len(records.verdicts(self.script.run_dir)), pairs

    def _crashed(self, ended: Exit, left: Sequence[Recommendation]) -> None:
        script = self.script
        current = records.load_current(script.run_dir)
        if current is None and ended.timed_out:
            self.late = True  # its time was up before a trial began: nothing that the script has done
            return
        if current is None:
            script.failed = True
            script.notes.append(
                f"the script ended with exit code {ended.code} in the search; see {records.OUTPUT_FILE}"
            )
            return
        traced = current.phase == "effect" and current.traced
        if self._crashes < CRASHES and traced and ended.signal in NATIVE_FAULTS:
            # As likely the tracer's fault as the candidate's. Once more, without.
            records.save_current(script.run_dir, dataclasses.replace(current, traced=False))
            where = records.native_fault(script.run_dir)
            script.notes.append(
                f"the process died of signal {ended.signal} while the effect of {transform_table.title(current.transform)} "
                f"was traced{f' ({where})' if where else ''}; its effect was judged without a trace"
            )
            return
        if self._crashes >= CRASHES:
            # One candidate after the other "fails" without any of them coming to a verdict: it is the script.
            script.failed = True
            script.notes.append(
                f"the search ended: the script failed {CRASHES} times in a row; see {records.OUTPUT_FILE}"
            )
        verdict = self._conclude(current, left, *self._blame(ended, current))
        if error := self._error(ended):
            self._blamed[error] = verdict

    def _blame(self, ended: Exit, current: InTrial) -> tuple[Status, str]:
        """Status and reason of the candidate on trial when the process died."""
        if ended.signal == getattr(signal, "SIGALRM", None) or ended.timed_out:
            if time.time() >= self.deadline:
                return Status.INCONCLUSIVE, f"{self.why_late}, in its {current.phase}; give it more with --max-time"
            return Status.FAILED, f"its {current.phase} did not end within {current.limit_s:.0f} s"
        if ended.signal == signal.SIGKILL:
            return (
                Status.FAILED,
                f"the process was killed in its {current.phase}; the machine may have run out of memory",
            )
        if ended.signal:
            where = records.native_fault(self.script.run_dir)
            told = f"the process died of signal {ended.signal} in its {current.phase}"
            return Status.FAILED, f"{told} ({where})" if where else told
        # The script has run without it, and an error of its own is found out by `_scripts_own`.
        last = self.script.last_line or f"exit code {ended.code}"
        return Status.FAILED, f"the change broke the script in its {current.phase}: {last}"

    def _look_last(self, candidates: Sequence[Recommendation]) -> None:
        """A trial that the script's end had cut short, and time now ends: what its pairs say is its verdict."""
        current = records.load_current(self.script.run_dir)
        if current is None or not current.pairs:
            return
        last = decide(current.pairs, self.min_gain, max_pairs=self.max_pairs, last=True, anew=True)
        status = Status.REVERTED if last.status == Status.REVERTED else Status.INCONCLUSIVE
        self._conclude(current, candidates, status, f"{self.why_late}: {last.reason}", last.gain)

    def _give_up(self, left: Sequence[Recommendation]) -> None:
        current = records.load_current(self.script.run_dir) or _in_trial(left[0])
        reason = "the script ends before a trial fits into it; let it run for more steps"
        self._conclude(current, left, Status.INCONCLUSIVE, reason)

    def _conclude(
        self,
        current: InTrial,
        candidates: Sequence[Recommendation],
        status: Status,
        reason: str,
        gain: Interval | None = None,
    ) -> Verdict:
        """The candidate on trial has this verdict. It may be several as one, which no candidate stands for."""
        as_tried = Recommendation(transform=current.transform, parameters=current.parameters)
        candidate = next((c for c in candidates if planner.identity(c) == planner.identity(as_tried)), as_tried)
        pairs = current.pairs
        verdict = records.verdict_on(
            candidate,
            status,
            reason,
            gain=gain,
            numerics=current.numerics,
            effect=current.effect,
            first_step_us=current.first_step_us,
            blocks=Blocks(
                off_us=tuple(off for off, _ in pairs),
                on_us=tuple(on for _, on in pairs),
                steps_per_block=current.steps_per_block,
                parts=current.parts,
            ),
        )
        records.save_verdict(self.script.run_dir, verdict)
        records.clear_current(self.script.run_dir)
        self.script.say(f"{verdict.title}: {status}, {reason}")
        return verdict


def _in_trial(candidate: Recommendation) -> InTrial:
    return InTrial(transform=candidate.transform, parameters=dict(candidate.parameters))
