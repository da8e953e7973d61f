"""`advisor apply --auto` of a script that starts its processes itself: torchrun, mp.spawn, a framework's launcher."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.core import storage
from advisor.core.findings import Findings, Outcome, Recommendation
from advisor.core.profile import StepProfile
from advisor.pipeline.applied import ApplyResult, plan_beside
from advisor.pipeline.shared import Say, write_report

if TYPE_CHECKING:
    from advisor.profiling.beside.command import ScriptCommand
    from advisor.trials.options import SearchOptions

# Of the time that is left behind the profile, what the search has; the rest is for fresh processes that prove what it keeps.
SEARCH_SHARE, LEAST_SEARCH_S = 0.6, 60.0
START_SHARE = 0.5  # of what is left then, for what needs fresh starts


def search_script(
    command: ScriptCommand,
    run_dir: Path,
    recommendations: Sequence[Recommendation],
    profiled: tuple[StepProfile, Findings],
    options: SearchOptions,
    *,
    until_s: float,
    say: Say,
) -> ApplyResult:
    """Search the script in all its processes at once, and prove what is kept in fresh ones.

    Args:
        until_s: `time.monotonic()` at which no further run begins.
    """
    from advisor.trials import in_ranks, planfile, planner
    from advisor.trials.prove import prove_plan

    began = time.monotonic()
    measured, found = profiled
    say(f"the script trains in {measured.model.world_size} processes: each change is tried in all of them at once")
    candidates = in_ranks.switchable(planner.order(recommendations, measured)) + in_ranks.how_sent()
    options = replace(options, time_s=max(LEAST_SEARCH_S, SEARCH_SHARE * (until_s - began)))
    searched = in_ranks.search(command, candidates, (), run_dir, options, say=say)
    fired = [finding.rule for finding in found.findings if finding.outcome is Outcome.FIRED]
    started = in_ranks.from_the_start(fired, measured.model.backend)
    options = replace(options, time_s=max(0.0, START_SHARE * (until_s - time.monotonic())))
    searched = in_ranks.start_anew(command, started, searched, run_dir, options, say=say)
    environment = planfile.environment_text(measured.environment)
    plan = in_ranks.plan_of(command, searched, run_dir, environment=environment)
    if searched.kept and not searched.interrupted:
        left_s = max(0.0, until_s - time.monotonic())
        log, plan, exit_code = prove_plan(
            command, plan, environment=environment, max_time_s=left_s, run_dir=run_dir, say=say
        )
    else:
        log, exit_code = in_ranks.log_of(searched, seconds=time.monotonic() - began)
        planfile.write(run_dir / "plan.yaml", plan)
    log = replace(log, notes=(*filter(None, (searched.early,)), *log.notes))
    storage.save(run_dir / "trials.json", log)
    write_report(run_dir, measured, found, log)
    return ApplyResult(
        run_dir=run_dir,
        exit_code=exit_code,
        profile=measured,
        findings=found,
        log=log,
        plan=plan,
        plan_file=plan_beside(plan, run_dir, say),
    )
