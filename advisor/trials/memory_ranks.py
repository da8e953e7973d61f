"""`apply --goal memory --gpus N`: what each of N ranks holds, made smaller: by shares of the state, of the weights, and by recomputation.

Ways are tried in the order of what they are foretold to cost: each rank holds all (DDP), ZeRO-1, FSDP2 within halves, FSDP2. Of each a run of all ranks is held
against one process, as any run of `--gpus` is, and one step of rank 0 is watched. With a limit the first way that fits is kept; without,
the one that holds least for the time that it may cost. Modules are recomputed on top where that is not enough.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from advisor.analysis import sharing
from advisor.analysis.activations import MemoryAlternative
from advisor.analysis.scaling import Link
from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.held import MemoryLook
from advisor.core.plan import Plan, PlanItem
from advisor.core.units import bytes_text, percent_text
from advisor.core.verdict import Status, TrialLog
from advisor.distributed import place, starting
from advisor.profiling.beside import launcher
from advisor.profiling.beside.command import ScriptCommand
from advisor.trials import budget, fresh, outcome, planfile, proof, ranks, records
from advisor.trials.fresh import FreshRuns
from advisor.trials.memory import LEAST_SAVED, MemoryGoal, item_of, sets, watched
from advisor.trials.ranks import RanksProof
from advisor.trials.script import Say, Script
from advisor.userfiles import owners

WAYS = ("", place.ZERO1, place.HYBRID, place.FSDP2)
NAMES = {"": "DDP", place.ZERO1: "ZeRO-1", place.HYBRID: "FSDP2 within halves", place.FSDP2: "FSDP2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`cost`: of the step's time, that memory may take at most. `nbytes`: what a rank may hold; 0 for as little as `cost` buys."""

    cost: float = 0.05
    nbytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One way, seen."""

    way: place.RankWay
    script: Script
    proof: RanksProof
    look: MemoryLook


def reach_on_ranks(
    command: ScriptCommand, count: int, run_dir: Path, limits: Limits, link: Link, *, environment: str, say: Say
) -> tuple[TrialLog, Plan, int]:
    """Make each of `count` ranks hold less, prove it, and write `trials.json` and `plan.yaml`.

    Raises:
        AdvisorError: where the script shows no step, or its ranks do not train as one process does.
    """
    owners.hold(run_dir)
    alone = Script(command, run_dir, launcher.launch, say)
    notes: list[str] = []
    kept: list[PlanItem] = []
    try:
        one = ranks.reference(alone, seed=fresh.SEED)
        tried = [_tried(command, count, run_dir, place.RankWay(), one, say)]
        foretold = {row.name: row for row in sharing.ways(tried[0].look, count, link)}
        for shard in WAYS[1:]:
            if shard == place.HYBRID and not ranks.halves(count):
                continue
            if limits.nbytes and tried[-1].look.most_bytes <= limits.nbytes:
                break
            try:
                tried.append(_tried(command, count, run_dir, place.RankWay(shard=shard), one, say))
            except AdvisorError as error:
                notes.append(f"{NAMES[shard]}: {error}")
        notes += [_told(each, tried[0], foretold.get(_row(each.way.shard, count))) for each in tried]
        for note in notes:
            say(note)
        chosen = _chosen(tried, limits)
        held = _recompute(chosen, run_dir, limits, kept, say)
    finally:
        alone.put_back()
    plan = dataclasses.replace(
        ranks.bare_plan(command, chosen.proof, run_dir, chosen.way, environment=environment), items=tuple(kept)
    )
    notes.append(f"a rank held {bytes_text(tried[0].look.most_bytes)} at its peak, and holds {bytes_text(held)}")
    log = outcome.log(chosen.script, None, seconds=0.0)
    log = dataclasses.replace(log, script=command.words[0], argv=command.words[1:], notes=(*notes, *log.notes))
    storage.save(run_dir / records.TRIALS_FILE, log)
    planfile.write(run_dir / records.PLAN_FILE, plan)
    done = held <= limits.nbytes if limits.nbytes else bool(kept or chosen.way.shard)
    return log, plan, int(ExitCode.OK if done else ExitCode.INCONCLUSIVE)


def _tried(
    command: ScriptCommand,
    count: int,
    run_dir: Path,
    way: place.RankWay,
    one: tuple[records.Measurement, ...],
    say: Say,
) -> Tried:
    say(f"{count} ranks by {NAMES[way.shard]}, against one process")
    together = starting.on_ranks(command, count, run_dir, seed=fresh.SEED, way=way)
    script = Script(together, run_dir, launcher.launch, say)
    found = ranks.compared(one, script, count, seed=fresh.SEED, way=way)
    look = watched(script, ())
    if look is None:
        raise AdvisorError(
            f"no step could be watched ({script.last_line or 'the script ended early'})",
            exit_code=ExitCode.INCONCLUSIVE,
        )
    return Tried(way=way, script=script, proof=found, look=look)


def _row(shard: str, count: int) -> str:
    """What analysis/sharing.py calls it."""
    return sharing.halves(count) if shard == place.HYBRID else f"{NAMES[shard]} on {count}"


def _cost(each: Tried, plain: Tried) -> float:
    """Of the step's time, more than by DDP."""
    bounds = proof.ratio(list(each.proof.all), list(plain.proof.all), flow=False).bounds
    return bounds[1] - 1 if bounds is not None else float("inf")


def _told(each: Tried, plain: Tried, foretold: MemoryAlternative | None) -> str:
    told = f"{NAMES[each.way.shard]}: a rank holds {bytes_text(each.look.most_bytes)}"
    if foretold is not None:
        off = abs(foretold.nbytes / max(1, each.look.most_bytes) - 1)
        told += f" (predicted {bytes_text(foretold.nbytes)}, {percent_text(off)} off)"
    if each is not plain:
        told += f", at {percent_text(_cost(each, plain))} more time than DDP"
    return f"{told}; {each.proof.check.detail}"


def _chosen(tried: list[Tried], limits: Limits) -> Tried:
    if limits.nbytes:
        fitting = [each for each in tried if each.look.most_bytes <= limits.nbytes]
        return fitting[0] if fitting else min(tried, key=lambda each: each.look.most_bytes)
    best = tried[0]
    for each in tried[1:]:
        less = 1 - each.look.most_bytes / max(1, best.look.most_bytes)
        if less >= LEAST_SAVED and _cost(each, tried[0]) <= limits.cost:
            best = each
    return best


def _recompute(chosen: Tried, run_dir: Path, limits: Limits, kept: list[PlanItem], say: Say) -> int:
    """Modules recomputed on top, where the limit asks for it or none was given; what a rank holds then. `kept` has what is kept."""
    held = chosen.look.most_bytes
    if limits.nbytes and held <= limits.nbytes:
        return held
    runs = FreshRuns(chosen.script, budget.Budget.from_now(600.0, None).trial_s)
    goal = MemoryGoal(chosen.script, runs, limits.cost, limits.nbytes, say, chosen.proof.all[0], chosen.look)
    for item, told in sets(chosen.look, limits.nbytes):
        verdict, look = goal.tried(item, (), told)
        records.save_verdict(run_dir, verdict)
        say(f"{verdict.title}: {verdict.status}, {verdict.reason}")
        if verdict.status == Status.KEPT and look is not None:
            kept.append(item_of(verdict))
            return look.most_bytes
    return held
