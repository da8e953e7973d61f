"""`advisor conv`."""

from __future__ import annotations

import sys

import click

from advisor.cli import output
from advisor.cli.help import Command
from advisor.cli.parameters import format_option, run_argument


@click.command(cls=Command)
@click.option("--all", "everything", is_flag=True, help="Every product, not the 20 that take longest. JSON has all.")
@format_option("text", "json", "md")
@run_argument
def conv(run: str, *, everything: bool, form: str) -> None:
    """Show which algorithm runs each convolution of a recorded run. RUN is a run's folder, or `last`.

    One row for the forward, the data gradient and the weight gradient of each convolution: algorithm (from the kernel's name), tensor cores
    or not, dtype and layout, time with the conversions around it, rate, share of this machine's limit; below it why, and what else could
    make it. The least time of that is modelled from bytes and operations.

    \b
    Examples:
      advisor conv last
      advisor conv advisor-runs/train-20261120-1 --all
      advisor conv last --format json
    """
    from advisor import runs
    from advisor.reporting import convolutions

    profile = runs.load_profile(run)[1]
    if form == "json":
        text = output.json_text(convolutions.conv_json(profile))
    elif form == "md":
        text = convolutions.conv_markdown(profile, everything=everything)
    else:
        text = convolutions.conv_text(profile, output.width(), everything=everything)
    output.say(text, sys.stdout)
