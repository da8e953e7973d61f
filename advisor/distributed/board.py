"""Where ranks read what the others have to say: a file of advisor's own in the run folder, at step boundaries.

No collective of advisor's stands among the script's, and nothing of the script's store is used, which may go with a rank: each rank
writes what it has, and waits for what the others write. Who has not written within `patience_s` is known by name. While no rank comes
to a boundary (one hangs, the others wait for it inside a backward pass) a thread in each goes on telling where its main thread is.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import distributed

from advisor.distributed.place import BOARD_FILE
from advisor.loop.sources import Lines

EVERY_S = 2.0
LAST_LOOK_S = 10.0  # that the end of the process waits for at most
# Where a rank stands that waits for others: in a collective, in a backward pass that ends with one, for a device that does.
_WAITS = tuple(
    os.path.join(*place)
    for place in (("distributed", "distributed_c10d.py"), ("autograd", "graph.py"), ("torch", "cuda", "__init__.py"))
)


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

    def exchange(self, value: Any, *, patience_s: float = 0.0) -> list[Any]:
        """What each rank has given, by rank: plain data. `patience_s` in place of the usual one, where it is longer.

        Raises:
            Lost: naming the ranks that have given nothing in time.
        """
        self._number += 1
        patience_s = max(patience_s, self.patience_s)
        keys = [f"advisor/{self._number}/{rank}" for rank in range(self.ranks)]
        self._store.set(keys[self.rank], json.dumps(value))
        try:
            self._store.wait(keys, timedelta(seconds=patience_s))
        except RuntimeError:  # of which torch's errors of stores are; a FileStore raises it bare
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            raise Lost(missing, f"{_named(missing)} did not come within {patience_s:g} s") from None
        return [json.loads(self._store.get(key)) for key in keys]


class Watch:
    """Tells when no rank has made a step for `patience_s`, and where each is: `lost` is called then, once in each rank.

    Rank 0 is the first to do so; the others follow where it does not, because it is gone or lets no thread run. `again`: it goes on
    watching, and tells only where some wait for others: an evaluation has no steps either.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: int,
        *,
        patience_s: float,
        lost: Callable[[Lost], None],
        again: bool = False,
    ) -> None:
        self._store, self._rank, self._ranks, self._patience_s, self._lost = store, rank, ranks, patience_s, lost
        self._again, self._every_s = again, max(EVERY_S, patience_s / 20)
        self._main, self._lines = threading.main_thread().ident, Lines()
        self.steps = 0  # counted by whoever sees boundaries
        self.resting = False  # no step is to be expected: a change is judged, and the board waits for its end
        self._looking, self._over = threading.Lock(), False
        atexit.register(self.end)
        threading.Thread(target=self._run, daemon=True, name="advisor-ranks").start()

    def end(self) -> None:
        """No more looks, and none that goes on: a thread that Python ends inside a store of torch's takes the process along (SIGABRT)."""
        if self._looking.acquire(timeout=LAST_LOOK_S):
            self._over = True
            self._looking.release()

    def _run(self) -> None:
        looks = self._looks()
        while True:
            time.sleep(self._every_s)
            with self._looking:
                if self._over or not next(looks, False):
                    return

    def _looks(self) -> Iterator[bool]:
        """One look each; ends where there is nothing more to be seen."""
        seen, since = -1, time.monotonic()
        while True:
            try:
                self._store.set(f"advisor/at/{self._rank}", json.dumps([self.steps, *self._place()]))
                if self.steps != seen or self.resting:
                    seen, since = self.steps, time.monotonic()
                elif seen and time.monotonic() - since > self._patience_s + 2 * self._every_s * self._rank:
                    told, since = self._told(), time.monotonic()
                    if not self._again:
                        self._lost(told)
                        return
                    if 0 < len(told.ranks) < self._ranks:
                        self._lost(told)
            except Exception:  # the store is gone: the job ends
                return
            yield True

    def _place(self) -> tuple[str, bool]:
        """The script's line in the main thread, and whether it waits for other ranks there."""
        frame = sys._current_frames().get(self._main or 0)
        line, waits, at = self._lines.users(frame), False, frame
        while at is not None:
            name = at.f_code.co_filename
            waits |= name.endswith(_WAITS)
            at = at.f_back
        return line, waits

    def _told(self) -> Lost:
        found: list[tuple[int, str, bool]] = []
        for rank in range(self._ranks):
            key = f"advisor/at/{rank}"
            found.append(tuple(json.loads(self._store.get(key))) if self._store.check([key]) else (0, "", False))
        most = max(steps for steps, _, _ in found)
        behind = [rank for rank, (steps, _, _) in enumerate(found) if steps < most]
        hung = behind or [rank for rank, (_, _, waits) in enumerate(found) if not waits]
        places = ", ".join(
            f"rank {rank} {'waits' if waits else 'is'} at {line or 'no line of the script'} (step {steps})"
            for rank, (steps, line, waits) in enumerate(found)
        )
        return Lost(hung, f"no step for {self._patience_s:g} s: {_named(hung)} held the others up; {places}")


def of_run(folder: Path, *, patience_s: float) -> Board:
    """The board of this process's ranks. All are of one host, and share the folder; place.clear_board is called before they start."""
    return Board(_store(folder), distributed.get_rank(), distributed.get_world_size(), patience_s=patience_s)


def watch(folder: Path, *, patience_s: float, lost: Callable[[Lost], None], again: bool = False) -> Watch:
    """A watch over this process's ranks."""
    ranks = distributed.get_world_size()
    return Watch(_store(folder), distributed.get_rank(), ranks, patience_s=patience_s, lost=lost, again=again)


def _store(folder: Path) -> Any:
    return distributed.FileStore(str(folder / BOARD_FILE))  # type: ignore[attr-defined]  # torch does not list it


def _named(ranks: list[int]) -> str:
    return " and ".join(f"rank {rank}" for rank in ranks) or "no rank"
