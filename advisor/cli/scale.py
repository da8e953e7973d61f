"""`advisor scale`."""

from __future__ import annotations

import sys

import click

from advisor.cli import completion, output
from advisor.cli.help import Command
from advisor.cli.parameters import format_option


@click.command(cls=Command)
@click.option(
    "--gpus", "ranks", multiple=True, type=click.IntRange(1, 100_000), metavar="N", help="Number of GPUs (repeatable)."
)
@click.option(
    "--link",
    default="measured",
    metavar="NAME",
    show_default=True,
    help="Link inside a host: `measured` (two ranks, some seconds), nvlink, pcie, or LATENCY_US,GB_PER_S.",
)
@click.option(
    "--between",
    default="ib400",
    show_default=True,
    metavar="NAME",
    help="Link between hosts: ib400, or LATENCY_US,GB_PER_S.",
)
@click.option("--host", default=8, show_default=True, type=click.IntRange(1, 64), metavar="N", help="GPUs of one host.")
@click.option("--cores", type=click.IntRange(1), metavar="N", help="Cores of one host. Default: as many a GPU as here.")
@click.option(
    "--storage",
    type=(float, float),
    metavar="BYTES GB_PER_S",
    help="Bytes of a sample, and what the file system gives all hosts.",
)
@click.option("--epochs", type=float, metavar="E", help="Also predict the GPU-hours of E epochs of --samples.")
@click.option("--samples", type=float, metavar="N", help="Samples of an epoch.")
@click.option("--local-norms", is_flag=True, help="Batch norms use each rank's own statistics.")
@format_option("text", "json")
@click.argument("run", default="last", shell_complete=completion.runs)
def scale(
    run: str,
    *,
    ranks: tuple[int, ...],
    link: str,
    between: str,
    host: int,
    cores: int | None,
    storage: tuple[float, float] | None,
    epochs: float | None,
    samples: float | None,
    local_norms: bool,
    form: str,
) -> int:
    """Predict a step on N GPUs from RUN, the profile of one GPU. RUN is a folder, or `last`. Each GPU has the profiled batch.

    \b
    Examples:
      advisor scale                                 the last profile
      advisor scale --gpus 4 --link nvlink last
      advisor scale --epochs 90 --samples 1281167   and what a training would take
    """
    from advisor import pipeline

    if (epochs is None) != (samples is None):
        raise click.UsageError("--epochs and --samples belong together", click.get_current_context())
    found = pipeline.scale(
        run,
        ranks or (2, 4, 8, 64, 1024),
        link=link,
        between=between,
        host=host,
        local_norms=local_norms,
        cores=cores or 0,
        storage=storage or (0.0, 0.0),
    )
    whole = epochs * samples if epochs is not None and samples is not None else None
    if form == "json":
        rows = [
            {name: getattr(one, name) for name in one.__slots__}
            | ({"gpu_hours": one.gpu_hours(whole)} if whole else {})
            for one in found.rows
        ]
        told = {"links": list(found.links), "one_us": found.one_us, "foretold": rows}
        output.say(output.document("scaling", told), sys.stdout)
        return 0
    from advisor.reporting import scaling

    output.say(
        scaling.text(
            found.rows,
            output.width(),
            one_us=found.one_us,
            links=found.links,
            samples=whole,
            device=found.device,
        ).rstrip("\n"),
        sys.stdout,
    )
    return 0
