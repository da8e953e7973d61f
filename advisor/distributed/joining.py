"""Makes this process a rank, once torch is imported and before the script goes on."""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib.util
import random
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import distributed

from advisor.core.stderr import say
from advisor.distributed import board, norms, place
from advisor.distributed.gradients import Gradients
from advisor.distributed.readings import Readings
from advisor.distributed.refused import refuse
from advisor.distributed.shards import Items, Loaders, part, rotated
from advisor.loop.patches import Patches
from advisor.loop.session import Session, tell
from advisor.loop.sources import user_line
from advisor.transforms import deferred

HUNG_S = 300.0  # without a step of a training's, before it is told who holds the others up


class JoinedRank:
    """What was put into this process; None while it is no rank."""

    loaders: Loaders | None = None
    gradients: Gradients | None = None


def join(session: Session) -> None:
    """One of `place.ranks()`, one process in one's stead, or by the session's orders one with its batches in another order."""
    if session.prints:
        Items(session.seed or 0).install(Patches())
    if place.ranks() > 1:
        _become_rank(session)
    elif (share := place.share()) > 1:
        JoinedRank.loaders = Loaders(0, 1, order=lambda indices: part(indices, 0, share))
        JoinedRank.loaders.install(Patches())
    elif session.rotate:
        by = session.rotate
        JoinedRank.loaders = Loaders(0, 1, order=lambda indices: rotated(indices, by))
        JoinedRank.loaders.install(Patches())


def share() -> float:
    """This rank's samples in the batch drawn last, of all; an even part of its weight where all have the whole batch. 1 in a process
    that is no rank of ours.
    """
    if place.ranks() > 1 and place.shard() == place.PIPELINE:
        return 1.0 / place.ranks()
    return JoinedRank.loaders.share if JoinedRank.loaders is not None and place.ranks() > 1 else 1.0


def mean(values: Sequence[float], shares: Sequence[float]) -> list[float]:
    """Each value's mean over all ranks by their shares; as they are in a process that is no rank of ours. All ranks call this together.

    Nothing where the script has left the group already.
    """
    if place.ranks() == 1 or not values:
        return list(values)
    if not distributed.is_initialized():
        return []
    own = torch.tensor(values, dtype=torch.float64) * torch.tensor(shares, dtype=torch.float64)
    distributed.all_reduce(own)
    return [float(value) for value in own]


def _become_rank(session: Session) -> None:
    rank, ranks = place.rank(), place.ranks()
    cuda = torch.cuda.is_available()
    distributed.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    place.hide()
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        numpy.random.seed(place.common_seed() % 2**32)
    random.seed(place.common_seed())
    torch.manual_seed(place.common_seed())
    atexit.register(_leave_group)  # before any other is: it is called last
    patches = Patches()  # never taken back: the script is N ranks to its end
    piped = place.shard() == place.PIPELINE
    loaders = Loaders(rank, ranks, order=list if piped else None)
    gradients = Gradients(loaders, synchronised=not place.local_norms(), shard=place.shard())
    loaders.install(patches)
    gradients.install(patches)
    readings = Readings(loaders, lambda: gradients.inside_model)
    readings.install(patches)
    deferred.Across.ranks = readings.ahead
    if not (place.local_norms() or piped):
        norms.install(patches)
    refuse_others(patches)
    _tell_failures(session, rank)
    JoinedRank.loaders, JoinedRank.gradients = loaders, gradients
    if session.mode == "run":
        gradients.watch = board.watch(session.folder, patience_s=HUNG_S, lost=_tell_hung, again=True)
    tell(session, "joined", rank=rank, ranks=ranks)


def _tell_hung(lost: board.Lost) -> None:
    """To the user of a training that goes on: who holds the others up. PyTorch itself ends it after 10 (NCCL) or 30 minutes (gloo)."""
    if place.rank() == 0 or 0 in lost.ranks:
        say(str(lost))


def _leave_group() -> None:
    with contextlib.suppress(Exception):  # the script has left it, or another rank has gone
        distributed.destroy_process_group()


def refuse_others(patches: Patches) -> None:
    """Scripts that train in several processes by themselves are refused; nn.DataParallel becomes what the ranks do."""

    def own_group(*args: Any, **kwargs: Any) -> Any:
        refuse("the script makes a process group of its own", user_line(), "Start it with torchrun.")

    patches.replace(distributed, "init_process_group", own_group)
    plain = torch.nn.DataParallel.__init__

    @functools.wraps(plain)
    def of_this_rank(
        module: Any, inner: torch.nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0
    ) -> None:
        """A rank has one GPU, whichever the script names: what DataParallel would divide, the ranks divide."""
        if dim:
            refuse(f"nn.DataParallel divides dimension {dim} of its inputs, and ranks divide the batch", user_line())
        plain(module, inner)

    patches.replace(torch.nn.DataParallel, "__init__", of_this_rank)


def _tell_failures(session: Session, rank: int) -> None:
    plain = sys.excepthook

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        last = traceback.extract_tb(trace)[-1:] if trace is not None else []
        where = f" ({last[0].filename}:{last[0].lineno})" if last else ""
        tell(session, place.FAILED, rank=rank, error=f"{kind.__name__}: {error}".splitlines()[0] + where)
        plain(kind, error, trace)

    sys.excepthook = told
