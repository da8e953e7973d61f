"""Puts a result on a stream in the format asked for."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TextIO

import click

from advisor import __version__
from advisor.cli import layout
from advisor.cli.parameters import SEVERITIES
from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.findings import Findings, Outcome
from advisor.core.profile import StepProfile
from advisor.core.storage import SCHEMA_VERSION, to_plain
from advisor.core.verdict import TrialLog

NAMED = 3  # rules that an exit code is explained by
FILES = ("report.html", "plan.yaml", "profile.json", "findings.json", "trials.json")


def width() -> int:
    """Columns to write for: those of the terminal (or `COLUMNS`), 100 where there is none."""
    return shutil.get_terminal_size((100, 24)).columns


def on_terminal(stream: TextIO) -> bool:
    """Whether tables are drawn: on a terminal that is not dumb."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def color(stream: TextIO) -> bool:
    """Whether to colour: as tables are drawn, unless `NO_COLOR` is set."""
    return on_terminal(stream) and not os.environ.get("NO_COLOR")


def json_text(value: Any) -> str:
    """Indented JSON of plain data."""
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)


def document(kind: str, value: Any, **more: Any) -> str:
    """A result as versioned JSON: `schema_version` and `type` first, then the fields of a dataclass, or a list under its own name.

    docs/reference/json.md has the schema of each type.
    """
    head = {"schema_version": SCHEMA_VERSION, "type": kind}
    plain = to_plain(value)
    return json_text({**head, **(plain if isinstance(plain, dict) else {kind: plain}), **more})


def run_text(
    form: str,
    profile: StepProfile,
    findings: Findings | None,
    trials: TrialLog | None,
    *,
    stream: TextIO,
    explain: bool | Literal["fired"] = False,
    run_dir: Path | None = None,
) -> str:
    """A run as `text`, `json`, `md`, `html`, `perfetto` or `sarif`; `run_dir` is where its plan and its trace may be."""
    if form == "html":
        from advisor.runs.page import report_page

        assert run_dir is not None  # a page is of a recorded run
        return report_page(run_dir, profile, findings, trials)
    if form == "json":
        from advisor.reporting.machine import report_json

        return json_text(report_json(profile, findings, trials))
    if form == "perfetto":
        return _perfetto(profile, findings, run_dir)
    if form == "sarif":
        from advisor.reporting.sarif import sarif

        return json_text(sarif(findings, Path.cwd(), __version__))
    if form == "md":
        from advisor.reporting.machine import markdown

        return markdown(profile, findings, trials)
    from advisor.reporting import terminal

    text = terminal.profile_text(
        profile,
        findings,
        width(),
        color(stream),
        command=program(),
        explain=explain,
        trials=trials,
        drawn=on_terminal(stream),
    )
    return text if trials is None else f"{text}\n\n{_trials_text(trials, run_dir, stream, headline=False)}"


def _perfetto(profile: StepProfile, findings: Findings | None, run_dir: Path | None) -> str:
    """Raises AdvisorError where the run has no trace."""
    from advisor.profiling.after import timeline
    from advisor.reporting.perfetto import trace_events

    found = timeline.of_run(run_dir, profile.environment, whole=True) if run_dir is not None else None
    if found is None:
        raise AdvisorError(f"{run_dir} holds no traced step", fix="Record the run again with `advisor profile`.")
    return json.dumps(trace_events(found, findings), separators=(",", ":"), ensure_ascii=False)


def precision_text(run_dir: Path, profile: StepProfile) -> str:
    """The precision audit of a run; empty where it made none."""
    from advisor.core.precision import PRECISION_FILE, PrecisionRecord

    if not (run_dir / PRECISION_FILE).is_file():
        return ""
    from advisor.reporting import precision

    return precision.precision_text(storage.load(run_dir / PRECISION_FILE, PrecisionRecord), profile, width())


def proof_text(form: str, trials: TrialLog, *, run_dir: Path, stream: TextIO) -> str:
    """A plan's proof, which has no profile, as `text`, `json` or `md`."""
    from advisor.reporting import machine

    if form == "text":
        return _trials_text(trials, run_dir, stream)
    return json_text(machine.proof_json(trials)) if form == "json" else machine.proof_markdown(trials)


def _trials_text(
    trials: TrialLog, run_dir: Path | None, stream: TextIO, plan: Path | None = None, *, headline: bool = True
) -> str:
    from advisor.reporting import terminal_trials

    present = {name: run_dir / name for name in FILES if run_dir is not None and (run_dir / name).exists()}
    return terminal_trials.trials_text(
        trials,
        width(),
        color(stream),
        command=program(),
        plan=_typed(plan or present.get("plan.yaml")),
        listed_in="report.html" if "report.html" in present else "trials.json",
        headline=headline,
        drawn=on_terminal(stream),
    )


def files_text(run_dir: Path, names: Iterable[str] = FILES, plan: Path | None = None) -> str:
    """Where the run's files are, those that exist; `plan` is where its plan is to be found, if not there."""
    present = {name: run_dir / name for name in names if (run_dir / name).exists()}
    if plan is not None:
        present["plan.yaml"] = plan
    lines = ["", f"Run    {run_dir}"]  # apart from the report above
    for name, label in (("report.html", "Report"), ("plan.yaml", "Plan  ")):
        if name in present:
            lines.append(f"{label} {present[name]}")
    return "\n".join(lines)


def _typed(path: Path | None) -> str:
    """As people type it: its name alone, where it is in the working directory; "" for none."""
    return "" if path is None else path.name if path.parent == Path.cwd() else str(path)


def writable(path: Path) -> Path:
    """The path, once its folder is there and takes files.

    Raises:
        AdvisorError: when nothing can be written there.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        raise AdvisorError(f"cannot write {path} ({error.strerror})", fix="Name another file.") from None


def say(text: str, stream: TextIO | None = None) -> None:
    """Write text and a newline to stderr, or to another stream; what its encoding lacks becomes a question mark.

    What advisor itself says is wrapped at words on a terminal, which would tear them apart.
    """
    file = stream or sys.stderr
    if text.startswith("advisor: ") and on_terminal(file):
        text = layout.wrapped(text, width())
    try:
        text.encode(encoding := file.encoding or "utf-8")
    except UnicodeEncodeError:
        text = text.encode(encoding, "replace").decode(encoding)
    click.echo(text, file=file, color=True)  # colours are decided above; click must not strip them


def program() -> str:
    """How this command was called, for the commands that we tell people to type."""
    name = Path(sys.argv[0]).name if sys.argv and sys.argv[0] else ""
    return "advisor" if name != "__main__.py" else f"{Path(sys.executable).name} -m advisor"


def apply_text(
    profile: StepProfile | None,
    findings: Findings | None,
    trials: TrialLog | None,
    *,
    run_dir: Path,
    plan: Path | None,
    dry_run: bool,
    stream: TextIO,
) -> str:
    """What `apply` says when it is done: the trials, or with `dry_run` what would be tried."""
    from advisor.reporting import terminal

    if dry_run or trials is None:
        return terminal.recommendations_text(profile, findings, width(), color(stream), command=program())
    return _trials_text(trials, run_dir, stream, plan)


def fails(findings: Findings | None, severity: str | None) -> bool:
    """True when a rule of this severity or above has fired; which, and that the exit code says so, is told on stderr."""
    if findings is None or severity is None:
        return False
    bar = SEVERITIES.index(severity)
    fired = [
        f.rule
        for f in findings.findings
        if f.outcome is Outcome.FIRED and f.severity in SEVERITIES and SEVERITIES.index(f.severity) >= bar
    ]
    if fired:
        named = ", ".join(fired[:NAMED]) + (f" and {len(fired) - NAMED} more" if len(fired) > NAMED else "")
        say(f"advisor: exit code {int(ExitCode.FINDINGS)}: --fail-on {severity}, and {named} fired")
    return bool(fired)


def own_exit(code: int) -> None:
    """Tell whose an exit code is that is the script's, and could be one of advisor's."""
    if code in set(ExitCode) - {ExitCode.OK}:
        say(f"advisor: exit code {code} is the script's own")
