"""What a training's epochs cost beside their steps: making the loader's iterator, its first batch, the end of its workers.

A DataLoader starts its workers when it is iterated and ends them with the epoch, unless they persist; of a loader that is made anew
they cannot. The first batch of an iterator waits until the workers run and one of them has made a whole batch.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch.utils.data import DataLoader, IterableDataset

KEPT = 256  # starts remembered: a script may make an iterator for each batch


@dataclass(slots=True, eq=False)
class Start:
    """One iterator that the training draws from."""

    loader: int  # which of the DataLoaders, counted as they come; -1: none of torch's own
    made_ns: int  # in `iter(loader)`
    data: int = 0  # identity of its data set; 0: not known
    first_ns: int = 0  # in its first `next()`
    batches: int = 0
    ended_ns: int = 0  # in the `next()` that found it exhausted
    begun: int = 0  # draws from all of them before its own first, and up to its latest
    latest: int = 0
    again: bool = False  # it stands in a loop of the script
    length: int = 0  # batches that its loader tells; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochCost:
    """Of a typical start of an epoch, µs: the first one of all is left out where there are others.

    `make_us` goes into the iterator and its end: workers that are started and ended. `first_us` into the first `next()`.
    """

    starts: int = 0
    make_us: float = 0.0
    first_us: float = 0.0
    batches: float = 0.0  # of an epoch; 0.0: not known
    loaders: int = 0  # DataLoader objects that the starts were of
    again: bool = False  # the script makes iterators in a loop: further epochs come


class Epochs:
    """Filled by hooks of `iter(loader)` and `next(iterator)` in the training thread."""

    def __init__(self) -> None:
        self._ordinals: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._made: WeakKeyDictionary[Any, Start] = WeakKeyDictionary()  # iterators that nobody has drawn from
        self._open: WeakKeyDictionary[Any, Start] = WeakKeyDictionary()
        self._starts: deque[Start] = deque(maxlen=KEPT)
        self._numbers = itertools.count()
        self._count = 0
        self._draws = 0
        self._of_steps: set[int] = set()  # loaders whose batches a step was made of

    @property
    def begun(self) -> int:
        """Iterators that the training has drawn from so far."""
        return self._count

    def made(self, iterator: Any, loader: DataLoader[Any], nanoseconds: int, *, again: bool = False) -> None:
        """`iter(loader)` has returned, `again`: in a loop; it may be for an evaluation. Workers that persist have one iterator for all epochs."""
        if loader not in self._ordinals:
            self._ordinals[loader] = next(self._numbers)
        ordinal = self._ordinals[loader]
        self._open.pop(iterator, None)
        self._made[iterator] = Start(ordinal, nanoseconds, id(loader.dataset), again=again)

    def drawn(self, iterator: Any, loader: DataLoader[Any] | None, nanoseconds: int) -> int:
        """The training has drawn a batch; returns what `iter(loader)` took where it is the first, ns."""
        self._draws += 1
        start = self._open.get(iterator)
        if start is not None:
            start.batches, start.latest = start.batches + 1, self._draws
            return 0
        start = self._made.pop(iterator, None) or Start(-1, 0)
        start.first_ns, start.batches = nanoseconds, 1
        start.begun = start.latest = self._draws
        self._open[iterator] = start
        self._starts.append(start)
        self._count += 1
        if loader is not None:
            start.length = _length(loader)
        return start.made_ns

    def ended(self, iterator: Any, nanoseconds: int) -> None:
        """The iterator is exhausted: its workers have ended, unless they persist."""
        start = self._open.get(iterator)
        if start is not None:
            start.ended_ns = nanoseconds

    def trains(self, loader: DataLoader[Any]) -> None:
        """A step was made of this loader's batches: those of an evaluation are drawn with gradients enabled, too, in many a script."""
        if loader in self._ordinals:
            self._of_steps.add(self._ordinals[loader])

    def left(self, loader: DataLoader[Any]) -> bool:
        """The training has done with this loader's latest iterator."""
        ordinal = self._ordinals.get(loader)
        return all(self._over(start) for start in self._starts if start.loader == ordinal)

    def _over(self, start: Start) -> bool:
        """It was exhausted, or the script has begun another one over the same data and comes back to this one no more."""
        return bool(start.ended_ns) or any(
            other.data == start.data != 0 and other.begun > start.latest for other in self._starts
        )

    def _beside(self, start: Start) -> bool:
        """A few batches of another loader amid an epoch, which the script goes on with: images to show, no epoch of the training. One that
        is drawn to its end is: a short loader that starts anew beside a longer one.
        """
        amid = any(
            other.loader != start.loader
            and other.begun < start.begun
            and start.latest < other.latest
            and 2 * start.batches < other.batches
            for other in self._starts
        )
        return amid and not any(other.ended_ns for other in self._starts if other.loader == start.loader)

    def cost(self, usual_us: float) -> EpochCost:
        """What an epoch's start takes, beyond a batch as any other (`usual_us`)."""
        training = {-1, *self._of_steps} if self._of_steps else {start.loader for start in self._starts}
        starts = [start for start in self._starts if start.loader in training and not self._beside(start)]
        if not starts:
            return EpochCost()
        chosen = starts[1:] or starts
        ends = [start.ended_ns for start in starts if start.ended_ns]
        make_us = statistics.median(start.made_ns for start in chosen) / 1e3 + (
            statistics.median(ends) / 1e3 if ends else 0
        )
        first_us = max(0.0, statistics.median(start.first_ns for start in chosen) / 1e3 - usual_us)
        whole = [start.batches for start in starts if self._over(start)]
        known = (
            [statistics.median(whole)]
            if whole
            else [max(float(starts[-1].length), starts[-1].batches)]
            if starts[-1].length
            else []
        )
        return EpochCost(
            starts=self._count - (len(self._starts) - len(starts)),
            make_us=make_us,
            first_us=first_us,
            batches=known[0] if known else 0.0,
            loaders=len({start.loader for start in starts}),
            again=any(start.again for start in starts),
        )


def _length(loader: DataLoader[Any]) -> int:
    """Batches of an epoch; 0 where the loader does not know. A data set that is a stream would be asked for an estimate, and warn of it."""
    if isinstance(loader.dataset, IterableDataset):
        return 0
    try:
        return len(loader)
    except (TypeError, NotImplementedError, ValueError):
        return 0
