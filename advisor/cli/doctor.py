"""`advisor doctor`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from advisor.cli import output
from advisor.core.errors import AdvisorError
from advisor.core.storage import to_plain


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--measure", is_flag=True, help="Measure this machine's rates anew, even where they are known.")
@click.option(
    "--recover",
    metavar="[RUN]",
    is_flag=False,
    flag_value="",
    help="Put back the files that interrupted searches had set aside: in this run folder, or in all of advisor-runs/ here.",
)
def doctor(*, as_json: bool, measure: bool, recover: str | None) -> None:
    """Say what can be measured on this machine, what cannot and why, and how to get the rest.

    It also tells how well predicted gains have held in the trials made here; ADVISOR_LEDGER names another file for these.

    \b
    Example:
      advisor doctor
    """
    if recover is not None:
        from advisor import pipeline

        if not pipeline.recover(Path(recover) if recover else None, lambda line: output.say(line, sys.stdout)):
            raise AdvisorError(
                "not every file could be put back",
                fix="Those that were not are in files/kept-aside of their run folder.",
            )
        return
    from advisor.profiling import doctor as examination
    from advisor.reporting.terminal import checks_text
    from advisor.trials import ledger

    checks = [to_plain(check) for check in examination.checks(measure=measure)]
    checks.append(
        to_plain(examination.Check(name="Predictions", status=examination.Status.OK, found=ledger.told_here()))
    )
    if as_json:
        output.say(output.json_text(checks), sys.stdout)
    else:
        output.say(checks_text(checks, output.width(), output.color(sys.stdout)), sys.stdout)
