"""What several commands do: write the report, ask the rules, put files back, say where things lie."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from advisor.core import storage
from advisor.core.findings import Findings
from advisor.core.profile import StepProfile
from advisor.core.verdict import TrialLog
from advisor.runs import REPORT_FILE, RUNS_DIR, new_run_dir
from advisor.runs.page import report_page

Say = Callable[[str], None]
VISIBLE = "CUDA_VISIBLE_DEVICES"
OWN_GPU = f"the script sets {VISIBLE}"


def write_report(run_dir: Path, profile: StepProfile, findings: Findings | None, trials: TrialLog | None) -> None:
    storage.write_text(run_dir / REPORT_FILE, report_page(run_dir, profile, findings, trials))


def check_rules(rules_dirs: Sequence[Path]) -> None:
    """The user's own rules are read before anything runs: what is wrong with one is not said after the run."""
    if rules_dirs:
        from advisor import rules

        rules.load(rules_dirs)


def shown_path(path: Path) -> str:
    try:
        return os.path.relpath(path)
    except ValueError:
        return str(path)


def progress_teller(say: Say) -> Callable[[Mapping[str, Any]], None]:
    """Turns the child's progress events into lines."""
    from advisor.loop.waiting import WAITING

    def tell(event: Mapping[str, Any]) -> None:
        kind = event.get("event")
        if kind == "phase":
            done, total = event.get("done"), event.get("total")
            say(f"{event.get('phase')}: {done} of {total} steps" if total else str(event.get("phase")))
        elif kind in ("trial", "say", "fault", WAITING) and (text := event.get("text") or event.get("error")):
            say(str(text))

    return tell


def evaluate_run(
    measured: StepProfile,
    run_dir: Path,
    *,
    rules_dirs: Sequence[Path] = (),
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    overrides: Mapping[str, str] | None = None,
) -> Findings:
    from advisor import analysis, rules
    from advisor.analysis.predict import predict
    from advisor.trials import planner

    table = analysis.metrics(measured)
    loaded = rules.load(rules_dirs)
    chosen = rules.apply_overrides(loaded, select, ignore, overrides or {})
    findings = rules.evaluate(chosen, table, measured, functools.partial(predict, measured))
    recommended = rules.recommend(findings, table)
    return Findings(
        run=run_dir.name,
        findings=findings,
        cards=rules.cards(findings),
        recommendations=planner.order(recommended, measured),
    )


def begin_run(name: str, out: Path | None, say: Say) -> Path:
    """The run folder of what throws its training away, once earlier ones have left nothing aside and the user knows the limits."""
    run_dir = new_run_dir(name, out)
    recover_pending(say)
    say("files that the script writes are put back afterwards (exceptions: `advisor apply --help`)")
    return run_dir


def restore_files(run_dir: Path, say: Say) -> bool:
    """Put the script's files back where they were; whether all are."""
    from advisor.userfiles import restore

    problems = restore.restore(run_dir)
    for problem in problems:
        say(f"could not be put back: {problem}")
    return not problems


def recover_pending(say: Say) -> None:
    """Put back what a killed run had set aside."""
    from advisor.userfiles import restore

    found = restore.restore_pending(Path(RUNS_DIR))
    for path in found.restored:
        say(f"put back after an interrupted run: {path}")
    for problem in found.problems:
        say(f"could not be put back after an interrupted run: {problem}")
    for path in found.foreign:
        say(
            f"{path} holds files that a run elsewhere set aside; if they are yours, `advisor doctor --recover {path}` "
            "puts them back"
        )


def recover(run_dir: Path | None, say: Say) -> bool:
    """Put back what an interrupted run had set aside: in this run folder, or in each below advisor-runs/ here and each that this
    user has started on this machine.

    Returns:
        Whether everything is back in its place. `say` has been told what was put back, and what was not and why.

    Raises:
        AdvisorError: when nothing was set aside in `run_dir`, or its run goes on.
    """
    from advisor.userfiles import restore

    found = (
        restore.restore_pending(Path(RUNS_DIR))
        if run_dir is None
        else restore.Pending(problems=restore.restore_asked(run_dir))
    )
    restored = found.restored if run_dir is None else (str(run_dir),) * (not found.problems)
    for path in restored:
        say(f"the files set aside in {path} are back in their places")
    for problem in found.problems:
        say(f"could not be put back: {problem}")
    for path in found.foreign:
        say(f"left alone: {path} was run elsewhere; `advisor doctor --recover {path}` puts its files back")
    if not (restored or found.problems or found.foreign):
        say("no interrupted run of yours has anything set aside")
    return not found.problems


def other_gpu(script: Mapping[str, str], asked: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """A note where a script has chosen its GPU itself, over the choice of whoever started it. Both: environment variables.

    What else runs on that GPU disturbs the measurement, and the script disturbs that.
    """
    there, here = script.get(VISIBLE), asked.get(VISIBLE)
    if here is None or there is None or there == here:
        return ()
    return (f"{OWN_GPU} to {there!r} itself, and you asked for {here!r}",)
