"""`--gpus N` of the command line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """`--gpus N` and what goes with it. `allow`: parts of a batch may train otherwise than the whole does; `shard`: what each rank keeps a
    share of (distributed/place.py).
    """

    count: int = 1
    allow: bool = False
    shard: str = ""


SENDS = {"sends": "inside"}
"""Parameters of `cuda_graphs` with which graphs of several ranks hold what DistributedDataParallel would send. Without, a model that several
ranks train has no graphs: no GPU has measured it yet, so it is on only where a proof in all ranks follows, or has been made.
"""
