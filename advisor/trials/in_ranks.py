"""The supervisor's side of a search in all ranks (across.py): what is tried, how often the script is started for it, and what is kept.

A rank that dies, hangs or lags ends that start, by its name. What was on trial then has failed, and once more the script is started for what is
left.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from advisor.core import transform_table
from advisor.core.errors import ExitCode
from advisor.core.findings import Recommendation
from advisor.core.plan import Plan, PlanItem
from advisor.core.units import counted, percent_text
from advisor.core.verdict import Status, TrialLog, Verdict
from advisor.distributed import place
from advisor.profiling.beside import launcher
from advisor.profiling.beside.command import ScriptCommand
from advisor.trials import outcome, planfile, planner, records, spent
from advisor.trials.fresh import FreshRuns
from advisor.trials.options import SearchOptions
from advisor.trials.pairs import try_in_pairs
from advisor.trials.script import GRACE_S, Launch, Say, Script
from advisor.userfiles import owners

STARTS = 2
TRIAL_S = 120.0  # what a first step with a change may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What is kept, and what ended it early; "" where nothing did. `script`: as the search has left it; None where nothing was tried."""

    kept: tuple[PlanItem, ...] = ()
    early: str = ""
    script: Script | None = field(default=None, repr=False)

    @property
    def interrupted(self) -> bool:
        """Ctrl-C came."""
        return self.script is not None and self.script.interrupted


def how_sent(passes: int = 1) -> tuple[Recommendation, ...]:
    """What only several ranks can be searched for, in the order of trial; `passes`: backward passes of a step."""
    found: list[tuple[str, dict[str, str]]] = [
        ("ddp_bucket_views", {}),
        *(("ddp_buckets", {"mb": size}) for size in ("100", "10")),
        ("ddp_static_graph", {}),
        ("ddp_bf16_gradients", {}),
        *(("cpu_affinity", {"cores": which}) for which in ("node", "share")),
    ]
    if passes > 1:
        found.insert(0, ("ddp_no_sync", {"passes": str(passes)}))
    return tuple(_asked(name, parameters, "tried in all ranks") for name, parameters in found)


def from_the_start(fired: Collection[str], backend: str) -> tuple[Recommendation, ...]:
    """What must be on before the ranks are connected, where they wait for what NCCL sends. One of them at most is kept.

    Args:
        fired: ids of the rules that have fired.
        backend: of the process group.
    """
    if backend != "nccl" or "communication-exposed" not in fired:
        return ()
    settings = ({"NCCL_MAX_CTAS": "8"}, {"NCCL_MIN_CTAS": "32"}, {"NCCL_PROTO": "Simple"})
    return tuple(_asked("nccl_settings", parameters, "communication is exposed") for parameters in settings)


def _asked(name: str, parameters: Mapping[str, str], reason: str) -> Recommendation:
    """To try this transform, which no rule has recommended."""
    row = transform_table.row(name)
    return Recommendation(
        transform=name, title=row.title, reason=reason, parameters=dict(parameters), semantics=row.semantics
    )


def switchable(recommendations: Iterable[Recommendation]) -> tuple[Recommendation, ...]:
    """Of what a profile recommends, what can be switched in a running loop within seconds."""
    rows = ((c, transform_table.row(c.transform)) for c in recommendations)
    return tuple(c for c, row in rows if row.live and not row.dear and c.transform not in planner.DEAR)


def found_kept(verdicts: Iterable[Verdict]) -> tuple[PlanItem, ...]:
    """What a plan has of them: of one transform's settings the last, which was tried on top of the others."""
    last = {v.transform: v for v in verdicts if v.status == Status.KEPT}
    return tuple(
        PlanItem(
            transform=v.transform,
            status=Status.KEPT,
            parameters=dict(v.parameters),
            semantics=v.semantics.value,
            reason=v.reason,
            measured=f"{percent_text(v.gain.low)} to {percent_text(v.gain.high)} of the step of the slowest rank"
            if v.gain is not None
            else "",
        )
        for v in last.values()
    )


def search(
    command: ScriptCommand,
    candidates: Sequence[Recommendation],
    kept: Sequence[PlanItem],
    run_dir: Path,
    options: SearchOptions,
    *,
    say: Say,
    launch: Launch | None = None,
) -> Searched:
    """Try these in all ranks at once, on top of `kept`.

    Where a rank is lost its name is said, and what was kept until then stays.
    """
    wanted = list({records.attempt(c): c for c in candidates if options.wants(c)}.values())
    if not wanted:
        return Searched()
    say(f"{counted(len(wanted), 'change')} to try in all ranks")
    owners.hold(run_dir)
    script = Script(command, run_dir, launch or launcher.launch, say)
    early = _tried(script, wanted, kept, options)
    script.put_back()
    why = early or script.why_over or "no time was left, or the script ended before"
    records.skip(run_dir, records.untried(run_dir, wanted), why)
    mine = set(map(records.attempt, wanted))
    verdicts = (v for v in records.verdicts(run_dir) if records.attempt(v) in mine)
    return Searched(kept=found_kept(verdicts), early=early, script=script)


def _tried(script: Script, wanted: Sequence[Recommendation], kept: Sequence[PlanItem], options: SearchOptions) -> str:
    """Start the script for them, and once more where a rank was lost in a trial; what ended the search early."""
    run_dir, deadline, early = script.run_dir, time.time() + options.time_s, ""
    for start in range(STARTS):
        left = records.untried(run_dir, wanted)
        if not left or time.time() >= deadline:
            break
        place.clear_board(run_dir)
        script.rank_failed = script.on_trial = ""
        script.start(
            "across",
            phase=spent.RANKS,
            timeout_s=deadline - time.time() + GRACE_S,
            kept=(*kept, *found_kept(records.verdicts(run_dir))),
            candidates=tuple(left),
            min_gain=options.min_gain,
            max_pairs=options.max_pairs,
            whole_first=not start,  # it may be what the rank was lost by
            deadline_unix_s=deadline,
        )
        early = f"the search in all ranks has ended: {script.rank_failed}" if script.rank_failed else ""
        if not early or script.over:
            break
        script.say(early)
        blamed = [c for c in records.untried(run_dir, left) if c.transform == script.on_trial]
        for candidate in blamed[:1]:
            records.save_verdict(run_dir, records.verdict_on(candidate, Status.FAILED, script.rank_failed))
        if not script.on_trial:
            break
    return early


def start_anew(
    command: ScriptCommand,
    candidates: Sequence[Recommendation],
    searched: Searched,
    run_dir: Path,
    options: SearchOptions,
    *,
    say: Say,
) -> Searched:
    """Try these in pairs of fresh starts of all ranks, on top of what is kept, until one helps. `options.time_s`: for all of them."""
    left = [c for c in candidates if options.wants(c)]
    if not left or searched.interrupted or searched.early:
        return searched
    script = searched.script or Script(command, run_dir, launcher.launch, say)
    runs, until = FreshRuns(script, TRIAL_S), time.time() + options.time_s
    kept: tuple[PlanItem, ...] = ()
    for candidate in left:
        if script.over:
            break
        if kept:
            records.skip(run_dir, (candidate,), "another of these settings is kept")
            continue
        found = try_in_pairs(
            runs, candidate, searched.kept, min_gain=options.min_gain, max_pairs=options.max_pairs, until=until
        )
        if found is None:
            break
        records.save_verdict(run_dir, found)
        say(f"{found.title}: {found.status}, {found.reason}")
        kept = found_kept([found])
    return replace(searched, kept=(*searched.kept, *kept), script=script)


def plan_of(command: ScriptCommand, searched: Searched, run_dir: Path, *, environment: str) -> Plan:
    """What the search has kept, before it is proved in fresh processes."""
    return Plan(
        script=command.words[0],
        argv=command.words[1:],
        created=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        items=searched.kept,
        hashes=planfile.hashes_here(
            command.name, model=searched.script.model_hash if searched.script else "", environment=environment
        ),
        run=str(run_dir),
    )


def log_of(searched: Searched, *, seconds: float) -> tuple[TrialLog, int]:
    """The log of a search that has nothing to prove, and the exit code."""
    if searched.script is None:
        return TrialLog(script="", argv=()), int(ExitCode.OK)
    log = outcome.log(searched.script, None, seconds=seconds, complete=not searched.early)
    return log, outcome.exit_code(log)
