"""`advisor bench`."""

from __future__ import annotations

from pathlib import Path

import click

from advisor.cli.progress import Progress


@click.command()
@click.option("--filter", "pattern", default="", metavar="TEXT", help="Only the rows whose name holds TEXT.")
@click.option(
    "--json",
    "json_out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the results to FILE.",
)
@click.option("--baselines/--no-baselines", default=True, show_default=True, help="Also measure what people use today.")
@click.argument("what", type=click.Choice(("ops", "models")))
def bench(what: str, *, pattern: str, json_out: Path | None, baselines: bool) -> int:
    """Measure on this GPU: `ops`, each bundled kernel beside PyTorch's own; `models`, whole trainings plain and applied.

    \b
    Examples:
      advisor bench ops --filter batchnorm
      advisor bench models --json models.json
    """
    from advisor.bench import models, ops

    with Progress(live=True) as say:
        chosen = ops if what == "ops" else models
        return int(chosen.run(pattern=pattern, json_out=json_out, baselines=baselines, say=say))
