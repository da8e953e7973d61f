"""Which rank this process is of those that `--gpus N` has started; its GPU, console and files. No torch: it runs at Python's start.

The script takes itself for the only process. It sees one GPU, `cuda:0`; and only rank 0 writes: what the others print goes to a log in
the run folder, and what they write to disk to a folder of their own (userfiles/scratch.py).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Set by the supervisor: how many ranks, the run folder, a seed for generators that no script has to seed, whose statistics a batch norm
# takes ("local" for each rank's own, else all ranks'). Set by each rank, for the Python processes below it: its number.
RANKS_VARIABLE, FOLDER_VARIABLE, RANK_VARIABLE = "ADVISOR_GPUS", "ADVISOR_RANKS_DIR", "ADVISOR_RANK"
SEED_VARIABLE, NORMS_VARIABLE, LOCAL = "ADVISOR_COMMON_SEED", "ADVISOR_NORMS", "local"
SHARE_VARIABLE = "ADVISOR_SHARE"  # one process alone, that loads of each batch what one of so many ranks would
# What ranks keep a share of; "" for nothing. HYBRID: as FSDP2 within each half of them.
SHARD_VARIABLE, ZERO1, FSDP2, HYBRID = "ADVISOR_SHARD", "zero1", "fsdp2", "hybrid"
PIPELINE = "pipeline"  # layers in stages: what the backward needs of them
SHARDS = (ZERO1, HYBRID, FSDP2, PIPELINE)
OF_WEIGHTS = (HYBRID, FSDP2)
HALVES = 2  # that HYBRID makes
BOARD_FILE = "board"
# Events of ranks: one that ends by an exception of the script's; one that does not come to where the others wait; all that end because
# the script cannot be divided; all exit codes but 0.
FAILED, LOST, REFUSED, ENDED = "rank failed", "rank lost", "refused", "ranks ended"
# What torchrun tells its ranks. A script that asks for these would take up its own way of training in several processes.
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
             "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWay:
    """How ranks train together. `norms`: LOCAL for batch norms by each rank's own statistics; `shard`: one of SHARDS, or "" where each rank
    holds all.
    """

    norms: str = ""
    shard: str = ""

    @property
    def same(self) -> bool:
        """Whether it is the training of one process."""
        return self.norms != LOCAL

    @property
    def divides(self) -> bool:
        """Whether each rank has a part of the batch; in a pipeline all have the whole."""
        return self.shard != PIPELINE


def shard() -> str:
    """What the ranks keep a share of."""
    return os.environ.get(SHARD_VARIABLE, "")


def ranks() -> int:
    """How many ranks train this script together by advisor's doing; 1 where it runs as it is."""
    return int(os.environ.get(RANKS_VARIABLE, "1"))


def rank() -> int:
    """The number of this one, from 0."""
    return int(os.environ.get(RANK_VARIABLE, "0"))


def common_seed() -> int:
    """For Python's and NumPy's generators."""
    return int(os.environ.get(SEED_VARIABLE, "0"))


def local_norms() -> bool:
    """Whether batch norms take each rank's own statistics."""
    return os.environ.get(NORMS_VARIABLE) == LOCAL


def share() -> int:
    """Of how many ranks this single process stands for one; 1 where it stands for itself."""
    return int(os.environ.get(SHARE_VARIABLE, "1"))


def folder(number: int, run_dir: Path) -> Path:
    """What rank `number` leaves in the run folder."""
    return run_dir / "ranks" / f"rank-{number:04d}"


def clear_board(run_dir: Path) -> None:
    """What ranks of an earlier start have told each other (board.py) is gone."""
    (run_dir / BOARD_FILE).unlink(missing_ok=True)


def take() -> None:
    """At the start of a Python process of a rank, or of one below it, before anything else is imported."""
    number = os.environ.get("LOCAL_RANK") or os.environ.get(RANK_VARIABLE)
    if number is None or RANKS_VARIABLE not in os.environ:
        return
    first = RANK_VARIABLE not in os.environ  # else a process that the rank has started: it has all from there
    os.environ[RANK_VARIABLE] = number
    home = folder(int(number), Path(os.environ[FOLDER_VARIABLE]))
    if first:
        home.mkdir(parents=True, exist_ok=True)
        see_one_gpu(int(number))
        if int(number):
            _write_to(home / "output.log")
    if int(number):
        from advisor.userfiles.scratch import Scratch

        Scratch(home / "files").install()


def hide() -> None:
    """The launcher's variables are gone, once the process group is made."""
    for name in [name for name in os.environ if name in LAUNCHERS or name.startswith("TORCHELASTIC_")]:
        del os.environ[name]


def see_one_gpu(number: int) -> None:
    visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word]
    if not visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number)
    elif number < len(visible):
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[number]
    else:  # fewer GPUs than ranks: none, and not somebody else's
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


def _write_to(path: Path) -> None:
    """This process's standard output and error, and those of what it starts, go to `path`."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
