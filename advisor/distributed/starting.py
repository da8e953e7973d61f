"""The command that starts a script as several ranks: torchrun's agent, in the interpreter's place."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
from pathlib import Path

from advisor.core.errors import AdvisorError
from advisor.distributed import fallen, place
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.machine.hostload import cpu_count

_DEAD = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: (-?\d+)")
# What torch.multiprocessing.spawn says of a process that ended by a signal or an exit code, and by an exception.
_SPAWNED = re.compile(r"process (\d+) terminated with (signal|exit code) (\w+)")
_RAISED = re.compile(r"-- Process (\d+) terminated with the following error:\s*(.*)", re.DOTALL)
_ERROR = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)$", re.MULTILINE)


def on_ranks(
    command: ScriptCommand, ranks: int, run_dir: Path, *, seed: int, way: place.RankWay | None = None
) -> ScriptCommand:
    """The command as `ranks` processes of one host that train together. What they write lies in the run folder.

    Args:
        seed: of Python's and NumPy's generators and of the order of Python's sets, which are each process's own otherwise.
        way: how they train together; None for the plain way.

    Raises:
        AdvisorError: for a command that is no Python script.
    """
    if command.literal:
        raise AdvisorError(
            f"{command.name} is started by a command of its own",
            expected="a Python script with --gpus",
            fix="Leave --gpus out, or name the script itself.",
        )
    agent = (sys.executable, "-m", "advisor.distributed.agent", "--standalone", "--nproc-per-node", str(ranks))
    threads = max(1, cpu_count() // ranks)
    way = way or place.RankWay()
    variables = {
        place.RANKS_VARIABLE: str(ranks),
        place.FOLDER_VARIABLE: str(run_dir.resolve()),
        place.SEED_VARIABLE: str(seed),
        place.NORMS_VARIABLE: way.norms,
        place.SHARD_VARIABLE: way.shard,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),  # torchrun would set 1, and say so
        "PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", str(seed % 2**32)),
    }
    return dataclasses.replace(command, agent=agent, variables=tuple(variables.items()))


def one_of(command: ScriptCommand, ranks: int) -> ScriptCommand:
    """The command as one process that trains on what one of `ranks` would be given."""
    return dataclasses.replace(command, variables=((place.SHARE_VARIABLE, str(ranks)),))


def on_one_gpu(command: ScriptCommand) -> ScriptCommand:
    """The command as one process that sees one GPU, the first: nn.DataParallel would take all."""
    visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",") if word]
    variables = dict(command.variables) | {"CUDA_VISIBLE_DEVICES": visible[0] if visible else ""}
    return dataclasses.replace(command, variables=tuple(variables.items()))


def clear(run_dir: Path) -> None:
    """Remove the copies of files that all ranks but the first have written: the next start is to find none of them, as rank 0 does not."""
    for folder in (run_dir / "ranks").glob("*/files"):
        shutil.rmtree(folder, ignore_errors=True)


def dead_rank(told: str) -> str:
    """Which rank has ended first, and how, in what torchrun or torch.multiprocessing says of it; "" where neither says anything."""
    found = _DEAD.search(told[told.rfind("Root Cause") :] if "Root Cause" in told else told)
    if found is not None:
        return f"rank {found.group(1)} {fallen.ended(int(found.group(2)))}"
    if (found := _SPAWNED.search(told)) is not None:
        how = "was ended by" if found.group(2) == "signal" else "ended with exit code"
        return f"rank {found.group(1)} {how} {found.group(3)}"
    if (found := _RAISED.search(told)) is not None:
        errors = _ERROR.findall(found.group(2))
        return f"rank {found.group(1)}: {errors[-1][:200] if errors else 'it raised'}"
    return ""


def log_of(run_dir: Path, rank: int) -> Path:
    """What this rank has printed; rank 0 prints where the script does."""
    return place.folder(rank, run_dir) / "output.log"
