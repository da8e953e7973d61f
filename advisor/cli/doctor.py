"""`advisor doctor`."""

from __future__ import annotations

import sys

import click

from advisor.cli import output
from advisor.core.storage import to_plain


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--measure", is_flag=True, help="Measure this machine's rates anew, even where they are known.")
def doctor(*, as_json: bool, measure: bool) -> None:
    """Say what can be measured on this machine, what cannot and why, and how to get the rest.

    \b
    Example:
      advisor doctor
    """
    from advisor.profiling import doctor as examination
    from advisor.reporting.terminal import checks_text

    checks = [to_plain(check) for check in examination.checks(measure=measure)]
    if as_json:
        output.say(output.json_text(checks), sys.stdout)
    else:
        output.say(checks_text(checks, output.width(), output.color(sys.stdout)), sys.stdout)
