"""What lies in advisor-runs/: each run with its script, when, size, what it holds, what came of it, and who still needs it."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from advisor.core import storage, use
from advisor.core.errors import AdvisorError
from advisor.core.plan import Plan
from advisor.core.profile import StepProfile
from advisor.core.units import counted, time_text
from advisor.core.verdict import Status, TrialLog
from advisor.loop.records import SESSION_FILE
from advisor.profiling.beside.command import script_name
from advisor.runs.folders import FINDINGS_FILE, PROFILE_FILE, REPORT_FILE, RUNS_DIR, is_empty
from advisor.trials import planfile
from advisor.trials.records import PLAN_FILE, TRIALS_FILE
from advisor.userfiles import journal, owners

# File → what to call it. A folder without any of them is no run, and left alone.
HOLDS = {
    PROFILE_FILE: "profile",
    FINDINGS_FILE: "findings",
    TRIALS_FILE: "trials",
    PLAN_FILE: "plan",
    REPORT_FILE: "report",
}
_TEXTS = (".py", ".sh", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".cfg", "Makefile", "Dockerfile")
_MOST_BYTES = 1_000_000  # of a file that is searched for names of runs


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedRun:
    """A run folder. `needed`: why it must stay, "" where it need not; `ended` is when it was last written to, seconds since 1970."""

    folder: Path
    script: str
    ended: float
    size: int  # bytes on disk, of files
    holds: tuple[str, ...]
    verdict: str
    needed: str = ""


def listed() -> tuple[ListedRun, ...]:
    """The runs in this directory, the newest first.

    Raises:
        AdvisorError: when advisor-runs/ cannot be read.
    """
    try:
        folders = [Path(entry.path) for entry in os.scandir(RUNS_DIR) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise AdvisorError(f"{RUNS_DIR} cannot be read ({error.strerror})", expected="a folder of runs") from None
    plans = {folder: plan for folder in folders if (plan := _plan(folder)) is not None}
    runs = [_run(folder, plans.get(folder)) for folder in folders if _is_run(folder)]
    runs.sort(key=lambda run: run.ended, reverse=True)
    return _with_needs(runs, plans)


def _is_run(folder: Path) -> bool:
    return any(os.path.exists(folder / name) for name in (SESSION_FILE, *HOLDS))


def _run(folder: Path, plan: Plan | None) -> ListedRun:
    size, ended = _measure(folder)
    holds = tuple(what for name, what in HOLDS.items() if os.path.exists(folder / name))
    script, verdict = _came_of(folder, plan)
    return ListedRun(folder=folder, script=script, ended=ended, size=size, holds=holds, verdict=verdict)


def _measure(folder: Path) -> tuple[int, float]:
    """Bytes of all files below, and when the last of them was written."""
    size, ended = 0, folder.lstat().st_mtime
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                facts = os.lstat(os.path.join(root, name))
            except OSError:  # gone since
                continue
            if stat.S_ISREG(facts.st_mode):
                size, ended = size + facts.st_size, max(ended, facts.st_mtime)
    return size, ended


def _plan(folder: Path) -> Plan | None:
    try:
        return planfile.read(folder / PLAN_FILE)
    except AdvisorError:
        return None


def _came_of(folder: Path, plan: Plan | None) -> tuple[str, str]:
    """The script's name and, in a few words, what the run found out."""
    try:
        if os.path.exists(folder / TRIALS_FILE):
            log = storage.load(folder / TRIALS_FILE, TrialLog)
            return script_name((log.script, *log.argv)), _of_trials(log)
        if os.path.exists(folder / PROFILE_FILE):
            measured = storage.load(folder / PROFILE_FILE, StepProfile)
            told = "nothing measured" if is_empty(measured) else f"{time_text(measured.typical_us)} a step"
            return script_name((measured.script, *measured.argv)), told
    except AdvisorError:
        return "", "cannot be read"
    return (planfile.script_of(plan), "trained with a plan") if plan is not None else ("", "nothing measured")


def _of_trials(log: TrialLog) -> str:
    statuses = [verdict.status for verdict in log.verdicts]
    if log.stack is not None and log.stack.passed and log.stack.speedup:
        return f"{log.stack.speedup:.2f} × as fast, proved"
    if not log.complete or log.interrupted:
        return "search not finished"
    if Status.KEPT in statuses or Status.UNCONFIRMED in statuses:
        return "faster in the loop, not confirmed"
    return f"nothing kept of {counted(len(statuses), 'change')}" if statuses else "nothing tried"


def _with_needs(runs: Sequence[ListedRun], plans: dict[Path, Plan]) -> tuple[ListedRun, ...]:
    used = _in_use(runs, plans)
    texts = list(_texts())
    found = []
    for run in runs:
        with use.unused(run.folder) as free:
            if not free or owners.running(run.folder) is not None:
                needed = "in use by a running process"
            elif journal.entries(journal.root_of(run.folder)):
                needed = f"holds files of yours: advisor doctor --recover {run.folder}"
            elif run.folder in used:
                needed = "the plan that `last` names"
            else:
                named = next((name for name, text in texts if run.folder.name in text), "")
                needed = f"named in {named}" if named else ""
        found.append(_needing(run, needed))
    return tuple(found)


def _needing(run: ListedRun, needed: str) -> ListedRun:
    values = {name: getattr(run, name) for name in ListedRun.__slots__}
    return ListedRun(**{**values, "needed": needed})


def _in_use(runs: Iterable[ListedRun], plans: dict[Path, Plan]) -> set[Path]:
    """The runs whose plan `last` names, one for each script: the newest that settles something, as `advisor run` takes it."""
    found: dict[str, Path] = {}
    for run in runs:
        plan = plans.get(run.folder)
        if plan is not None and not planfile.left_open(plan):
            found.setdefault(planfile.script_of(plan), run.folder)
    return set(found.values())


def _texts() -> Iterable[tuple[str, str]]:
    """Scripts and notes in this directory, in which a run may be named: `advisor.enable("advisor-runs/…/plan.yaml")`."""
    for entry in os.scandir("."):
        try:
            if entry.name.endswith(_TEXTS) and entry.is_file() and entry.stat().st_size <= _MOST_BYTES:
                yield entry.name, Path(entry.path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
