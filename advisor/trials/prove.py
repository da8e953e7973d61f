"""The supervisor's side of `apply --plan`: a plan's changes proved together again, here and now, without a search.

A plan holds for the script, model, machine, torch and kernels that it was proved on. Where one of these has changed, most of a search
would find what it found before; what has to be asked again is whether the whole is still faster and trains alike. That takes four
fresh processes, the first round of a search's last phase (stack.py), where a search takes minutes. Fresh processes may also be several that
train together, in which nothing can be searched: changes are switched there between two steps of one process.
"""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Sequence
from pathlib import Path

from advisor.core import storage, transform_table
from advisor.core.errors import AdvisorError
from advisor.core.findings import Semantics
from advisor.core.plan import Plan, PlanItem
from advisor.core.verdict import Status, TrialLog, Verdict
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.relay import Relay
from advisor.trials import budget, fresh, outcome, planfile, planner, records
from advisor.trials.fresh import FreshRuns
from advisor.trials.proof import Proof
from advisor.trials.script import Launch, Say, Script
from advisor.trials.stack import StackTrial
from advisor.userfiles import owners

TO_PROVE = frozenset({Status.KEPT, Status.UNCONFIRMED})


def wanted(plan: Plan, *, only: Sequence[str] = (), skip: Sequence[str] = ()) -> Plan:
    """The plan with what is kept or unconfirmed, named in `only` where there is any, and not in `skip`; the rest is `skipped`.

    Raises:
        AdvisorError: when nothing is left to prove.
    """

    def chosen(item: PlanItem) -> PlanItem:
        if item.status not in TO_PROVE or (item.transform not in skip and (not only or item.transform in only)):
            return item
        return dataclasses.replace(item, status=Status.SKIPPED, reason="left out by --only or --skip")

    left = dataclasses.replace(plan, items=tuple(chosen(item) for item in plan.items))
    if not any(item.status in TO_PROVE for item in left.items):
        raise AdvisorError(
            "the plan has no change to prove",
            expected="an item with the status `kept` or `unconfirmed` that --only and --skip do not exclude",
            fix="Search with `advisor apply --auto`.",
        )
    return left


def prove_plan(
    command: ScriptCommand,
    plan: Plan,
    *,
    environment: str,
    max_time_s: float,
    run_dir: Path,
    say: Say,
    launch: Launch | None = None,
) -> tuple[TrialLog, Plan, int]:
    """Run what the plan keeps against the plain script in fresh runs, and write `trials.json` and `plan.yaml`.

    Of what does not hold the last changes are dropped until the rest does, as at the end of a search. The plan written is the one
    given, with what became of its items, and tied by its hashes to what is here.

    Args:
        environment: of this machine, as plans have it.
        max_time_s: no further round of runs begins after this. The first is always made.

    Returns:
        The log, the plan, and the exit code: 0 when something is kept and proved, or nothing holds; 4 when noise or time left it open;
        the script's own where it fails before it is measured.
    """
    started = time.time()
    owners.hold(run_dir)
    limits = budget.Budget.from_now(max_time_s, None)
    relay = Relay()
    script = Script(command, run_dir, launch or relay, say)
    kept = [item for item in plan.items if item.status in TO_PROVE]
    settles = any(item.transform in planner.RESTARTED for item in kept)
    runs = FreshRuns(
        script, limits.trial_s, settle_s=budget.SETTLE_S if settles else 0.0, kernel_steps=fresh.KERNEL_STEPS
    )
    known = {records.attempt(v) for v in records.verdicts(run_dir) if v.status == Status.KEPT}
    for verdict in map(_verdict, kept):
        if records.attempt(verdict) not in known:  # a search that has just kept it says more of it
            records.save_verdict(run_dir, verdict)
    proved: Proof | None = None
    try:
        proved = StackTrial(script, runs, limits, min_gain=0.0).prove()
    except KeyboardInterrupt:
        script.interrupted = True
    finally:
        relay.close()
    script.put_back()  # where Ctrl-C came in the middle of that
    outcome.leave_unconfirmed(script, proved)
    script.notes += _notes(script, proved)
    log = outcome.log(script, proved, seconds=time.time() - started)
    storage.save(run_dir / records.TRIALS_FILE, log)
    found = _plan(script, plan, log, proved, environment)
    planfile.write(run_dir / records.PLAN_FILE, found)
    unmeasured = proved is not None and not proved.verdict.plain_us and not script.interrupted
    return log, found, (unmeasured and script.code) or outcome.exit_code(log)


def _notes(script: Script, proved: Proof | None) -> list[str]:
    """What people are to know beside the verdicts."""
    if script.interrupted:
        return ["interrupted: the plan is not proved here"]
    if proved is None:
        return []
    if not proved.verdict.plain_us:
        return [f"the script's last line, in {records.OUTPUT_FILE}: {script.last_line}"] if script.last_line else []
    together = max((m.ranks for m in (*proved.plain, *proved.stack)), default=1)
    told = f"proved in {together} processes that train together; times and losses are those of rank 0"
    return [told] if together > 1 else []


def _verdict(item: PlanItem) -> Verdict:
    return Verdict(
        transform=item.transform,
        status=Status.KEPT,
        reason=item.reason,
        parameters=dict(item.parameters),
        title=transform_table.title(item.transform),
        semantics=Semantics(item.semantics),
    )


def _plan(script: Script, plan: Plan, log: TrialLog, proved: Proof | None, environment: str) -> Plan:
    now = {planner.identity(v): v for v in log.verdicts}

    def after(item: PlanItem) -> PlanItem:
        verdict = now.get(planner.identity(item)) if item.status in TO_PROVE else None
        return item if verdict is None else dataclasses.replace(item, status=verdict.status, reason=verdict.reason)

    measured = (*proved.plain, *proved.stack) if proved is not None else ()
    return dataclasses.replace(
        plan,
        script=script.command.words[0],
        argv=script.command.words[1:],
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        items=tuple(after(item) for item in plan.items),
        hashes=planfile.hashes_here(
            script.command.name,
            model=next((m.model_hash for m in measured if m.model_hash), ""),
            environment=environment,
        ),
        speedup=outcome.speedup(log),
        run=str(script.run_dir),
    )
