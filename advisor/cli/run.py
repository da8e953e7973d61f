"""`advisor run`."""

from __future__ import annotations

from pathlib import Path

import click

from advisor.cli.help import Command
from advisor.cli.parameters import SCRIPT_CONTEXT, gpus_options, known_words_argument, module_option, verbosity_options
from advisor.cli.progress import ProgressLine
from advisor.core.gpus import Gpus


@click.command(cls=Command, context_settings=SCRIPT_CONTEXT)
@click.option(
    "--plan",
    type=click.Path(path_type=Path),
    metavar="PLAN",
    default="last",
    show_default=True,
    help="The plan: a file, a run's folder, or `last`: the newest plan for SCRIPT, plan.yaml here or one in advisor-runs/.",
)
@click.option("--strict", is_flag=True, help="Do not start if an item of the plan no longer fits.")
@click.option(
    "--background-saves",
    is_flag=True,
    help="`torch.save` copies to the host and returns. Another process writes the same bytes.",
)
@gpus_options
@verbosity_options
@module_option
@known_words_argument
def run(
    words: tuple[str, ...],
    *,
    module: bool,
    plan: Path,
    strict: bool,
    background_saves: bool,
    gpus: int,
    allow: str | None,
    shard: str | None,
    quiet: bool,
    verbose: bool,
) -> int:
    """Train with a proved plan, to the end. Nothing is searched. The exit code is the script's own.

    advisor names each change that no longer fits the script, the model or the machine, and trains without it. With --strict it
    does not start. Without SCRIPT it runs the plan's own script and arguments.

    With --gpus a SCRIPT written for one GPU trains on N, unedited. Each rank takes its part of each batch, so batches, their
    order and the training stay those of one process. Short runs prove this first, unless the plan already holds the proof. A
    script that cannot be divided is refused, with the line at fault.

    \b
    Examples:
      advisor run train.py --lr 0.1     the last proved plan
      advisor run                       the last proved plan with its own script
      advisor run --plan plan.yaml train.py --lr 0.1
      advisor run --gpus 4 train.py --lr 0.1
      advisor run -- torchrun --nproc-per-node 4 train.py
    """
    from advisor import pipeline

    with ProgressLine(quiet=quiet, verbose=verbose) as say:
        return int(
            pipeline.run(
                words,
                module=module,
                plan=plan,
                strict=strict,
                saves=background_saves,
                gpus=Gpus(count=gpus, allow=allow is not None, shard=shard or ""),
                say=say,
            )
        )
