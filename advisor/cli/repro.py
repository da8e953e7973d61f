"""`advisor repro`."""

from __future__ import annotations

import sys

import click

from advisor.cli import layout, output
from advisor.cli.help import Command
from advisor.cli.parameters import run_argument
from advisor.core.units import percent_text, time_text

LISTED = 20


@click.command(cls=Command)
@click.option(
    "--op", "number", type=click.IntRange(min=1), metavar="N", help="The operator, by its number in the list."
)
@run_argument
def repro(run: str, *, number: int | None) -> None:
    """Print a small script that repeats one operator of RUN with its shapes, layout and dtype, without the model.

    Without --op the operators that can be repeated are listed, the longest first.

    \b
    Examples:
      advisor repro last
      advisor repro last --op 1 > conv.py
    """
    from advisor import runs
    from advisor.loop.records import TRACE_FILE, load_trace
    from advisor.reporting import repro as scripts

    folder, profile = runs.load_profile(run)
    trace = load_trace(folder / TRACE_FILE)
    if number is not None:
        output.say(scripts.script(profile, trace, number).rstrip("\n"), sys.stdout)
        return
    step = profile.busy_us or profile.typical_us
    table = [
        (
            str(i),
            time_text(row.time_us),
            percent_text(row.time_us / step) if step else "–",
            row.op,
            row.module or "–",
            scripts.shown(row.shapes),
        )
        for i, (row, _) in enumerate(scripts.operators(profile, trace)[:LISTED], 1)
    ]
    head = ("op", "time a step", "share", "operator", "module", "shapes")
    output.say("\n".join(layout.table([head, *table], output.width())), sys.stdout)
