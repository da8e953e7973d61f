"""`advisor bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from advisor.cli import output
from advisor.cli.help import Command
from advisor.cli.parameters import Duration, Part
from advisor.cli.progress import ProgressLine

HELP = """Measure the bundled kernels, or whole trainings, on this GPU.

`ops` times each bundled kernel and PyTorch's own, and writes the table of what is dispatched. `models` times whole trainings, plain and with a plan. `real` does so for
other people's trainings, each started by a runner in FOLDER, one per GPU at a time. `hosts` times the CPU side of a small
network's step, plain and with the kernels, without CUDA graphs. `tune` times each kernel with every combination of its launch
constants. `conv` finds shapes where the installed cuDNN is slow: it sweeps channels, sides, batches, taps, dilation, groups,
strides and transposed convolutions. `scaling` trains with the plan of one GPU on 1, 2 and 4, and tells how far from so many
times one GPU's speed that is, and from the prediction. `cupy` times loops of CuPy alone in fresh runs: as written, with the
changes that keep their precision, and with all; with FOLDER those behind its runners.

advisor writes each row of ops, models, real, hosts, conv, scaling and cupy as soon as it is measured. A new row replaces an earlier row of the
same case; other rows stay. A runner is a file run_NAME.sh: it makes the data, changes to its folder and starts the script
after $PREFIX (`exec ${PREFIX:-python3} train.py …`).

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
  advisor bench scaling --filter resnet50
  advisor bench cupy --filter cnn
  advisor bench conv --filter channels -o conv.json
  advisor bench tune --filter "batchnorm_act bn+relu bfloat16" -o tuning.json
"""


@click.command(cls=Command, help=HELP)
@click.option("--filter", "pattern", default="", metavar="TEXT", help="Only the rows whose name contains TEXT.")
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
    help="Also measure: eager PyTorch, torch.compile; for trainings the script tuned by hand, and compiled. "
    "`bench ops` always measures eager.",
)
@click.option(
    "--changed",
    is_flag=True,
    help="Only the cases or trainings without complete rows in the file, or with changed kernels. For a training the old plan is then "
    "proved and timed again, as `advisor apply --plan` does, without a search.",
)
@click.option(
    "--short",
    "short_only",
    is_flag=True,
    help="`bench ops`: only the cases below their goal in the file (docs/benchmarks/README.md, Goals).",
)
@click.option(
    "--part",
    type=Part(),
    default="1/1",
    metavar="I/N",
    help="`bench ops`: only every N-th case, from the I-th on. Run one process on each of N equal GPUs; all write one file.",
)
@click.option(
    "--counters",
    is_flag=True,
    help="`bench ops`: also count which share of each unit's peak our kernels use: memory, caches, pipes. The GPU's performance "
    "monitors count after the timing. With --changed, complete rows without counts are counted and not timed again. Without "
    "permission to read the monitors nothing is measured.",
)
@click.option(
    "--host-only",
    is_flag=True,
    help="`bench ops`: measure only the host times of the rows on file again. A second a case.",
)
@click.option(
    "--max-time",
    type=Duration(),
    default="10m",
    show_default=True,
    help="`bench models` and `real`: end each search after this time, as `advisor apply --max-time` does.",
)
@click.option(
    "--limit",
    type=Duration(),
    default="15m",
    show_default=True,
    help="`bench real` and `scaling`: interrupt a runner, or a case, after this time, its start included.",
)
@click.option(
    "--runs",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="`bench models`, `real` and `scaling`: keep the run folders in DIR, for `advisor report`.",
)
@click.argument("what", type=click.Choice(("ops", "models", "real", "hosts", "tune", "conv", "scaling", "cupy")))
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
    """What HELP says."""
    from advisor.bench import cupy_trainings, hosts, models, op_rows, ops, real, scaling, sweep, tune

    names = tuple(name.strip() for name in baselines.split(",") if name.strip())
    for name in names:
        if name not in ("eager", "compile"):
            raise click.BadParameter(f"{name!r} is not one of eager, compile", param_hint="--baseline")
    if what != "cupy" and (folder is None) == (what == "real"):
        raise click.UsageError(
            "`bench real` takes the folder of its runners"
            if folder is None
            else "only `bench real` and `bench cupy` take a folder"
        )
    if host_only and (changed or counters):
        raise click.UsageError("--host-only leaves all else of a row: it goes with neither --changed nor --counters")
    if out is not None:
        output.writable(out)  # said now and not after an hour
    with ProgressLine(live=True) as say:
        common: dict[str, Any] = {"out": out, "say": say}
        trainings: dict[str, Any] = {"pattern": pattern, "baselines": names, "max_time_s": max_time, "runs": runs}
        if what == "tune":
            return int(tune.run(pattern=pattern, **common))
        if what == "conv":
            return int(sweep.run(pattern=pattern, **common))
        if what == "cupy":
            return int(cupy_trainings.run(folder, pattern=pattern, **common))
        if folder is not None:
            return int(real.run(folder, limit_s=limit, **trainings, **common))
        if what == "scaling":
            return int(scaling.run(pattern=pattern, limit_s=limit, runs=runs, **common))
        if what == "hosts":
            return int(hosts.run(pattern=pattern, **common))
        if what == "ops":
            choice = op_rows.RowChoice(pattern=pattern, changed=changed, short_only=short_only, part=part)
            return int(ops.run(choice, baselines=names, counters=counters, host_only=host_only, **common))
        return int(models.run(changed=changed, **trainings, **common))
