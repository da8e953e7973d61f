"""Run folders by their names: a new one, `last`, or one that the user names; and what is in them."""

from __future__ import annotations

import datetime
import difflib
import os
import re
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from advisor.core import storage, use
from advisor.core.errors import AdvisorError
from advisor.core.findings import Findings
from advisor.core.plan import Plan
from advisor.core.profile import StepProfile
from advisor.core.verdict import TrialLog
from advisor.trials import planfile, plans
from advisor.trials.records import PLAN_FILE, TRIALS_FILE

RUNS_DIR = "advisor-runs"
PROFILE_FILE = "profile.json"
FINDINGS_FILE = "findings.json"
REPORT_FILE = "report.html"
LAST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRun:
    """A run folder's results."""

    run_dir: Path
    profile: StepProfile
    findings: Findings | None = None
    trials: TrialLog | None = None


def new_run_dir(script: str, out: Path | None = None) -> Path:
    """A fresh folder: `out`, or `advisor-runs/<script>-<time>-<id>` below the working directory.

    Raises:
        AdvisorError: when it cannot be made, or `out` holds files already.
    """
    try:
        if out is None:
            from advisor.profiling.beside.command import is_script

            # A module's name is whole: `pkg.train` and `pkg.eval` are no `pkg`.
            name = Path(script)
            stem = re.sub(r"[^\w.-]+", "_", (name.stem if is_script(name) else name.name) or "script")[-40:].lstrip(
                "-."
            )
            stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
            out = Path(RUNS_DIR) / f"{stem}-{stamp}-{secrets.token_hex(2)}"
        elif out.exists() and any(out.iterdir()):
            raise AdvisorError(f"{out} is not empty", expected="a new folder", fix="Name another with -o.")
        out.mkdir(parents=True, exist_ok=True)
        use.hold(out)
    except OSError as error:
        raise AdvisorError(f"cannot make {out} ({error.strerror})", fix="Name another folder with -o.") from None
    return out.resolve()


def here(holding: str = "") -> list[Path]:
    """The run folders in this directory, of those that hold this file if one is named; the newest first, by that file."""
    found = []
    for folder in Path(RUNS_DIR).glob("*"):
        try:
            facts = (folder / holding).stat()
        except OSError:  # not there, gone since, or another user's
            continue
        if holding or stat.S_ISDIR(facts.st_mode):
            found.append((facts.st_mtime, folder.resolve()))
    return [folder for _, folder in sorted(found, reverse=True)]


def find_plan(name: Path, serves: Callable[[Plan], bool], script: str = "") -> tuple[Path, Plan]:
    """A plan, with its file, named by that, by the folder of its run, or as `last`: the newest in this directory that serves, of this
    script where one is named. `plan.yaml` in the directory itself is one of them: people edit that file, and commit it.

    Raises:
        AdvisorError: for `last` where there is none, or one that cannot be read.
    """
    if str(name) != LAST:
        path = name / PLAN_FILE if os.path.isdir(name) else name
        use.hold(path.parent)
        return path, planfile.read(path)
    newest = plans.last(_plan_files(), script, serves)
    if newest is None:
        raise AdvisorError(
            f"no plan in {RUNS_DIR}/ here", fix="Run `advisor apply --auto train.py`, or name one with --plan."
        )
    use.hold(newest[0].parent)
    return newest


def _plan_files() -> list[Path]:
    """Files of plans in this directory, the newest first."""
    files = [folder / PLAN_FILE for folder in here(PLAN_FILE)]
    own = Path(PLAN_FILE).resolve()
    if plans.is_one(own):
        files = [own, *files]
    return sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)


def existing(run: str | Path) -> Path:
    """The folder of a run that the user names: its path, its name in `advisor-runs/` here, or `last` for the newest that holds a
    measurement.

    Raises:
        AdvisorError: when there is none, or it cannot be looked into.
    """
    if str(run) == LAST:
        newest = _last()
        if newest is None:
            raise AdvisorError(f"no run in {RUNS_DIR}/ here", fix="Run `advisor profile train.py` first.")
        return newest
    folder, expected = Path(run), "a run folder, or `last`"
    try:
        if not str(run):
            raise AdvisorError("an empty name for a run", expected=expected)
        if stat.S_ISDIR(folder.stat().st_mode):
            os.listdir(folder)
            return folder
    except (FileNotFoundError, ValueError):  # ValueError: a zero byte in the name
        if (named := _listed(str(run))) is not None:
            return named
        raise AdvisorError(f"no folder {folder}", expected=expected, fix=_meant(folder.name)) from None
    except OSError as error:
        raise AdvisorError(f"{folder} cannot be read ({error.strerror})", expected=expected) from None
    fix = f"Name its folder: {folder.parent}" if os.path.exists(folder.parent / PROFILE_FILE) else ""
    raise AdvisorError(f"{folder} is a file", expected=expected, fix=fix)


def _listed(name: str) -> Path | None:
    """The run here of this name, as `advisor runs` lists it; None where there is none."""
    return next((folder for folder in here() if folder.name == name), None)


def _last() -> Path | None:
    """The newest run here in which something was measured, or the newest of all; None where there is none."""
    runs = here(PROFILE_FILE)
    holding = (run for run in runs if not is_empty(storage.load(run / PROFILE_FILE, StepProfile)))
    return next(holding, runs[0] if runs else None)


def is_empty(measured: StepProfile) -> bool:
    """Whether the script gave nothing to measure."""
    return measured.step_us is None and measured.wall_us is None


def _meant(name: str) -> str:
    """The run here whose name is nearest, as a question; what has no near one has no fix."""
    runs = [folder.name for folder in here()]
    begun = [run for run in runs if name and run.startswith(name)]
    near = begun or difflib.get_close_matches(name, runs, n=1)
    return f"Did you mean {RUNS_DIR}/{near[0]}?" if near else "`advisor runs` lists them."


def load_profile(run: str | Path) -> tuple[Path, StepProfile]:
    """A run's folder, and its profile alone: what lies beside it may be damaged.

    Raises:
        AdvisorError: when there is none, or it cannot be read.
    """
    folder = existing(run)
    return folder, storage.load(folder / PROFILE_FILE, StepProfile)


def load_run(run: str | Path) -> LoadedRun:
    """A run by its folder, or `last` for the newest in this directory.

    Raises:
        AdvisorError: when there is none, or a file in it cannot be read.
    """
    folder, profile = load_profile(run)
    try:
        findings = storage.load(folder / FINDINGS_FILE, Findings) if (folder / FINDINGS_FILE).exists() else None
    except AdvisorError as error:
        fix = f"`advisor recommend {run}` applies the rules to its profile again."
        raise AdvisorError(error.found, expected=error.expected, fix=fix) from None
    return LoadedRun(
        run_dir=folder.resolve(),
        profile=profile,
        findings=findings,
        trials=storage.load(folder / TRIALS_FILE, TrialLog) if (folder / TRIALS_FILE).exists() else None,
    )


def load_proof(run: str | Path) -> TrialLog | None:
    """The trials of a folder in which a plan was proved, which has no profile; None for any other.

    Raises:
        AdvisorError: when they cannot be read.
    """
    folder = existing(run)
    if (folder / PROFILE_FILE).exists() or not (folder / TRIALS_FILE).exists():
        return None
    return storage.load(folder / TRIALS_FILE, TrialLog)
