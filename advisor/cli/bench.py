"""`advisor bench`."""

from __future__ import annotations

from pathlib import Path

import click

from advisor.cli import output
from advisor.cli.help import Command
from advisor.cli.parameters import Duration, Part
from advisor.cli.progress import Progress


@click.command(cls=Command)
@click.option("--filter", "pattern", default="", metavar="TEXT", help="Only the rows whose name holds TEXT.")
@click.option(
    "-o",
    "--out",
    "out",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the results, JSON, to FILE and not to docs/benchmarks.",
)
@click.option(
    "--baseline",
    "baselines",
    default="eager,compile",
    show_default=True,
    metavar="LIST",
    help="What else to measure: eager PyTorch, torch.compile; of a training, the script tuned by hand, and compiled too. "
    "`bench ops` always measures eager.",
)
@click.option(
    "--changed",
    is_flag=True,
    help="Only the cases or trainings that the file has no whole rows of, or whose kernels have changed since. What a training's "
    "search kept is then proved and timed again, as `advisor apply --plan` does, not searched for.",
)
@click.option(
    "--short",
    "short_only",
    is_flag=True,
    help="`bench ops`: only the cases that the file shows short of their goal (docs/benchmarks/README.md, Goals).",
)
@click.option(
    "--part",
    type=Part(),
    default="1/1",
    metavar="I/N",
    help="`bench ops`: only each N-th case, from the I-th on: one process for each of N GPUs of a kind, all into one file.",
)
@click.option(
    "--counters",
    is_flag=True,
    help="`bench ops`: also count, with the GPU's performance monitors, what share of each unit's peak our kernels use: memory, "
    "caches, pipes. That is done after the timing, which stays as it is. With --changed, rows that are as they should be but were never "
    "counted are counted and not timed again. Without permission to read them nothing is measured.",
)
@click.option(
    "--host-only",
    is_flag=True,
    help="`bench ops`: of the rows on file take the host's times again, and leave all else of them. A second a case.",
)
@click.option(
    "--max-time",
    type=Duration(),
    default="10m",
    show_default=True,
    help="`bench models` and `real`: end each search after this long, as `advisor apply --max-time` does.",
)
@click.option(
    "--limit",
    type=Duration(),
    default="15m",
    show_default=True,
    help="`bench real`: interrupt a run of a runner after this long, its making of data and its start included.",
)
@click.option(
    "--runs",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="`bench models` and `real`: leave the searches' run folders in DIR, for `advisor report`.",
)
@click.argument("what", type=click.Choice(("ops", "models", "real", "hosts", "tune", "conv")))
@click.argument("folder", required=False, type=click.Path(path_type=Path, file_okay=False, exists=True))
def bench(
    what: str,
    folder: Path | None,
    *,
    pattern: str,
    out: Path | None,
    baselines: str,
    changed: bool,
    short_only: bool,
    part: tuple[int, int],
    counters: bool,
    host_only: bool,
    max_time: float,
    limit: float,
    runs: Path | None,
) -> int:
    """Measure on this GPU: `ops`, each bundled kernel beside PyTorch's own; `models`, whole trainings plain and applied;
    `real`, trainings that other people wrote, each behind a runner in FOLDER, one on each GPU at a time;
    `hosts`, what a step of a small network costs the host, plain and with the kernels, without CUDA graphs; `tune`, each kernel with every
    combination of its launch constants, by turns with the present ones; `conv`, where the installed cuDNN falls off a cliff: sweeps of
    channels, sides, batches, taps, dilation, groups, strides and transposed convolutions.

    Rows of ops, models, hosts and conv are written as they are measured, into the place of earlier rows of the same case; other rows stay.
    A runner is a file run_NAME.sh: it makes what the training reads, goes to its folder and starts its script behind $PREFIX
    (`exec ${PREFIX:-python3} train.py …`).

    Rows of ops, models, real and hosts are written as they are measured, into the place of earlier rows of the same case; other rows stay.

    \b
    Examples:
      advisor bench ops --filter batchnorm_act
      advisor bench ops --filter "bn+add+relu bfloat16" --baseline eager
      advisor bench ops --filter "depthwise bfloat16" --counters
      advisor bench ops --changed --baseline eager
      advisor bench ops --short --changed --counters
      advisor bench ops --host-only
      CUDA_VISIBLE_DEVICES=1 advisor bench ops --changed --part 2/2
      advisor bench models --filter resnet50 --max-time 4m -o models.json
      advisor bench models --changed
      advisor bench real ~/trainings --filter raft,deeplab --max-time 2m
      advisor bench hosts --filter resnet
      advisor bench conv --filter channels -o conv.json
      advisor bench tune --filter "batchnorm_act bn+relu bfloat16" -o tuning.json
    """
    from advisor.bench import hosts, models, ops, real, sweep, tune

    names = tuple(name.strip() for name in baselines.split(",") if name.strip())
    for name in names:
        if name not in ("eager", "compile"):
            raise click.BadParameter(f"{name!r} is not one of eager, compile", param_hint="--baseline")
    if (folder is None) == (what == "real"):
        raise click.UsageError(
            "`bench real` takes the folder of its runners" if folder is None else "only `bench real` takes a folder"
        )
    if host_only and (changed or counters):
        raise click.UsageError("--host-only leaves all else of a row: it goes with neither --changed nor --counters")
    if out is not None:
        output.writable(out)  # said now and not after an hour
    with Progress(live=True) as say:
        if what == "tune":
            return int(tune.run(pattern=pattern, out=out, say=say))
        if what == "conv":
            return int(sweep.run(pattern=pattern, out=out, say=say))
        if folder is not None:
            return int(
                real.run(
                    folder,
                    pattern=pattern,
                    out=out,
                    baselines=names,
                    max_time_s=max_time,
                    limit_s=limit,
                    runs=runs,
                    say=say,
                )
            )
        if what == "hosts":
            return int(hosts.run(pattern=pattern, out=out, say=say))
        if what == "ops":
            return int(
                ops.run(
                    pattern=pattern,
                    out=out,
                    baselines=names,
                    changed=changed,
                    short_only=short_only,
                    part=part,
                    counters=counters,
                    host_only=host_only,
                    say=say,
                )
            )
        return int(
            models.run(
                pattern=pattern,
                out=out,
                baselines=names,
                changed=changed,
                max_time_s=max_time,
                runs=runs,
                say=say,
            )
        )
