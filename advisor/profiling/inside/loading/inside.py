"""What is done in a worker: its fetches are timed and its stack is sampled, and what was found is left in a file of the run folder.

It comes into the worker as the loader's `worker_init_fn`, which forked and spawned workers call alike, in front of the script's own. It is a
plain object of this module, so that it can be pickled.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from advisor.core import storage
from advisor.core.loading import LoaderWork


class InFirstWorker:
    """A `worker_init_fn` that samples the first worker. Its fault is nobody's but its own: the worker goes on without it."""

    def __init__(self, file: Path, own: Callable[[int], None] | None) -> None:
        self.file, self.own = file, own

    def __call__(self, worker: int) -> None:
        if worker == 0:
            with contextlib.suppress(Exception):  # a report without the loader's lines
                self._sample()
        if self.own is not None:
            self.own(worker)

    def _sample(self) -> None:
        from torch.utils.data import _DatasetKind

        from advisor.profiling.inside.loading.sampling import LoaderSampler

        sampler = LoaderSampler(worker=True, saved=self._save)
        plain: Any = _DatasetKind.create_fetcher

        def create_fetcher(*args: Any) -> Any:
            fetcher = plain(*args)
            fetcher.fetch = sampler.around(fetcher.fetch)
            return fetcher

        # In this process alone, which is a worker: it fetches, and does nothing else.
        setattr(_DatasetKind, "create_fetcher", staticmethod(create_fetcher))  # noqa: B010 (mypy knows it as a method)
        sampler.start()

    def _save(self, work: LoaderWork) -> None:
        with contextlib.suppress(OSError):  # the run folder is gone, or full
            storage.save(self.file, work)
