"""Watches the script's DataLoaders: what their iterators cost, which of them the step's batches come from."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from advisor.loop.epochs import Epochs
from advisor.loop.interval import EPOCH
from advisor.loop.repeats import in_loop
from advisor.loop.steps import FORWARD, StepWatcher
from advisor.loop.timing import clocks
from advisor.loop.training import Draw, Training
from advisor.loop.values import first_shape, still_to_come


class LoaderHooks:
    """Fills `Training.loaders`, and tells the watcher of each batch.

    Args:
        begun: is told when the first batch was asked for (perf_counter, ns).
        look: is given each batch of training, with its iterator where no loader of torch's has made that.
    """

    def __init__(
        self, training: Training, watcher: StepWatcher, begun: Callable[[int], None], look: Callable[[Any, Any], None]
    ) -> None:
        self._training, self._watcher, self._begun, self._look = training, watcher, begun, look
        self._iterators: WeakKeyDictionary[Any, DataLoader[Any]] = WeakKeyDictionary()
        self._drawn: list[DataLoader[Any]] = []
        self.epochs = Epochs()

    def let_go(self) -> None:
        """Hold none of the script's loaders any more."""
        self._drawn = []

    def adopt(self, *, clean: bool) -> None:
        """Loaders that were drawn from since the last boundary are known; `clean`: the interval held one training step and nothing else."""
        drawn, self._drawn = self._drawn, []
        # The batch that led to this boundary was drawn last; other loaders count in intervals without evaluation.
        for loader in drawn if clean else drawn[-1:]:
            self.epochs.trains(loader)
            self._adopt(loader, drawn)

    def _adopt(self, loader: DataLoader[Any], drawn: list[DataLoader[Any]]) -> None:
        """Add a loader, or put it in the place of one over the same data that the script has made anew: its workers must not live on."""
        known = self._training.loaders
        if any(loader is other for other in known):
            return
        for place, other in enumerate(known):
            done = self.epochs.left(other) and not any(other is used for used in drawn)
            if done and other.dataset is loader.dataset:
                known[place] = loader
                return
        known.append(loader)

    def hook(self) -> None:
        """Observe new DataLoader iterators and the time spent in their `next()`, from now to the end."""
        plain_iter, plain_next = DataLoader.__iter__, _BaseDataLoaderIter.__next__
        iterating, drawn = (
            self._watcher.patches.guard(self._observe_iter),
            self._watcher.patches.guard(self._observe_batch),
        )
        ended, timed = self._watcher.patches.guard(self.epochs.ended), self._watcher.patches.guard(self._time_draw)

        @wraps(plain_iter)
        def loader_iter(loader: Any) -> Any:
            start = time.perf_counter_ns()
            iterator = plain_iter(loader)
            iterating(loader, iterator, time.perf_counter_ns() - start)
            return iterator

        @wraps(plain_next)
        def loader_next(iterator: Any) -> Any:
            if not self._watcher.patches.active:
                return plain_next(iterator)
            late, wanted = still_to_come(iterator), self._training.draws
            before = clocks(self._training.device) if wanted is not None else None
            start = time.perf_counter_ns()
            try:
                batch = plain_next(iterator)
            except StopIteration:
                ended(iterator, time.perf_counter_ns() - start)
                raise
            drawn(iterator, batch, start, time.perf_counter_ns() - start, late)
            if before is not None:
                timed(before)
            return batch

        self._watcher.patches.replace(DataLoader, "__iter__", loader_iter)
        self._watcher.patches.replace(_BaseDataLoaderIter, "__next__", loader_next)

    def _observe_iter(self, loader: DataLoader[Any], iterator: Any, nanoseconds: int) -> None:
        self._iterators[iterator] = loader
        if self._watcher.in_training_thread():
            self.epochs.made(iterator, loader, nanoseconds, again=in_loop(sys._getframe()))
            self._watcher.note(EPOCH)

    def _time_draw(self, before: tuple[torch.cuda.Event | None, int]) -> None:
        if self._training.draws is not None and self._watcher.in_training_thread():
            self._training.draws.append(Draw(before, clocks(self._training.device)))

    def _observe_batch(self, iterator: Any, batch: Any, start: int, nanoseconds: int, late: bool) -> None:
        if not self._watcher.in_training_thread():
            return
        self._begun(start)
        if not torch.is_grad_enabled() and self._watcher.kind != FORWARD:
            return  # evaluation
        loader = self._iterators.get(iterator)
        if loader is not None and not (self._drawn and self._drawn[-1] is loader):
            self._drawn = [*(known for known in self._drawn if known is not loader), loader]  # the latest last
        begun = self.epochs.begun
        making = self.epochs.drawn(iterator, loader, nanoseconds)
        first = self.epochs.begun > begun
        self._watcher.batch_loaded(first_shape(batch), nanoseconds + making, late=late, first=first)
        self._look(batch, iterator if loader is None else None)
