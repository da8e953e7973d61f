"""`advisor undo`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from advisor.cli import output
from advisor.cli.help import Command
from advisor.cli.plan import backup_of
from advisor.core.errors import AdvisorError


@click.command(cls=Command)
@click.argument("name", metavar="[PLAN]", default="last", type=click.Path(path_type=Path))
def undo(name: Path) -> None:
    """Take back what `advisor plan show --write` wrote into a script.

    The script becomes what SCRIPT.orig holds. If you have edited the script since, nothing is changed. PLAN is the plan that was
    written: a file, a run's folder, or `last` (the default).

    No other command edits a script, so there is nothing else to take back: start the script with `python` to train without a
    plan, and delete plan.yaml if you do not want the plan.

    \b
    Examples:
      advisor undo
      advisor undo advisor-runs/train-20261120-1
    """
    from advisor.runs import find_plan
    from advisor.trials.as_source import write
    from advisor.trials.planfile import script_of

    _, loaded = find_plan(name, lambda known: True)
    script = Path(script_of(loaded))
    backup = backup_of(script)
    if not backup.exists():
        output.say(f"advisor: nothing to undo: {script} is as you wrote it (there is no {backup})")
        return
    # What the plan makes of the old script tells an edited script from one that only advisor wrote: no state is kept.
    if script.read_text(encoding="utf-8") != write(loaded, backup).after:
        raise AdvisorError(
            f"{script} is not what this plan wrote: it, its plan or {backup} was edited since",
            fix=f"Compare them: `diff {backup} {script}`. Then move {backup} over {script} yourself, or delete it.",
        )
    os.replace(backup, script)
    output.say(f"advisor: {script} is as it was before; {backup} is gone")
