"""`advisor compare`."""

from __future__ import annotations

import sys

import click

from advisor.cli import completion, output
from advisor.cli.help import Command
from advisor.cli.parameters import Percent, format_option
from advisor.core.errors import ExitCode


@click.command(cls=Command)
@click.option(
    "--fail-on-regression",
    "tolerance",
    type=Percent(),
    metavar="SHARE",
    help="Exit with 1 if B's step is slower by more than SHARE, beyond noise. Exit with 4 if noise hides the answer.",
)
@format_option("text", "json", "md")
@click.argument("a", metavar="A", shell_complete=completion.runs)
@click.argument("b", metavar="B", shell_complete=completion.runs)
def compare(a: str, b: str, *, tolerance: float | None, form: str) -> int:
    """Compare recorded run B with A: step time with an interval, kernels, launches, bytes, memory.

    Times are compared only if both runs are from the same machine. Counts and bytes are always compared.

    \b
    Examples:
      advisor compare advisor-runs/base last
      advisor compare base new --fail-on-regression 3%
    """
    from advisor import runs
    from advisor.reporting import terminal
    from advisor.reporting.compare import Regression, compare_markdown, compare_profiles

    comparison = compare_profiles(runs.load_profile(a)[1], runs.load_profile(b)[1])
    if form == "json":
        text = output.document("comparison", comparison)
    elif form == "md":
        text = compare_markdown(comparison)
    else:
        text = terminal.comparison_text(
            comparison, output.width(), output.color(sys.stdout), drawn=output.on_terminal(sys.stdout)
        )
    output.say(text, sys.stdout)
    if tolerance is None:
        return ExitCode.OK
    verdict = comparison.regression(tolerance)
    output.say(f"advisor: {verdict.detail}")
    return {
        Regression.NO: ExitCode.OK,
        Regression.YES: ExitCode.FINDINGS,
        Regression.UNDECIDED: ExitCode.INCONCLUSIVE,
    }[verdict.outcome]
