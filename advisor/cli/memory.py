"""`advisor memory`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from advisor.cli import output
from advisor.cli.help import Command
from advisor.cli.parameters import (
    SCRIPT_CONTEXT,
    Bytes,
    format_option,
    module_option,
    verbosity_options,
    words_argument,
)
from advisor.cli.progress import ProgressLine


@click.command(cls=Command, context_settings=SCRIPT_CONTEXT)
@click.option(
    "--memory",
    type=Bytes(),
    metavar="SIZE",
    default="0",
    help="Memory to fit into, such as 24GiB. Without it, the device's.",
)
@click.option(
    "--gpus", type=click.IntRange(1, 1024), metavar="N", default=1, help="Also show the share of each of N GPUs."
)
@click.option(
    "--link",
    default="measured",
    metavar="NAME",
    show_default=True,
    help="With --gpus, the link between them: `measured` (two ranks, some seconds), nvlink, pcie, or LATENCY_US,GB_PER_S.",
)
@click.option("-o", "--out", type=click.Path(path_type=Path, file_okay=False), help="Folder for the run.")
@format_option("text", "json")
@verbosity_options
@module_option
@words_argument
def memory(
    words: tuple[str, ...],
    *,
    module: bool,
    memory: int,
    gpus: int,
    link: str,
    out: Path | None,
    form: str,
    quiet: bool,
    verbose: bool,
) -> int:
    """Show which tensors hold the memory of a step of SCRIPT, with their source lines, and how to use less.

    advisor watches one step, stops the script, and puts its files back. `advisor apply --goal memory` makes the step smaller,
    and proves it.

    \b
    Examples:
      advisor memory train.py --lr 0.1
      advisor memory --memory 24GiB --gpus 4 train.py
    """
    from advisor import pipeline
    from advisor.reporting import held

    with ProgressLine(quiet=quiet, verbose=verbose) as say:
        found = pipeline.memory(words, module=module, memory_bytes=memory, gpus=gpus, link=link, out=out, say=say)
    if form == "json":
        output.say(output.document("memory", found.look), sys.stdout)
        return 0
    output.say(held.text(found.look, found.others, batch=found.batch, memory_bytes=found.memory_bytes), sys.stdout)
    return 0
