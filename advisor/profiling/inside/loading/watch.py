"""In the training's process: each loader that the training draws from is sampled, where its batches are made.

In the first worker of its first iterator; without workers in the training's thread, until the steps are timed. Evaluation loaders, which
are iterated without gradients, are left alone.
"""

from __future__ import annotations

import os
import threading
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

from advisor.core import storage
from advisor.core.errors import AdvisorError
from advisor.core.loading import LoaderWork
from advisor.loop import ranks
from advisor.loop.patches import Patches
from advisor.profiling.inside.loading.inside import InFirstWorker
from advisor.profiling.inside.loading.own import StepSampler
from advisor.profiling.inside.loading.sampling import LoaderSampler

FILE = "loader-{}.json"
MOST = 4  # loaders sampled


class LoaderWatch:
    """What the loaders' processes do. `attach` before the script makes its iterators."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = os.getpid()
        self._datasets: list[Any] = []  # in the order in which they were first iterated
        self._here: dict[int, LoaderSampler] = {}  # by place in `_datasets`, those without workers
        self._own: StepSampler | None = None  # where no DataLoader makes the batches
        self._resting = False

    def attach(self, patches: Patches) -> None:
        """Hook torch's iterators, which libraries' loaders make as well."""
        several, single = _MultiProcessingDataLoaderIter.__init__, _SingleProcessDataLoaderIter.__init__
        begun = patches.guard(self._begun_here)

        @wraps(several)
        def with_workers(iterator: Any, loader: Any) -> None:
            sampling = self._for_workers(loader) if patches.active else None
            if sampling is None:
                several(iterator, loader)
                return
            loader.worker_init_fn = sampling
            try:
                several(iterator, loader)
            finally:
                loader.worker_init_fn = sampling.own
                iterator._worker_init_fn = sampling.own

        @wraps(single)
        def in_thread(iterator: Any, loader: Any) -> None:
            single(iterator, loader)
            begun(iterator)

        patches.replace(_MultiProcessingDataLoaderIter, "__init__", with_workers)
        patches.replace(_SingleProcessDataLoaderIter, "__init__", in_thread)

    def look_for_own(self) -> None:
        """Sample whole steps from now on, where no iterator of torch's was seen by now."""
        if not self._datasets and self._own is None and not self._resting and ranks.group()[0] == 0:
            self._own = StepSampler()
            self._own.start()

    def rest(self, steps: int = 0) -> None:
        """No more samples in this process: steps are timed from now on. `steps`: made since `look_for_own`."""
        self._resting = True
        if self._own is not None:
            self._own.stop_after(steps)
        for sampler in self._here.values():
            sampler.stop()

    def work(self, dataset: Any) -> LoaderWork | None:
        """What is known of the loader over this data set; of the only one there is, where that is not known. None: nothing."""
        if not self._datasets and self._own is not None:
            found = self._own.work()
            return found if found.told else None
        places = [place for place, known in enumerate(self._datasets) if known is dataset]
        if not places and len(self._datasets) == 1:
            places = [0]
        for place in places:
            if place in self._here:
                return self._here[place].work()
            try:
                return storage.load(self._folder / FILE.format(place), LoaderWork)
            except AdvisorError:  # too early: nothing is there yet
                return None
        return None

    def _for_workers(self, loader: Any) -> InFirstWorker | None:
        try:
            place = self._place(loader.dataset)
            return None if place is None else InFirstWorker(self._folder / FILE.format(place), loader.worker_init_fn)
        except AttributeError:  # a loader of another library's, with other attributes
            return None

    def _begun_here(self, iterator: Any) -> None:
        fetcher, dataset = iterator._dataset_fetcher, iterator._dataset
        place = next((at for at, known in enumerate(self._datasets) if known is dataset), None)
        sampler = self._here.get(place) if place is not None else None
        if sampler is None:
            place = self._place(dataset)
            if place is None:
                return
            sampler = self._here[place] = LoaderSampler(worker=False)
            sampler.start()
        if not sampler.over:
            fetcher.fetch = sampler.around(fetcher.fetch)

    def _place(self, dataset: Any) -> int | None:
        """The number of a data set whose loader is to be sampled; None where it is not, or is already."""
        if self._resting or not torch.is_grad_enabled() or os.getpid() != self._process:
            return None
        if threading.current_thread() is not threading.main_thread() or ranks.group()[0] != 0:
            return None
        if len(self._datasets) >= MOST or any(known is dataset for known in self._datasets):
            return None
        self._datasets.append(dataset)
        return len(self._datasets) - 1
