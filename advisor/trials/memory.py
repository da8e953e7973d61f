"""`apply --goal memory`: a step's peak made smaller, for as little time as it takes.

One process shows what a step holds and what each module costs to compute again (profiling/inside/held.py, analysis/activations.py). Sets of
modules that should save half of the peak, 30 and 15 % are tried in fresh processes, the largest first: one that is watched, which tells its
peak, and one that is timed, beside the plain script's. Kept is the first that takes no more time than allowed, holds less by a twentieth at
least, and trains alike; or, where a limit is given, the last that fits below it and the cheapest so. Allocator settings are tried on top.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from advisor.analysis import activations
from advisor.core import storage, transform_table
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.held import HELD_FILE, MemoryLook
from advisor.core.plan import Plan, PlanItem
from advisor.core.units import bytes_text, percent_text, time_text
from advisor.core.verdict import Check, Status, TrialLog, Verdict
from advisor.profiling.beside import launcher
from advisor.profiling.beside.command import ScriptCommand
from advisor.trials import budget, fresh, losses, outcome, planfile, proof, records, spent
from advisor.trials.fresh import FreshRuns
from advisor.trials.records import Measurement
from advisor.trials.script import GRACE_S, Say, Script
from advisor.userfiles import owners

SHARES = (0.5, 0.3, 0.15)  # of the peak, that are aimed at
LEAST_SAVED = 0.05
LOOK_WARMUP = 6  # optimizers have their state by then


@dataclass(slots=True, eq=False)
class MemoryGoal:
    """One run of it."""

    script: Script
    runs: FreshRuns
    cost: float  # of the step's time, that memory may take at most
    limit_bytes: int  # 0: as little as possible
    say: Say
    plain: Measurement | None = None
    before: MemoryLook | None = None
    now: MemoryLook | None = None  # with what is kept
    kept: list[PlanItem] = field(default_factory=list)

    def search(self) -> None:
        """Try what makes the step hold less, until one does; allocator settings on top of it.

        Raises:
            AdvisorError: where the script shows no step.
        """
        self.say("watching what a step holds")
        self.before = self.now = watched(self.script, ())
        if self.before is None:
            raise AdvisorError(
                f"no step could be watched ({self.script.last_line or 'the script ended early'})",
                exit_code=ExitCode.INCONCLUSIVE,
            )
        self.say("timing the script as it is")
        self.plain = self.runs.measure(spent.MEMORY, ())
        for item, told in sets(self.before, self.limit_bytes):
            if self._keeps(item, told):
                break
        if self.before.device == "cuda":
            self._keeps(PlanItem(transform="expandable_segments", status=Status.KEPT, semantics="exact"), "")

    def _keeps(self, item: PlanItem, told: str) -> bool:
        verdict, look = self.tried(item, self.kept, told)
        records.save_verdict(self.script.run_dir, verdict)
        self.say(f"{verdict.title}: {verdict.status}, {verdict.reason}")
        if verdict.status != Status.KEPT:
            return False
        self.kept.append(item_of(verdict))
        self.now = look
        return True

    def tried(self, item: PlanItem, kept: Sequence[PlanItem], told: str) -> tuple[Verdict, MemoryLook | None]:
        """The verdict on one change, on top of what is kept, and what a step holds with it."""
        self.say(f"trying {transform_table.title(item.transform)}{told}")
        items = (*kept, item)
        look = watched(self.script, items)
        if look is None or item.transform not in look.applied:
            return _verdict(
                item, Status.FAILED, f"the script did not run with it: {self.script.last_line or 'no step was seen'}"
            ), None
        took = self.runs.measure(spent.MEMORY, items)
        if took is None or self.plain is None or self.before is None:
            return _verdict(item, Status.FAILED, "no step was timed with it"), None
        ratio = proof.ratio([took], [self.plain], flow=False).bounds
        alike = losses.compare([self.plain.losses], [took.losses])
        fewer = 1 - _size(look, item) / max(1, _size(self.before, item))
        point = ratio[1] if ratio is not None else float("inf")
        reason = (
            f"{bytes_text(_size(self.before, item))} → {bytes_text(_size(look, item))} ({percent_text(fewer)} less) "
            f"at {percent_text(point - 1)} more time; {alike.detail}"
        )
        fits = self.limit_bytes > 0 and look.most_bytes <= self.limit_bytes
        status = Status.KEPT if fewer >= LEAST_SAVED and (fits or point - 1 <= self.cost) else Status.REVERTED
        if alike.passed is False:
            status = Status.FAILED
        verdict = _verdict(item, status, reason)
        return dataclasses.replace(
            verdict,
            numerics=alike,
            effect=Check(passed=fewer > 0, detail=f"{percent_text(fewer)} less memory"),
            memory_delta_bytes=_size(look, item) - _size(self.before, item),
        ), look


def reach(
    command: ScriptCommand, run_dir: Path, *, cost: float, limit_bytes: int, environment: str, say: Say
) -> tuple[TrialLog, Plan, MemoryLook, int]:
    """Make the script hold less, and write `trials.json` and `plan.yaml`.

    Args:
        cost: of the step's time that it may take at most: 0.05 for a twentieth.
        limit_bytes: what a step may hold; 0 for as little as `cost` buys.

    Raises:
        AdvisorError: where the script shows no step.
    """
    owners.hold(run_dir)
    script = Script(command, run_dir, launcher.launch, say)
    runs = FreshRuns(script, budget.Budget.from_now(600.0, None).trial_s)
    goal = MemoryGoal(script, runs, cost, limit_bytes, say)
    try:
        goal.search()
    except KeyboardInterrupt:
        script.interrupted = True
    finally:
        script.put_back()
    kept, now = goal.kept, goal.now
    plan = Plan(
        script=command.words[0],
        argv=command.words[1:],
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        items=tuple(kept),
        hashes=planfile.hashes_here(
            command.name, model=goal.plain.model_hash if goal.plain else "", environment=environment
        ),
        run=str(run_dir),
    )
    log = outcome.log(script, None, seconds=0.0)
    if kept and now is not None and goal.before is not None:
        notes = (
            f"a step held {bytes_text(goal.before.most_bytes)} at its peak, and holds {bytes_text(now.most_bytes)}",
            *log.notes,
        )
        log = dataclasses.replace(log, notes=notes)
    storage.save(run_dir / records.TRIALS_FILE, log)
    planfile.write(run_dir / records.PLAN_FILE, plan)
    assert goal.before is not None
    fits = not limit_bytes or (now is not None and now.most_bytes <= limit_bytes)
    return log, plan, goal.before, int(ExitCode.OK if kept and fits else ExitCode.INCONCLUSIVE)


def watched(script: Script, kept: Sequence[PlanItem]) -> MemoryLook | None:
    """What one step of a fresh process holds with these changes; None where none was seen."""
    path = script.run_dir / HELD_FILE
    path.unlink(missing_ok=True)
    script.start(
        "memory",
        phase=spent.MEMORY,
        kept=tuple(kept),
        warmup=LOOK_WARMUP,
        seed=fresh.SEED,
        timeout_s=fresh.TIMEOUT_S + GRACE_S,
    )
    if script.interrupted:
        raise KeyboardInterrupt
    try:
        return storage.load(path, MemoryLook)
    except AdvisorError:
        return None


def sets(look: MemoryLook, limit_bytes: int) -> list[tuple[PlanItem, str]]:
    """Sets of modules to try in turn."""
    wanted = [int(share * look.most_bytes) for share in SHARES]
    if limit_bytes:
        short = look.most_bytes - limit_bytes
        wanted = [short, int(1.3 * short), look.most_bytes] if short > 0 else []
    found: list[tuple[PlanItem, str]] = []
    ways = {"recompute_norms": activations.renewed, "checkpoint_activations": activations.recompute}
    for name, nbytes in ((name, nbytes) for name in ways for nbytes in wanted):
        plan = ways[name](look, nbytes)
        modules = ",".join(plan.modules)
        if not modules or any(item.parameters["modules"] == modules for item, _ in found):
            continue
        told = f", {len(plan.modules)} modules: {bytes_text(plan.saved_bytes)} and {time_text(plan.added_us)} predicted"
        item = PlanItem(
            transform=name,
            status=Status.KEPT,
            parameters={"modules": modules},
            semantics="exact",
            predicted=f"{bytes_text(plan.saved_bytes)} less, {plan.added_us / max(1.0, look.step_us):.1%} more time",
        )
        found.append((item, told))
    return found


def _size(look: MemoryLook, item: PlanItem) -> int:
    """What the change is to make smaller: reserved memory for the allocator's settings, else the peak."""
    return look.reserved_bytes if item.transform == "expandable_segments" else look.most_bytes


def _verdict(item: PlanItem, status: Status, reason: str) -> Verdict:
    row = transform_table.row(item.transform)
    return Verdict(
        transform=item.transform,
        status=status,
        reason=reason,
        parameters=dict(item.parameters),
        title=row.title,
        semantics=row.semantics,
        matched=tuple(name for name in item.parameters.get("modules", "").split(",") if name),
    )


def item_of(verdict: Verdict) -> PlanItem:
    return PlanItem(
        transform=verdict.transform,
        status=Status.KEPT,
        parameters=dict(verdict.parameters),
        semantics=verdict.semantics.value,
        reason=verdict.reason,
        measured=verdict.effect.detail if verdict.effect is not None else "",
    )
