"""`advisor recommend`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from advisor.cli import output
from advisor.cli.help import Command
from advisor.cli.parameters import Override, fail_on_option, format_option, rules_option, run_argument
from advisor.core.errors import ExitCode


@click.command(cls=Command)
@rules_option
@click.option("--select", multiple=True, metavar="RULE", help="Only these rules: ids, areas or globs (repeatable).")
@click.option("--ignore", multiple=True, metavar="RULE", help="Leave these rules out (repeatable).")
@click.option(
    "--set", "overrides", multiple=True, type=Override(), help="Replace the threshold of one condition (repeatable)."
)
@fail_on_option
@click.option("--explain", is_flag=True, help="Show each condition with its value, and the rules that did not fire.")
@format_option("text", "json", "md")
@run_argument
def recommend(
    run: str,
    *,
    rules_dirs: tuple[Path, ...],
    select: tuple[str, ...],
    ignore: tuple[str, ...],
    overrides: tuple[tuple[str, str], ...],
    fail_on: str | None,
    explain: bool,
    form: str,
) -> int:
    """Show what would make a recorded run faster, and by how much. Needs no GPU.

    RUN is a run's folder, its name, or `last` (the default).

    \b
    Examples:
      advisor recommend last
      advisor recommend advisor-runs/train-20261120-1 --explain
      advisor recommend last --set launch-bound.idle_launch_frac=0.1
      advisor recommend last --fail-on high
    """
    from advisor import pipeline

    profile, findings = pipeline.recommend(
        run, rules_dirs=rules_dirs, select=select, ignore=ignore, overrides=dict(overrides)
    )
    output.say(output.run_text(form, profile, findings, None, stream=sys.stdout, explain=explain), sys.stdout)
    return ExitCode.FINDINGS if output.fails(findings, fail_on) else ExitCode.OK
