"""`advisor doctor`."""

from __future__ import annotations

import sys

import click

from advisor.cli import output
from advisor.core.storage import to_plain


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def doctor(as_json: bool) -> None:
    """Say what can be measured on this machine, what cannot and why, and how to get the rest.

    \b
    Example:
      advisor doctor
    """
    from advisor.profiling import doctor as examination
    from advisor.reporting.terminal import records_text

    records = [to_plain(check) for check in examination.checks()]
    output.say(output.json_text(records) if as_json else records_text(records, width=output.width()), sys.stdout)
