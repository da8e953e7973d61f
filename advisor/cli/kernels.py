"""`advisor kernels`."""

from __future__ import annotations

import sys

import click

from advisor.cli import output
from advisor.cli.help import HelpGroup
from advisor.cli.parameters import format_option
from advisor.cli.progress import ProgressLine
from advisor.core.errors import ExitCode


@click.group(cls=HelpGroup)
def kernels() -> None:
    """List the bundled CUDA kernels, or check them on this GPU."""


@kernels.command("list")
@format_option("text", "json")
def list_kernels(form: str) -> None:
    """List every bundled kernel and the operation it replaces. Needs no GPU.

    \b
    Example:
      advisor kernels list
    """
    from advisor import pipeline
    from advisor.reporting.terminal_kernels import kernels_text

    rows = pipeline.kernels_list()
    if form == "json":
        output.say(output.document("kernels", rows), sys.stdout)
    else:
        output.say(kernels_text(rows, output.width(), output.color(sys.stdout)), sys.stdout)


@kernels.command()
@click.argument("family", required=False, default="")
@format_option("text", "json")
def verify(form: str, family: str) -> int:
    """Compile each kernel for this GPU and compare it with its reference. Exits with 1 when one is wrong, 5 without a GPU.

    Cases that PyTorch runs itself on this GPU's architecture are listed with the reason; they are not wrong.

    \b
    Examples:
      advisor kernels verify
      advisor kernels verify batchnorm_act --format json
    """
    from advisor import pipeline
    from advisor.reporting.terminal_kernels import verification_text

    with ProgressLine(live=True) as say:
        rows = pipeline.kernels_verify(say, family)
    if form == "json":
        output.say(output.document("verification", rows), sys.stdout)
    else:
        output.say(verification_text(rows, output.width(), output.color(sys.stdout)), sys.stdout)
    return ExitCode.FINDINGS if any(row["passed"] is False for row in rows) else ExitCode.OK
