"""Rounds of a search: what was kept changes where the time goes, so the rules are asked again.

Half precision and the first kernels make a step several times shorter, and its shares are other ones: LayerNorm, pooling or
the first convolution, below every threshold in fp32, may then be what is left to gain. So after each pass over candidates
that kept something, the script is profiled once more with all that is kept, and what the rules recommend now is tried, with
what was tried before and whose time may have come (`planner.second_look`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from advisor.analysis.predict import predict
from advisor.core import storage, transform_table
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.core.findings import Recommendation
from advisor.core.plan import PlanItem
from advisor.core.profile import StepProfile
from advisor.core.verdict import Round, Status, Verdict
from advisor.loop.records import STEPS_FILE, StepsRecord
from advisor.profiling.after.assemble import assemble
from advisor.profiling.beside.launcher import NATIVE_FAULTS
from advisor.trials import planner, records, spent
from advisor.trials.choosing import CandidateChooser
from advisor.trials.processes import SearchProcesses
from advisor.trials.script import GRACE_S, Ended

Recommend = Callable[[StepProfile, Path], Sequence[Recommendation]]

# The first one included. Nothing is left for a fourth on the models of docs/benchmarks.
MOST = 3
# A round that has shortened the step by less than this leaves its shares as they were: nothing new to ask. A later one profiles anew what
# a profile has seen with most of it kept: three searches of ResNets on an H200 kept nothing after a second round of 17 to 22 %, in 13 to
# 40 s; one of a RegNetY whose second round saved 65 % had had four small changes below what a rule asks about.
LEAST_MOVED, LEAST_MOVED_LATER = 0.1, 0.3
# Short windows: shares of a step are wanted, not a proof. The warm-up is what discovery and captures need to settle.
WARMUP, STEPS, TRACED = 6, 8, 2
# A further round is begun only with this much time left before the stack's turn: a start with the captures of the kept
# changes takes 10 to 20 s on an H200, a trial about 10 s.
LEAST_S = 30.0
PROFILE_TIMEOUT_S = 120.0
FOLDER = "round"  # `round-2/` in the run folder has the second round's profile and findings


@dataclass(slots=True, eq=False)
class Rounds:
    """`run` once; `known` and `history` then hold all candidates and the rounds made, also when it is interrupted.

    choose: what of these to try. recommend: what the rules say to a profile, which lies in the folder given; None leaves
    later rounds to `planner.second_look` alone.
    """

    processes: SearchProcesses
    choose: CandidateChooser
    recommend: Recommend | None
    known: tuple[Recommendation, ...] = ()  # in the order of trial
    history: list[Round] = field(default_factory=list)

    def run(self, first: Sequence[Recommendation], profile: StepProfile | None) -> None:
        """Try the candidates, then what the step with the kept changes asks for, while that keeps something and time is left."""
        script, run_dir = self.processes.script, self.processes.script.run_dir
        number, step_us, folder = 1, _step_us(profile), ""
        found = self.first(first)
        waiting = tuple(c for c in first if c not in found)
        self.known += tuple(first)
        on: tuple[PlanItem, ...] = ()
        while True:
            self.history.append(Round(number=number, step_us=step_us, kept=_names(on), folder=folder))
            self._take_turns(found)
            if waiting and not self.processes.ended and not self._step_has_changed(number, on, waiting):
                # It is what it was, and so are the predictions of what waits.
                self._take_turns(waiting)
                waiting = ()
            ended = self.processes.ended or self.choose.over or number == MOST
            if ended or not self._step_has_changed(number, on, waiting):
                return
            number, on = number + 1, records.kept_items(run_dir)
            self.processes.on_whole = None  # what later rounds bring out comes on top of what is kept
            steps_s = (WARMUP + STEPS) * self.processes.left * _step_us(profile) / 1e6
            if self.processes.deadline - time.time() < LEAST_S + steps_s:
                script.notes.append(f"no time was left for round {number}, a new profile with the kept changes")
                self._take_turns([c for c in waiting if c.transform not in planner.DEAR])
                return
            again, folder = None, ""
            asked: Sequence[Recommendation] = ()
            if self.recommend is not None and profile is not None:
                named = f"{FOLDER}-{number}"
                again = self._profile(on, profile.environment, run_dir / named, number)
                if script.over:
                    return
                if again is not None:
                    asked, folder = self.recommend(again, run_dir / named), named
            step_us = _step_us(again)
            min_gain = self.processes.min_gain
            found = candidates(number, records.verdicts(run_dir), self.known, asked, again, min_gain, waiting)
            chosen = {planner.identity(c) for c in found}
            records.skip(run_dir, (c for c in waiting if planner.identity(c) not in chosen), planner.TOO_SMALL)
            self.known = (*(c for c in self.known if c not in waiting), *found)
            # What is dear waits for the step that the rest leaves: predictions for this one have a part of the same time in them.
            waiting = tuple(c for c in found if c.transform in planner.DEAR) if number < MOST else ()
            if not found:
                return
            found = tuple(c for c in found if c not in waiting)

    @staticmethod
    def first(candidates: Sequence[Recommendation]) -> tuple[Recommendation, ...]:
        """Of all candidates, those whose turn comes first: what is dear waits for what these leave."""
        return tuple(c for c in candidates if c.transform not in planner.DEAR)

    def _take_turns(self, found: Sequence[Recommendation]) -> None:
        """Try what is chosen of these, in the running round."""
        chosen = self.choose(found)
        tried = (*self.history[-1].tried, *_names(chosen))
        self.history[-1] = dataclasses.replace(self.history[-1], tried=tried)
        self.processes.try_all(chosen)

    def _step_has_changed(self, number: int, on: Sequence[PlanItem], waiting: Sequence[Recommendation]) -> bool:
        """Whether round `number`, begun with `on`, has kept what another round may build on, or what has had its turn gets another."""
        run_dir = self.processes.script.run_dir
        if set(_names(records.kept_items(run_dir))) <= set(_names(on)):
            return False
        verdicts = records.verdicts(run_dir)
        # A profile is cheap beside the trial of what waits, which is to be judged by the step that it would meet.
        least = LEAST_MOVED if number == 1 or waiting else LEAST_MOVED_LATER
        return moved(verdicts, number, least) or bool(planner.second_look(verdicts, self.known))

    def _profile(
        self, kept: tuple[PlanItem, ...], machine: Environment, folder: Path, number: int
    ) -> StepProfile | None:
        """A short profile of the script with these changes on, in a fresh process; None, with a note, when there is none."""
        script, deadline = self.processes.script, self.processes.deadline
        script.say(
            f"round {number}: profiling the script with the kept changes ({', '.join(map(transform_table.title, _names(kept)))})"
        )
        reason, ended, found = "", None, None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            ended = script.start(
                "profile",
                phase=spent.ROUNDS,
                run_dir=str(folder),
                files_dir=str(script.run_dir),
                kept=kept,
                warmup=WARMUP,
                steps=STEPS,
                detail_steps=TRACED,
                counters=False,
                deadline_unix_s=deadline,
                timeout_s=min(self.processes.budget.trial_s, PROFILE_TIMEOUT_S) + GRACE_S,
            )
            if ended.failed and not _whole(folder, ended):
                late = ended.exit.timed_out
                reason = "it took too long" if late else f"the script ended with exit code {ended.exit.code}"
            found = assemble(folder, machine, exit_code=ended.exit.code)
        except (AdvisorError, OSError) as error:
            reason = reason or str(error)
        if script.over:
            return None
        eager = tuple(item for item in kept if item.transform != planner.GRAPHS)
        if reason and ended is not None and ended.exit.signal in NATIVE_FAULTS and len(eager) < len(kept):
            # The tracer has been seen to die beside captured graphs; replays are paused in the traced window anyway.
            script.notes.append(
                f"round {number}: the process died of signal {ended.exit.signal}; profiled without CUDA graphs"
            )
            return self._profile(eager, machine, folder, number)
        reason = (ended.fault if ended is not None else "") or reason
        if found is None or (found.step_us is None and found.wall_us is None) or not found.kernels:
            reason = reason or "too little was measured"
        if reason:
            script.notes.append(f"round {number}: the script with the kept changes could not be profiled: {reason}")
            script.say(script.notes[-1])
            return None
        return found


def _whole(folder: Path, ended: Ended) -> bool:
    """Whether all was measured and written when native code ended the process: a DeepLabV3+ that had been traced aborted at its exit, each
    time."""
    try:
        measured = storage.load(folder / STEPS_FILE, StepsRecord).complete
    except AdvisorError:
        return False
    return measured and ended.exit.signal in NATIVE_FAULTS and not ended.fault


def moved(verdicts: Sequence[Verdict], number: int, least: float) -> bool:
    """Whether what round `number` kept has taken `least` of the step, or it is not known how much."""
    kept = [v for v in verdicts if v.round == number and v.status == Status.KEPT]
    left = records.left(kept)
    return bool(kept) and (left is None or left <= 1.0 - least)


def candidates(
    number: int,
    verdicts: Sequence[Verdict],
    known: Sequence[Recommendation],
    recommended: Sequence[Recommendation],
    profile: StepProfile | None,
    min_gain: float,
    waiting: Sequence[Recommendation] = (),
) -> tuple[Recommendation, ...]:
    """What round `number` tries, in order, each marked with the round.

    New is what no earlier round had among its candidates (`known`). What had its turn gets another when
    `planner.second_look` says so. What is predicted to stay below `min_gain` is left out (`planner.worth`); predictions are for `profile`'s
    step, and None without a profile. `waiting` has had no turn yet and is judged by its prediction for this step as well.
    """
    recommended = [dataclasses.replace(r, round=number) for r in recommended]
    before = {planner.identity(item) for item in known}
    kept = {v.transform for v in verdicts if v.status == Status.KEPT}
    new = [r for r in recommended if planner.identity(r) not in before and r.transform not in kept]
    asked_again = {planner.identity(r): r for r in recommended}
    latest = {planner.identity(r): asked_again.get(planner.identity(r), r) for r in known}
    again = []
    for candidate in (*waiting, *planner.second_look(verdicts, tuple(latest.values()), _step_us(profile))):
        found = asked_again.get(planner.identity(candidate))
        if found is None:
            predicted = predict(profile, candidate.transform, candidate.parameters) if profile is not None else None
            found = dataclasses.replace(candidate, predicted=predicted, round=number)
        again.append(found)
    return planner.order(planner.worth([*new, *again], min_gain), profile)


def _step_us(profile: StepProfile | None) -> float:
    step = profile.step_us or profile.wall_us if profile is not None else None
    return step.median if step is not None else 0.0


def _names(items: Sequence[PlanItem | Recommendation]) -> tuple[str, ...]:
    return tuple(item.transform for item in items)
