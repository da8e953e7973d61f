"""The supervisor's side of `apply`: from what is recommended to what is proved, and the files that say so.

Rounds of candidates are tried in the running script (rounds.py, processes.py); what only a fresh process can show in pairs of
fresh processes (pairs.py). At the end the kept changes together run against the plain script (stack.py). How often the script
is started for that, and that the user's files are put back each time, is script.py's; for how long, budget.py's.
"""

from __future__ import annotations

import datetime
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from advisor.core import storage, transform_table
from advisor.core.findings import Interval, Recommendation
from advisor.core.plan import Plan, PlanItem
from advisor.core.profile import StepProfile
from advisor.core.units import percent_text, time_text
from advisor.core.verdict import Status, TrialLog
from advisor.loop.session import Session
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.relay import Relay
from advisor.trials import earlier, feeding, fresh, outcome, planfile, planner, proved_before, records, statistics
from advisor.trials.budget import CHEAP_SHARE, Budget
from advisor.trials.choosing import Ask, CandidateChooser
from advisor.trials.fresh import FreshRuns
from advisor.trials.options import USUAL, SearchOptions
from advisor.trials.processes import SearchProcesses
from advisor.trials.proof import LOADER, Proof
from advisor.trials.rounds import Recommend, Rounds
from advisor.trials.script import Launch, Say, Script
from advisor.trials.stack import StackTrial
from advisor.trials.stack_parts import StackParts
from advisor.trials.statistics import block_s
from advisor.userfiles import owners

# Of a CuPy loop's changes, what is left out first where all of them together give no measurement.
FROM_START = ("graphs", "precision", "kernels", "")
# Steps for a process that was profiled to settle in: its loop is looked at anew, for what a profile does not keep.
WARMUP_HANDED = 4


def begin(
    command: ScriptCommand,
    profile: StepProfile | None,
    *,
    options: SearchOptions = USUAL,
    ask: Ask | None = None,
    recommend: Recommend | None = None,
    run_dir: Path,
    say: Say,
    launch: Launch | None = None,
) -> Search:
    """A search whose time runs from now on; `finish` makes it.

    Args:
        options: no candidate begins after their time, less what the comparison of the stack needs.
        recommend: what the rules say to a profile, which lies in the folder given: asked in each round after the first.
            None leaves later rounds to `planner.second_look` alone.
        ask: asked before each candidate; None tries all of them (`--auto`).
    """
    owners.hold(run_dir)
    budget = Budget.from_now(options.time_s, profile)
    relay = Relay()
    script = Script(command, run_dir, launch or relay, say, profile.start_s if profile is not None else None)
    runs = FreshRuns(
        script,
        budget.trial_s,
        step_s=budget.step_s,
        settle_s=budget.settle_s,
        kernel_steps=fresh.kernel_steps(profile),
        last_call=budget.last_call,
    )
    noise = statistics.noise(profile.step_us.raw) if profile is not None and profile.step_us is not None else None
    processes = SearchProcesses(script, budget, runs, options.min_gain, options.max_pairs, noise)
    if profile is not None:
        _from_before(processes, profile)
    if profile is not None and profile.environment.shared_gpu:
        script.notes.append(SHARED)
        say(SHARED)
    if noise is not None:
        script.notes.append(_tells(noise, budget.step_s or 0.0))
        say(script.notes[-1])
    choose = CandidateChooser(budget, ask)
    if time.time() < processes.deadline:
        say(_limits(budget, budget.until - processes.deadline))
    stack = StackTrial(script, runs, budget, options.min_gain)
    search = Search(
        processes=processes,
        options=options,
        choose=choose,
        rounds=Rounds(processes, choose, recommend),
        stack=stack,
        parts=StackParts(stack),
        profile=profile,
        relay=relay,
    )
    processes.on_whole = search.prove_at_once  # in the first round
    return search


def _from_before(processes: SearchProcesses, profile: StepProfile) -> None:
    """What earlier searches say of what is to be tried as one: of this script what they have refused, of this workload what they proved."""
    script = processes.script
    here = planfile.hashes_here(script.command.name, environment=planfile.environment_text(profile.environment))
    processes.later = earlier.refused(script.run_dir, script.command.words[0], script.command.words[1:], here)
    if processes.later:
        titles = ", ".join(map(transform_table.title, processes.later))
        script.say(f"not tried first, because the last search here rejected it: {titles}")
    processes.before = proved_before.find(profile)
    if processes.before is not None:
        script.say(proved_before.told(processes.before))


SHARED = (
    "another process uses this GPU: all times here hold some of its work. End it, or take another GPU by CUDA_VISIBLE_DEVICES; "
    "a script may set that itself"
)


def _tells(noise: float, step_s: float) -> str:
    """What the plain loop's noise lets a trial tell, and in what time."""
    seconds = 2 * statistics.STAGES[0] * block_s(step_s)
    least = max(0.001, statistics.tells(noise))
    return f"with this loop's noise a trial can detect differences above {percent_text(least)} of a step within {time_text(seconds * 1e6)}"


def _limits(budget: Budget, reserve_s: float) -> str:
    """What the time is for, and what Ctrl-C does, said before the first trial."""
    return (
        f"searching for about {budget.whole_s:.0f} s, {reserve_s:.0f} s of them for the final comparison. "
        "Ctrl-C ends the search: the plan then holds the proved changes, and other faster changes as unconfirmed"
    )


@dataclass(slots=True, eq=False, kw_only=True)
class Search:
    """One search. As soon as something is proved the plan says so; what follows makes it better, or leaves it as it is.

    Attributes:
        profiled_s: what the first profile took, for the account of the time, of which the search's own is without it.
        before_s: of that, what was over before the script's first step.
        given_s: for the search and its first profile, from that step on; None: the search's own time and what the profile took.
    """

    processes: SearchProcesses
    options: SearchOptions
    choose: CandidateChooser
    rounds: Rounds
    stack: StackTrial
    parts: StackParts
    relay: Relay
    profile: StepProfile | None
    profiled_s: float = 0.0
    before_s: float = 0.0
    given_s: float | None = None
    proved: Proof | None = None
    proved_s: float | None = None  # when that was so for the first time, from the script's first step on
    _started: float = field(default_factory=lambda: time.time())

    @property
    def script(self) -> Script:
        """The script that is searched."""
        return self.processes.script

    def first_orders(self, recommendations: Sequence[Recommendation]) -> Session | None:
        """Of the first search process, for one that is there already, and has been profiled; None where nothing is to be tried."""
        if time.time() >= self.processes.deadline:
            return None  # a process that went on would come to its first trial, and end there
        first = self.choose(self.rounds.first(planner.order(recommendations, self.profile)))
        if not first:
            return None
        return self.script.orders("search", **{"warmup": WARMUP_HANDED, **self.processes.orders(first)})

    def finish(self, recommendations: Sequence[Recommendation]) -> tuple[TrialLog, Plan, int]:
        """Try what is recommended, keep what is proved, and write `trials.json` and `plan.yaml` into the run folder.

        They are written whatever ends the search; an error that does is then raised.

        Returns:
            The log, the plan, and the exit code: 0 when something is kept or there was nothing to do, 4 when noise, time, the
            script or the user left it open.
        """
        error: Exception | None = None
        try:
            self.run(recommendations)
        except KeyboardInterrupt:
            self.script.interrupted = True
        except Exception as raised:
            self.script.failed, error = True, raised
            self.script.notes.append(f"the search ended with an error: {raised}")
        finally:
            self.relay.close()
        self.script.put_back()  # where Ctrl-C came in the middle of that
        log, plan = self.conclude()
        if error is not None:
            raise error
        return log, plan, outcome.exit_code(log)

    def run(self, recommendations: Sequence[Recommendation]) -> None:
        """Try what is recommended, and prove what is kept."""
        processes, script = self.processes, self.script
        from_start = [c for c in planner.order(recommendations, self.profile) if transform_table.row(c.transform).cupy]
        if from_start:
            self._prove_from_start(from_start)
            return
        self.rounds.run(planner.order(recommendations, self.profile), self.profile)
        if not records.kept_items(script.run_dir):
            # There is no stack: what would be tried on top of it is tried by itself.
            for candidate in processes.on_top:
                if not (script.over or script.failed):
                    processes.try_alone(candidate)
        self.proved = self.stack.prove(self.proved, quick=True)
        if self.proved is not None:
            self._note_proof()
            self.proved = self.stack.confirm(self.proved)
            self.proved = self.parts.add_on_top(self.proved, processes.on_top, share=CHEAP_SHARE)
            self.proved = self.parts.leave_one_out(self.proved)
            self.proved = self.parts.add_on_top(self.proved, processes.on_top)

    def _prove_from_start(self, candidates: Sequence[Recommendation]) -> None:
        """A loop of CuPy alone: its changes are on from the script's start, all at once, and are proved so and left out one by one.

        Where all at once do not run to an end, what takes the most liberties is left out.
        """
        self.rounds.known = tuple(candidates)
        wanted = self.choose(candidates)
        for part in FROM_START:
            for candidate in wanted:
                others = tuple(c.transform for c in wanted if c is not candidate)
                verdict = records.verdict_on(candidate, Status.KEPT, "on from the script's start", together=others)
                records.save_verdict(self.script.run_dir, verdict)
            self.proved = self.stack.prove(quick=True)
            rest = [c for c in wanted if transform_table.row(c.transform).part != part]
            if self.proved is None or self.proved.holds or self.proved.stack or self.script.over or not rest:
                break
            wanted = rest
        if self.proved is not None and self.proved.holds:
            self._note_proof()
            self._save_proved()
            self.proved = self.stack.confirm(self.proved)
            self.proved = self.parts.leave_one_out(self.proved)

    def prove_at_once(self) -> None:
        """What was tried as one is compared with the plain script before anything else is tried, with what feeds it, where it waits for that."""
        self.processes.on_whole = None
        fed = self._feed()
        self.proved = self.stack.prove(quick=True)
        if self.proved is None or not self.proved.holds:
            return
        self._note_proof()
        self._save_proved()
        feeds = [c for c in self.processes.on_top if c.transform in planner.RESTARTED and c is not fed]
        if fed is None and self.proved.verdict.waits_for == LOADER and (asked := self._more_workers()) is not None:
            feeds += [asked] if asked not in feeds else []
        if feeds and not self.script.over:
            before = self.proved = self.stack.with_plain(self.proved)
            self.proved = self.parts.add_on_top(self.proved, feeds)
            if self.proved is not before:
                self._save_proved()

    def _feed(self) -> Recommendation | None:
        """More workers go with what was kept as one into its first proof, where the step waits for its loader: else the clock on the wall
        tells the loader's noise, and no gain. What does not hold with them is proved without them.
        """
        run_dir = self.script.run_dir
        if not feeding.waits(records.verdicts(run_dir), self.profile):
            return None
        asked = self._more_workers()
        if asked is not None and records.untried(run_dir, [asked]):
            records.save_verdict(run_dir, records.verdict_on(asked, Status.KEPT, f"{feeding.WHY}; {records.UNDECIDED}"))
        return asked

    def _more_workers(self) -> Recommendation | None:
        """The change that is to be tried on top of the whole, or what no rule has asked for yet; None where it does not apply, or is not wanted."""
        asked = next((c for c in self.processes.on_top if c.transform == feeding.WORKERS), None)
        if asked is not None:
            return asked
        asked = feeding.more_workers()
        if any(c.transform == asked.transform for c in self.rounds.known):  # and it does not apply, or was declined
            return None
        if not (self.options.wants(asked) and self.choose([asked])):
            return None
        self.rounds.known += (asked,)
        return asked

    def _note_proof(self) -> None:
        """Something is proved by now, if it holds: the first time counts."""
        if self.proved_s is None and self.proved is not None and self.proved.holds:
            self.proved_s = self._seconds() - self.before_s

    def _save_proved(self) -> None:
        """The plan on disk has what is proved by now."""
        self.processes.proved = True
        log = self._log()
        self._write(log)
        self.script.say(
            f"proved after {self._seconds():.0f} s: {outcome.speedup(log)}; {records.PLAN_FILE} is written; the search goes on"
        )

    def conclude(self) -> tuple[TrialLog, Plan]:
        """Every candidate has a verdict, whatever ended the search, and the files have the last word."""
        script, run_dir = self.script, self.script.run_dir
        outcome.leave_unconfirmed(script, self.proved)
        tried, waiting = records.verdicts(run_dir), records.untried(run_dir, self.rounds.known)
        if not (tried or script.over or script.failed) and any(self.choose.outcome(c) is None for c in waiting):
            profiled_s = self.profiled_s - self.before_s
            script.notes.append(_too_short(self.processes.budget, script.start_s, profiled_s, self.given_s))
        for candidate in waiting:
            status, reason = self.choose.outcome(candidate) or (Status.SKIPPED, _why_open(script, self.processes))
            records.save_verdict(run_dir, records.verdict_on(candidate, status, reason))
        if self.processes.ended_early > 1:
            script.notes.append(
                f"the script ended {self.processes.ended_early} times before the search did; "
                "a longer training makes the search faster"
            )
        if script.interrupted:
            script.notes.append("interrupted: the verdicts until then are kept")
        log = self._log()
        return log, self._write(log)

    def _log(self) -> TrialLog:
        return outcome.log(
            self.script,
            self.proved,
            rounds=self.rounds.history,
            seconds=self._seconds(),
            proved_s=self.proved_s if self.proved is not None and self.proved.holds else None,
            profiled_s=self.profiled_s,
            before_s=min(self.before_s, self.profiled_s),
            complete=not self.processes.ended,
        )

    def _seconds(self) -> float:
        """What it has taken so far, the first profile included, and without the user's time for answers."""
        return time.time() - self._started - self.choose.asked_s + self.profiled_s

    def _write(self, log: TrialLog) -> Plan:
        storage.save(self.script.run_dir / records.TRIALS_FILE, log)
        plan = _plan(self.script, log, self.profile)
        planfile.write(self.script.run_dir / records.PLAN_FILE, plan)
        return plan


def _too_short(budget: Budget, start_s: float, profiled_s: float, given_s: float | None) -> str:
    """Where the time has gone when no trial came to an end, and how much there should be; `profiled_s` counts from the first step."""
    given_s = given_s or profiled_s + budget.whole_s
    needed_s = profiled_s + budget.enough_s(start_s)
    if needed_s <= given_s:  # what took longer than foreseen may do so again
        needed_s = 2 * given_s
    enough = f"{math.ceil(needed_s / 60)}m" if needed_s > 120 else f"{math.ceil(needed_s / 10) * 10}s"
    return (
        f"no trial finished: the first profile took {profiled_s:.0f} of {given_s:.0f} s, and the rest was too short for a trial and "
        f"the final comparison; try --max-time {enough}"
    )


def _why_open(script: Script, processes: SearchProcesses) -> str:
    return script.why_over or ("the script failed in the search" if script.failed else processes.why_late)


def _plan(script: Script, log: TrialLog, profile: StepProfile | None) -> Plan:
    latest = {planner.identity(v): v for v in log.verdicts}  # of a change that was tried in two rounds the later trial
    ordered = sorted(latest.values(), key=lambda v: v.status != Status.KEPT)
    return Plan(
        script=log.script,
        argv=log.argv,
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
        hashes=planfile.hashes_here(
            script.command.name,
            model=script.model_hash,
            environment=planfile.environment_text(profile.environment) if profile is not None else "",
        ),
        speedup=outcome.speedup(log),
        run=str(script.run_dir),
    )


def _interval_text(interval: Interval | None, number: int = 1) -> str:
    if interval is None:
        return ""
    of = f"the step as profiled for round {number}" if number > 1 else "the step"
    return f"{percent_text(interval.low)} to {percent_text(interval.high)} of {of}"
