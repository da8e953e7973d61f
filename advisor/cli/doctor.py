"""`advisor doctor`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from advisor.cli import output
from advisor.cli.help import Command
from advisor.cli.parameters import format_option
from advisor.core.errors import AdvisorError
from advisor.core.storage import to_plain


@click.command(cls=Command)
@click.option("--measure", is_flag=True, help="Measure this machine's rates again, even if they are known.")
@click.option(
    "--recover",
    metavar="[RUN]",
    is_flag=False,
    flag_value="",
    help="Restore the files that interrupted runs set aside: in this run folder, or in all your folders on this machine.",
)
@format_option("text", "json")
def doctor(*, measure: bool, recover: str | None, form: str) -> None:
    """Check what can be measured on this machine, what cannot and why, and how to get the rest.

    It also shows how well predictions held in the trials on this machine. ADVISOR_LEDGER names another file for them.

    \b
    Example:
      advisor doctor
    """
    if recover is not None:
        from advisor import pipeline

        if not pipeline.recover(Path(recover) if recover else None, lambda line: output.say(line, sys.stdout)):
            raise AdvisorError(
                "not every file could be put back",
                fix="The other files are in files/kept-aside of their run folder.",
            )
        return
    from advisor.cli import examination
    from advisor.reporting.terminal import checks_text
    from advisor.trials import ledger

    checks = [to_plain(check) for check in examination.checks(measure=measure, say=output.say)]
    checks.append(
        to_plain(examination.Examined(name="Predictions", status=examination.Health.OK, found=ledger.told_here()))
    )
    if form == "json":
        output.say(output.document("checks", checks), sys.stdout)
    else:
        output.say(checks_text(checks, output.width(), output.color(sys.stdout)), sys.stdout)
