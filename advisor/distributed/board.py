"""Where ranks read what the others have to say: a store beside the script's own traffic, at step boundaries.

No collective of advisor's stands among the script's: each rank writes what it has, and waits for what the others write. Who has not
written within `patience_s` is known by name. While no rank comes to a boundary (one hangs, the others wait for it inside a backward
pass) a thread in each goes on telling where its main thread is.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch import distributed

from advisor.loop.sources import Lines

EVERY_S = 2.0


class Lost(Exception):
    """Ranks that have not come to where the others wait. `ranks` are their numbers."""

    def __init__(self, ranks: list[int], told: str) -> None:
        super().__init__(told)
        self.ranks = ranks


class Board:
    """The ranks' store; all ranks call `exchange` in the same order."""

    def __init__(self, store: Any, rank: int, ranks: int, *, patience_s: float) -> None:
        self._store, self.rank, self.ranks, self.patience_s = store, rank, ranks, patience_s
        self._number = 0

    def exchange(self, value: Any) -> list[Any]:
        """What each rank has given, by rank: plain data.

        Raises:
            Lost: naming the ranks that have given nothing in time.
        """
        self._number += 1
        keys = [f"advisor/{self._number}/{rank}" for rank in range(self.ranks)]
        self._store.set(keys[self.rank], json.dumps(value))
        try:
            self._store.wait(keys, timedelta(seconds=self.patience_s))
        except distributed.DistError:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise Lost(missing, f"{_named(missing)} did not come within {self.patience_s:g} s") from None
        return [json.loads(self._store.get(key)) for key in keys]


class Watch:
    """Tells when no rank has made a step for `patience_s`, and where each is. In rank 0 `lost` is called then, once."""

    def __init__(self, store: Any, rank: int, ranks: int, *, patience_s: float, lost: Callable[[Lost], None]) -> None:
        self._store, self._rank, self._ranks, self._patience_s, self._lost = store, rank, ranks, patience_s, lost
        self._main, self._lines = threading.main_thread().ident, Lines()
        self.steps = 0  # counted by whoever sees boundaries
        threading.Thread(target=self._run, daemon=True, name="advisor-ranks").start()

    def _run(self) -> None:
        seen, since = -1, time.monotonic()
        while True:
            time.sleep(EVERY_S)
            try:
                self._store.set(f"advisor/at/{self._rank}", json.dumps([self.steps, *self._place()]))
                if self.steps != seen:
                    seen, since = self.steps, time.monotonic()
                elif self._rank == 0 and seen and time.monotonic() - since > self._patience_s:
                    self._lost(self._told())
                    return
            except Exception:  # the store is gone: the job ends
                return

    def _place(self) -> tuple[str, bool]:
        """The script's line in the main thread, and whether it waits for other ranks there."""
        frame = sys._current_frames().get(self._main or 0)
        line, waits, at = self._lines.users(frame), False, frame
        while at is not None:
            name = at.f_code.co_filename
            waits |= name.endswith(
                (os.path.join("distributed", "distributed_c10d.py"), os.path.join("autograd", "graph.py"))
            )
            at = at.f_back
        return line, waits

    def _told(self) -> Lost:
        places, hung = [], []
        for rank in range(self._ranks):
            key = f"advisor/at/{rank}"
            steps, line, waits = json.loads(self._store.get(key)) if self._store.check([key]) else (0, "", False)
            hung += [] if waits else [rank]
            places.append(
                f"rank {rank} {'waits' if waits else 'is'} at {line or 'no line of the script'} (step {steps})"
            )
        return Lost(hung, f"no step for {self._patience_s:g} s: {_named(hung)} held the others up; {', '.join(places)}")


def of_group(*, patience_s: float) -> Board:
    """The board of this process's ranks."""
    store = distributed.distributed_c10d._get_default_store()
    return Board(store, distributed.get_rank(), distributed.get_world_size(), patience_s=patience_s)


def watch(*, patience_s: float, lost: Callable[[Lost], None]) -> Watch:
    """A watch over this process's ranks."""
    store = distributed.distributed_c10d._get_default_store()
    return Watch(store.clone() if hasattr(store, "clone") else store, distributed.get_rank(), distributed.get_world_size(),
                 patience_s=patience_s, lost=lost)  # fmt: skip


def _named(ranks: list[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks) or "no rank"
