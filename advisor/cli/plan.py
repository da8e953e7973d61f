"""`advisor plan`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from advisor.cli import layout, output
from advisor.cli.help import HelpGroup
from advisor.core.cache import told_as
from advisor.core.errors import AdvisorError
from advisor.core.plan import Plan
from advisor.core.storage import write_text
from advisor.core.units import counted
from advisor.core.verdict import Status
from advisor.reporting.page import printable


@click.group(cls=HelpGroup)
def plan() -> None:
    """Show a plan; write its changes as Python, or as a diff of your script.

    \b
    Example:
      advisor plan show --diff
    """


@plan.command()
@click.option("--as-python", is_flag=True, help="Print the kept changes as lines of Python.")
@click.option("--diff", "as_diff", is_flag=True, help="Print the kept changes as a unified diff of the plan's script.")
@click.option(
    "--write",
    "write_it",
    is_flag=True,
    help="Write the kept changes into the script. The old script stays as SCRIPT.orig; `advisor undo` puts it back.",
)
@click.argument("name", metavar="[PLAN]", default="last", type=click.Path(path_type=Path))
def show(name: Path, *, as_python: bool, as_diff: bool, write_it: bool) -> None:
    """Show what a plan keeps and why. PLAN is a file, a run's folder, or `last`.

    --diff shows the changes that people write by hand: autocast, channels_last, the fused optimizer, loader arguments, TF32,
    deferred reads. Changes without a short form in source (kernels, CUDA graphs) are named on stderr; `advisor.enable` applies
    them. Read the diff before you keep it: advisor proved the changes as it applies them, not as source.
    `advisor try --patch` proves the diff.

    \b
    Examples:
      advisor plan show
      advisor plan show plan.yaml --as-python
      advisor plan show --diff > faster.patch
      advisor plan show --write
    """
    from advisor.runs import find_plan

    if as_python + as_diff + write_it > 1:
        raise click.UsageError(
            "--as-python, --diff and --write exclude each other; name one", click.get_current_context()
        )
    file, loaded = find_plan(name, lambda known: True)
    if as_python and not any(item.status == Status.KEPT for item in loaded.items):
        output.say("advisor: no change of this plan is proved (kept), so there is no Python to write")
    elif as_python:
        from advisor.trials.as_source import as_python as text
        from advisor.trials.planfile import script_of

        output.say(text(loaded, file.name, Path(script_of(loaded))).rstrip("\n"), sys.stdout)
    elif as_diff or write_it:
        show_diff(loaded, write_it=write_it)
    else:
        _show(loaded)


def backup_of(script: Path) -> Path:
    """Where `--write` leaves the script as it was, and `advisor undo` finds it."""
    return script.with_name(f"{script.name}.orig")


def show_diff(loaded: Plan, *, write_it: bool = False) -> None:
    """Print the kept changes as a diff of the plan's script, or write them into it; what is not in it is named on stderr.

    Raises:
        AdvisorError: when the script cannot be read, or is no file here.
    """
    from advisor.trials.as_source import write
    from advisor.trials.planfile import script_of

    script = Path(script_of(loaded))
    if script.suffix != ".py" or not script.is_file():
        raise AdvisorError(f"the plan's script {script} is no Python file here", fix="Run this where the script is.")
    written = write(loaded, script)
    for transform, why in written.left.items():
        output.say(f"advisor: not in the diff: {transform}: {why}")
    if not written.done:
        kept = any(item.status == Status.KEPT for item in loaded.items)
        why = "could be written into the script" if kept else "is proved (kept), so there is nothing to write"
        output.say(f"advisor: no change of this plan {why}")
    elif write_it:
        backup = backup_of(script)
        if backup.exists():
            raise AdvisorError(
                f"{backup} is there already", fix="Move it away, so that no version of the script is lost."
            )
        write_text(backup, written.before)
        write_text(script, written.after)
        output.say(f"advisor: {script} has {counted(len(written.done), 'change')}; the old one is {backup}")
    else:
        output.say(written.diff().rstrip("\n"), sys.stdout)


def _show(loaded: Plan) -> None:
    rows = [("change", "status", "why")]
    rows += [(i.transform, i.status, printable(i.reason or i.measured) or "–") for i in loaded.items]
    head = f"{printable(' '.join((told_as(loaded.script), *loaded.argv)))}: {loaded.speedup or 'not proved'}"
    width = output.width()
    output.say("\n".join([layout.wrapped(head, width), "", *layout.table(rows, width, below=1)]), sys.stdout)
