"""Training with a proven plan, as long as it fits what it was proved on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.plan import Plan, PlanItem
from advisor.core.transform_table import having
from advisor.core.verdict import Status
from advisor.distributed import starting
from advisor.distributed.fallen import Fallen
from advisor.distributed.place import REFUSED
from advisor.loop.session import DISABLE_VARIABLE, Session, disabled
from advisor.profiling.beside import launcher
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.machine import environment
from advisor.trials import planfile, records
from advisor.trials.script import Launch, Say

# Transforms that put bundled CUDA sources in place: their proof is of those sources.
_OWN_KERNELS = having(lambda row: row.family)


def run_plan(
    command: ScriptCommand,
    path: Path,
    plan: Plan,
    *,
    run_dir: Path,
    strict: bool = False,
    also: Sequence[PlanItem] = (),
    say: Say,
    launch: Launch = launcher.launch,
) -> int:
    """Train with the plan to the end; returns the script's own exit code.

    Another machine, torch or model: the plan's proof does not hold, so the plain script trains, and why is said. Another
    script text alone is said too; each item is still matched against the live model. So is, at its end, that no step was seen to
    apply the plan at: folds that train in processes of their own are not followed.

    `also`: changes that the user has asked for by name, whatever the plan says.

    Raises:
        AdvisorError: with `strict`, when anything has changed since the plan was proved.
    """
    kept = (*_fitting(command, path, plan, strict, say), *also)
    if not kept:
        waiting = sum(item.status == Status.UNCONFIRMED for item in plan.items)
        settle = (
            f" ({waiting} are not confirmed in fresh runs: `advisor apply --plan {path}` settles it)" if waiting else ""
        )
        say(f"the plan has no change to apply{settle}; the plain script trains")
    session = Session(
        mode="run",
        run_dir=str(run_dir),
        script=command.words[0],
        argv=command.words[1:],
        kept=kept,
        strict=strict,
        model_hash=plan.hashes.model,
    )
    planfile.write(run_dir / records.PLAN_FILE, plan)
    events: set[object] = set()
    fallen = Fallen()

    def note(event: dict[str, Any]) -> None:
        fallen.note(event)
        events.add(event.get("event"))

    ended = launch(command, session, on_progress=note)
    if fallen.rank is not None:
        log = f"; its output: {starting.log_of(run_dir, fallen.rank)}" if fallen.rank else ""
        say(f"{fallen.told}{log}")
    if kept:
        _tell_end(events, ended.fault, say)
    return int(ExitCode.USAGE) if REFUSED in events else ended.code


def _fitting(command: ScriptCommand, path: Path, plan: Plan, strict: bool, say: Say) -> tuple[PlanItem, ...]:
    """What is kept, as far as its proof holds here.

    Raises:
        AdvisorError: with `strict`, when anything has changed since the plan was proved.
    """
    kept = tuple(item for item in plan.items if item.status == Status.KEPT)
    own_kernels = tuple(item for item in kept if item.transform in _OWN_KERNELS)
    now = planfile.hashes_here(command.name, environment=environment_text())
    changed = planfile.mismatches(plan, command.name, now, uses_kernels=bool(own_kernels))
    if changed and strict:
        raise AdvisorError(
            f"{path} does not fit: " + "; ".join(changed),
            expected="what it was proved on",
            fix=f"Prove it again with `advisor apply --plan {path}`, or leave --strict out.",
        )
    for change in changed:
        say(f"plan: {change}")
    if plan.hashes.environment and now.environment and plan.hashes.environment != now.environment:
        say(f"the plan is not proved here, so the plain script trains; prove it with `advisor apply --plan {path}`")
        return ()
    if plan.hashes.kernels and plan.hashes.kernels != now.kernels and own_kernels:
        without = ", ".join(item.transform for item in own_kernels)
        say(f"training without {without}; `advisor apply --plan {path}` proves the rest here")
        return tuple(item for item in kept if item not in own_kernels)
    return kept


def _tell_end(events: set[object], fault: str, say: Say) -> None:
    """Why the script has trained without the plan, if it has."""
    if disabled():
        say(f"{DISABLE_VARIABLE} is set: the script has trained without the plan")
    elif fault:
        which = "after the plan was on" if "applied" in events else "which has trained without the plan"
        say(f"advisor switched itself off in the script, {which}: {fault}")
    elif "applied" not in events:
        say(
            "too few training steps were seen: the script has trained without the plan's changes to models and "
            "optimizers (advisor follows processes that the script starts only if they join a process group)"
        )


def environment_text() -> str:
    try:
        return planfile.environment_text(environment.probe())
    except AdvisorError:
        return ""
