"""Plain facts of the input pipeline, read from its live objects. Changes nothing."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from advisor.core.profile import InputStats
from advisor.loop.discover import Discovery
from advisor.loop.observed import BatchSeen, IteratorSeen, Observations
from advisor.loop.training import Training
from advisor.profiling.inside.dtypes import dtype_name
from advisor.profiling.inside.loading.watch import LoaderWatch
from advisor.profiling.inside.normalising import CHANNELS, tails


def input_stats(
    training: Training,
    discovery: Discovery | None = None,
    waits_us: Sequence[float] = (),
    late_us: Sequence[float] = (),
    iterators_per_step: float = 0.0,
    loading: LoaderWatch | None = None,
) -> InputStats:
    """The first training loader's settings and what its batches are.

    Args:
        waits_us: time in its `next()`, a value for each clean timed step.
        late_us: of that, for batches that were not there yet.
        iterators_per_step: iterators that the training has begun to draw from in the timed steps.
        loading: what has looked at how batches are made.
    """
    found = _loader_of(training, (discovery.seen if discovery is not None else Observations()).batch)
    if not found.loader:
        return replace(found, work=loading.work(None)) if loading is not None else found
    next_us, burst_us = waits(waits_us)
    found = replace(
        found,
        next_us=next_us,
        burst_us=burst_us,
        late_us=min(next_us, waits(late_us)[0]),
        iterators_per_step=iterators_per_step,
        next_error_us=_error(waits_us),
        work=loading.work(training.loaders[0].dataset if training.loaders else None) if loading is not None else None,
    )
    if discovery is None:
        return found
    usual_us = statistics.median(waits_us) if waits_us and iterators_per_step < 0.5 else 0.0
    cost = discovery.loaders.epochs.cost(usual_us)
    return replace(
        found,
        epoch_make_us=cost.make_us,
        epoch_first_us=cost.first_us,
        epoch_batches=cost.batches,
        loaders=cost.loaders,
        iterators=cost.starts,
        epochs_in_loop=cost.again,
    )


def _loader_of(training: Training, batch: BatchSeen) -> InputStats:
    if not training.loaders:
        if batch.iterator is None:
            return InputStats(batch_size=training.batch_size)
        return _of_iterator(batch, batch.iterator, training.batch_size)
    loader = training.loaders[0]
    normalise, normalise_us = _normalising(loader.dataset, batch)
    return InputStats(
        loader=type(loader).__name__,
        workers=loader.num_workers,
        batch_size=loader.batch_size or training.batch_size,
        pin_memory=bool(loader.pin_memory),
        persistent_workers=bool(loader.persistent_workers),
        prefetch_factor=loader.prefetch_factor or 0,
        batch_bytes=batch.nbytes,
        batch_dtype=dtype_name(batch.dtype),
        moved_unchanged=batch.moved_unchanged,
        non_blocking=batch.non_blocking,
        source=batch.source,
        normalise=normalise,
        normalise_us=normalise_us,
    )


def waits(waits_us: Sequence[float]) -> tuple[float, float]:
    """Their mean, and how far it is above their median. One wait longer than all others together is no pattern, and left out."""
    if not waits_us:
        return 0.0, 0.0
    ordered = sorted(waits_us)
    if len(ordered) > 2 and ordered[-1] > sum(ordered[:-1]):
        ordered.pop()
    mean = statistics.fmean(ordered)
    return mean, mean - statistics.median(ordered)


def _error(waits_us: Sequence[float]) -> float:
    """Two standard errors of their mean; 0.0 where a single one does not tell."""
    return 2 * statistics.stdev(waits_us) / len(waits_us) ** 0.5 if len(waits_us) > 1 else 0.0


def _of_iterator(batch: BatchSeen, iterator: IteratorSeen, batch_size: int) -> InputStats:
    """What is known of a loader of another class (fastai's) by the iterators of torch's that it goes through."""
    return InputStats(
        loader="of another class",
        workers=iterator.workers,
        batch_size=batch_size,
        pin_memory=iterator.pin_memory,
        persistent_workers=iterator.persistent_workers,
        prefetch_factor=iterator.prefetch_factor,
        batch_bytes=batch.nbytes,
        batch_dtype=dtype_name(batch.dtype),
        moved_unchanged=batch.moved_unchanged,
        non_blocking=batch.non_blocking,
        source=batch.source,
    )


def _normalising(dataset: Any, batch: BatchSeen) -> tuple[str, float]:
    """Which transforms normalise the data set's images, and their time for a batch in microseconds; ("", 0) for none."""
    found = tails(dataset)
    if not found or len(batch.shape) != 4 or batch.shape[1] not in CHANNELS:
        return "", 0.0
    try:
        return found[0].name, found[0].seconds(batch.shape[1:]) * batch.shape[0] * 1e6
    except Exception:  # the script's own transforms, called once more than it does
        return "", 0.0
