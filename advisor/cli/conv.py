"""`advisor conv`."""

from __future__ import annotations

import sys

import click

from advisor.cli import output
from advisor.cli.help import Command
from advisor.cli.parameters import format_option, run_argument


@click.command(cls=Command)
@click.option("--all", "everything", is_flag=True, help="Show every product, not only the 20 longest. JSON has all.")
@format_option("text", "json", "md")
@run_argument
def conv(run: str, *, everything: bool, form: str) -> None:
    """Show which algorithm runs each convolution of a recorded run. RUN is a run's folder, its name, or `last` (the default).

    The forward, the data gradient and the weight gradient of each convolution have a row each. A row shows the algorithm (from the
    kernel's name), tensor cores or not, dtype and layout, the time with conversions, the rate, and the share of this machine's
    limit. Below the row stand the reason and the alternatives: the fastest that is on file for a convolution like it on this GPU, and
    the one with the least time, modelled from bytes and operations. A time below the limit is an error, and is named as one.

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
