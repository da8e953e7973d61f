"""Each rank's share of a batch, in the order in which one process would load it.

A loader that is iterated with gradients on is a training's: of each batch of indices that its sampler gives, rank r of N takes the r-th
part, as even as it goes. All ranks draw the same indices, because Python's, NumPy's and torch's host generators stand alike in all of
them; what a data set draws for its items comes from generators of each rank's own, so that the parts are augmented differently. A
checksum of the indices is compared across ranks, at an epoch's first batch and at its end. `len(loader)` is what it was. Loaders that are
iterated without gradients, for an evaluation, are not divided: each rank sees the whole, and all come to the same numbers.

An IterableDataset has no indices. Each rank reads the whole stream, draws alike, and keeps its part of each batch before it is collated.
"""

from __future__ import annotations

import functools
import os
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data.dataloader import _BaseDataLoaderIter

from advisor.distributed.refused import refuse
from advisor.loop.patches import Patches
from advisor.loop.sources import user_line

APART = 1 << 40  # between the seeds of two ranks' workers
Order = Callable[[list[Any]], list[Any]]


def part(indices: list[Any], rank: int, ranks: int) -> list[Any]:
    """The rank's share: neighbours in the batch, of sizes that differ by at most one.

    Where there are fewer samples than ranks (the last batch of an epoch), each has all: the mean over ranks is theirs.
    """
    if len(indices) < ranks:
        return indices
    return indices[rank * len(indices) // ranks : (rank + 1) * len(indices) // ranks]


def rotated(indices: list[Any], by: float) -> list[Any]:
    """The same batch in another order: it begins at this share of it."""
    at = int(len(indices) * by)
    return indices[at:] + indices[:at]


class Generators:
    """Host generators of this rank's own, in place of the common ones where a part of a batch is made or computed."""

    def __init__(self, rank: int) -> None:
        self._state: list[Any] | None = None
        self._seed = 7_919 * (rank + 1)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, draws are this rank's own; behind it, the common generators stand where they stood."""
        common = _states()
        if self._state is None:
            _seed((torch.initial_seed() + self._seed) % 2**32)
        else:
            _set(self._state)
        try:
            yield
        finally:
            self._state = _states()
            _set(common)


class Loaders:
    """Divides what training loaders load, from `install` on.

    Attributes:
        divided: the batch drawn last was; None before the first.
        share: this rank's samples in it, of all.
    """

    def __init__(self, rank: int, ranks: int, *, order: Order | None = None) -> None:
        self.rank, self.ranks = rank, ranks
        self.divided: bool | None = None
        self.share = 1.0 / ranks
        self.generators = Generators(rank)
        self._order: Order = order or functools.partial(part, rank=rank, ranks=ranks)
        self._whole = order is not None  # one process, with its batches in another order
        self._process = os.getpid()

    def install(self, patches: Patches) -> None:
        """Hook the data loaders of this process."""
        patches.replace(DataLoader, "__iter__", self._iterates(DataLoader.__iter__))
        patches.replace(_BaseDataLoaderIter, "__next__", self._next(_BaseDataLoaderIter.__next__))
        if not self._whole:
            patches.replace(_MapDatasetFetcher, "fetch", self._fetches(_MapDatasetFetcher.fetch))

    def _iterates(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def iterate(loader: Any) -> Any:
            known = vars(loader).get("_advisor_batches")
            if isinstance(loader.dataset, IterableDataset) and loader.batch_size is not None:
                return self._streams(loader, plain)
            if torch.is_grad_enabled() and os.getpid() == self._process:
                self._check(loader)
                if known is None:
                    known = vars(loader)["_advisor_batches"] = Batches(loader, self._order)
                    if loader.num_workers and not self._whole:
                        vars(loader)["worker_init_fn"] = Seeded(loader.worker_init_fn, self.rank)
                vars(loader)["batch_sampler"] = known
            elif known is not None:
                vars(loader)["batch_sampler"] = known.plain
            return plain(loader)

        return iterate

    def _streams(self, loader: Any, plain: Any) -> Any:
        """Iterate a loader of an IterableDataset."""
        known = vars(loader).get("_advisor_parts")
        if torch.is_grad_enabled() and os.getpid() == self._process:
            if not self._whole:
                self._check_size(loader)
            known = known or vars(loader).setdefault("_advisor_parts", Parts(loader.collate_fn, self._order))
            vars(loader)["collate_fn"] = known
        elif known is not None:
            vars(loader)["collate_fn"] = known.plain
        return plain(loader)

    def _taken_of(self, batch: tuple[Any, int, int]) -> Any:
        """What Parts has made of a stream's batch."""
        collated, mine, whole = batch
        self.divided = not self._whole
        self.share = self._share(mine, whole)
        return collated

    def _share(self, mine: int, whole: int) -> float:
        """What this rank's samples weigh: where all ranks have all of them, as much as any other rank's."""
        return mine / whole if mine < whole or self._whole else 1 / self.ranks

    def _check(self, loader: DataLoader[Any]) -> None:
        """Leave the script with the reason where this loader cannot be divided."""
        if self._whole:
            return
        if loader.batch_sampler is None:
            refuse("a loader with batch_size=None loads batches that the data set has made", user_line())
        if isinstance(loader.sampler, DistributedSampler):
            refuse("a DistributedSampler divides the data already", user_line(), "Start it with torchrun.")
        self._check_size(loader)

    def _check_size(self, loader: DataLoader[Any]) -> None:
        if loader.batch_size is not None and loader.batch_size < self.ranks:
            refuse(f"a batch of {loader.batch_size} has no share for each of {self.ranks} ranks", user_line())

    def _next(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def following(iterator: Any) -> Any:
            batches = getattr(iterator, "_index_sampler", None)
            if os.getpid() != self._process:
                return plain(iterator)
            try:
                batch = plain(iterator)
            except StopIteration:
                if isinstance(batches, Batches) and not self._whole:
                    agree(batches.checksum, "an epoch")
                raise
            if isinstance(getattr(iterator, "_collate_fn", None), Parts):
                return self._taken_of(batch)
            self.divided = isinstance(batches, Batches) and not self._whole
            if isinstance(batches, Batches):
                mine, whole, first = batches.taken()
                self.share = self._share(mine, whole)
                if first is not None and not self._whole:
                    agree(first, "its first batch")
            return batch

        return following

    def _fetches(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def fetch(fetcher: Any, indices: Any) -> Any:
            if os.getpid() != self._process or not torch.is_grad_enabled():  # a worker; an evaluation
                return plain(fetcher, indices)
            with self.generators.in_place():
                return plain(fetcher, indices)

        return fetch


class Items:
    """In a proof: what a data set draws for an item hangs on the item alone, not on who loads it or what was loaded before."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def install(self, patches: Patches) -> None:
        """Hook how items are fetched, in this process and in workers that it forks."""
        patches.replace(_MapDatasetFetcher, "fetch", self._fetches(_MapDatasetFetcher.fetch))

    def _fetches(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def fetch(fetcher: Any, indices: Any) -> Any:
            if not fetcher.auto_collation or getattr(fetcher.dataset, "__getitems__", None):
                return plain(fetcher, indices)
            states = _states()
            try:
                return fetcher.collate_fn([self._item(fetcher.dataset, index) for index in indices])
            finally:
                _set(states)

        return fetch

    def _item(self, dataset: Any, index: Any) -> Any:
        _seed(zlib.crc32(repr(index).encode(), self._seed & 0xFFFFFFFF))
        return dataset[index]


class Batches:
    """In the place of a loader's batch sampler: its batches, each this rank's part of it.

    `checksum` is of all indices of the epoch so far, and of what a Subset stands for.
    """

    def __init__(self, loader: DataLoader[Any], order: Order) -> None:
        self.plain: Any = loader.batch_sampler
        self._order, self._data = order, _checksum_of(loader.dataset)
        self.checksum = 0
        self._drawn: deque[tuple[int, int, int | None]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        self.checksum = self._data
        drawn = self._drawn = deque()
        for number, batch in enumerate(self.plain):
            indices = list(batch)
            mine = self._order(indices)
            self.checksum = zlib.crc32(repr(indices).encode(), self.checksum)
            drawn.append((len(mine), len(indices), None if number else self.checksum))
            yield mine

    def __len__(self) -> int:
        return len(self.plain)

    def __getattr__(self, name: str) -> Any:  # `loader.batch_sampler.batch_size`, `.set_epoch`
        return getattr(self.__dict__["plain"], name)

    def taken(self) -> tuple[int, int, int | None]:
        """Of the batch that has just come out: this rank's samples, all, and at the epoch's first the checksum then."""
        return self._drawn.popleft()


class Parts:
    """In the place of a stream's `collate_fn`: collates this rank's part, and says how many samples it has, of how many."""

    def __init__(self, plain: Callable[[list[Any]], Any], order: Order) -> None:
        self.plain, self._order = plain, order

    def __call__(self, samples: list[Any]) -> tuple[Any, int, int]:
        mine = self._order(list(samples))
        return self.plain(mine), len(mine), len(samples)


class Seeded:
    """A loader's `worker_init_fn`: a worker's generators are other ranks' no more; then the script's own."""

    def __init__(self, own: Callable[[int], None] | None, rank: int) -> None:
        self.own, self.rank = own, rank

    def __call__(self, worker: int) -> None:
        if self.rank:
            seed = torch.initial_seed() + APART * self.rank
            torch.manual_seed(seed)
            random.seed(seed)
            if (numpy := sys.modules.get("numpy")) is not None:
                numpy.random.seed((seed ^ (seed >> 32)) % 2**32)
        if self.own is not None:
            self.own(worker)


def agree(checksum: int, what: str) -> None:
    """Leave the script where ranks have drawn different indices: some samples would be seen twice, others never."""
    found = torch.tensor([checksum, -checksum])
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    if int(found[0]) != -int(found[1]):
        refuse(
            f"ranks have drawn different samples for {what}: the split or the order is drawn from a generator that is not "
            "the same in all of them",
            user_line(),
            "Seed it.",
        )


def _checksum_of(dataset: Any) -> int:
    found = 0
    while isinstance(dataset, Subset):
        found = zlib.crc32(repr(list(dataset.indices)).encode(), found)
        dataset = dataset.dataset
    try:
        return zlib.crc32(str(len(dataset)).encode(), found)
    except TypeError:
        return found


def _seed(seed: int) -> None:
    """The host's generators, from 32 bits."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed)


def _states() -> list[Any]:
    numpy = sys.modules.get("numpy")
    return [random.getstate(), torch.get_rng_state(), numpy.random.get_state() if numpy is not None else None]


def _set(states: list[Any]) -> None:
    random.setstate(states[0])
    torch.set_rng_state(states[1])
    if states[2] is not None:
        sys.modules["numpy"].random.set_state(states[2])
