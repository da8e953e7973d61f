"""`advisor runs`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from advisor.cli import ask, layout, output
from advisor.cli.help import HelpGroup
from advisor.cli.parameters import Age, format_option
from advisor.core.cache import told_as
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.units import bytes_text, counted
from advisor.reporting import drawn
from advisor.reporting.page import Page, printable

if TYPE_CHECKING:
    from advisor.runs.listing import ListedRun

WIDE = 120  # columns from which on a drawn table leaves a run's name whole


@click.group(cls=HelpGroup, invoke_without_command=True)
@format_option("text", "json")
@click.pass_context
def runs(context: click.Context, *, form: str) -> None:
    """List the runs in advisor-runs/ here, or remove them. The list has script, time, contents, size and result.

    \b
    Examples:
      advisor runs
      advisor runs --format json
      advisor runs clean --keep 5 --dry-run
    """
    if context.invoked_subcommand is not None:
        return
    from advisor.runs.listing import listed

    found = listed()
    if form == "json":
        output.say(output.document("runs", [_facts(run) for run in found]), sys.stdout)
    else:
        _show(found)
        output.say(f"\n{counted(len(found), 'run')}, {_size(found)}.", sys.stdout)


@runs.command()
@click.option("--older-than", type=Age(), metavar="AGE", help="Only runs that ended longer ago than AGE: 12h, 30d, 8w.")
@click.option("--keep", type=click.IntRange(min=0), metavar="N", help="Keep the newest N runs.")
@click.option("--dry-run", is_flag=True, help="List what would be removed. Remove nothing.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
def clean(*, older_than: float | None, keep: int | None, dry_run: bool, yes: bool) -> int:
    """Remove runs older than AGE, or all but the newest N. With both options a run must meet both. You are asked first.

    A run stays if it is needed: a process uses it, `last` names its plan, a file in this directory names it, or it still holds
    files of yours after a search was killed. The exit code is 0 also if you say no.

    \b
    Examples:
      advisor runs clean --older-than 30d
      advisor runs clean --keep 10 --dry-run
      advisor runs clean --keep 0 --yes
    """
    if older_than is None and keep is None:
        raise click.UsageError("no runs are chosen: name --older-than AGE or --keep N", click.get_current_context())
    from advisor.runs import cleaning
    from advisor.runs.listing import listed

    found = listed()
    going = cleaning.chosen(found, older_than_s=older_than, keep=keep)
    if not going:
        output.say(f"Nothing to remove of {counted(len(found), 'run')}.", sys.stdout)
        return ExitCode.OK
    _show(going)
    what = f"{counted(len(going), 'run')}, {_size(going)}"
    if dry_run:
        output.say(f"\nWould remove {what}.", sys.stdout)
        return ExitCode.OK
    if not yes and not ask.confirm(f"Remove {what}?"):
        output.say("Nothing was removed.", sys.stdout)
        return ExitCode.OK
    return _remove(going)


def _remove(going: Sequence[ListedRun]) -> int:
    from advisor.runs import cleaning

    problems = []
    removed = 0
    for run in going:
        try:
            if cleaning.remove(run):
                removed += 1
            else:
                output.say(f"{run.folder} stays: a process has begun to use it", sys.stdout)
        except AdvisorError as error:
            problems.append(str(error))
    output.say(f"Removed {counted(removed, 'run')}.", sys.stdout)
    if problems:
        raise AdvisorError("; ".join(problems))
    return ExitCode.OK


def _show(found: Sequence[ListedRun]) -> None:
    """A table of runs; nothing where there are none."""
    rows = [
        (
            run.folder.name,
            printable(told_as(run.script)) or "–",
            time.strftime("%Y-%m-%d %H:%M", time.localtime(run.ended)),
            bytes_text(run.size),
            ", ".join(run.holds) or "–",
            run.verdict + (f"; stays: {run.needed}" if run.needed else ""),
        )
        for run in found
    ]
    if rows:
        head = ("run", "script", "ended", "size", "holds", "result")
        lines = (
            drawn.table(Page(output.width(), output.color(sys.stdout)), head, rows, right={3})
            if output.on_terminal(sys.stdout) and output.width() >= WIDE
            else layout.table([head, *rows], output.width())
        )
        output.say("\n".join(lines), sys.stdout)


def _size(found: Sequence[ListedRun]) -> str:
    return bytes_text(sum(run.size for run in found))


def _facts(run: ListedRun) -> dict[str, object]:
    ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(run.ended))
    return {
        "run": str(run.folder),
        "script": run.script,
        "ended": ended,
        "bytes": run.size,
        "holds": list(run.holds),
        "verdict": run.verdict,
        "needed": run.needed,
    }
