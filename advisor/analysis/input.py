"""Does the input pipeline keep up, and how do batches reach the device."""

from __future__ import annotations

from advisor.analysis.time import NO_STEP
from advisor.analysis.view import View
from advisor.core.metrics import MetricTable
from advisor.core.provenance import Provenance

LEAST_LINE = 0.02  # of a batch: what is named of the work that a GPU could do
EACH_STEP = 0.5  # iterators a step, from here on
EPOCHS = (
    *("iterators_per_step", "workers_restarted_by", "epoch_start_us", "epoch_batches", "epoch_start_frac"),
    "epoch_make_frac",
)
WORK = ("batch_made_us", "loader_work", "gpu_work", "gpu_work_frac")
NO_LOADER = "no DataLoader was used"


def fill(view: View, table: MetricTable) -> None:
    """Set the loader's share and settings, and the host/device copies."""
    stats = view.profile.input
    table.set("loader", stats.loader)
    if stats.loader:
        table.set("loader_us", stats.next_us)
        if view.step_us > 0:
            table.set("loader_frac", stats.next_us / view.step_us)
            table.set("loader_late_frac", stats.late_us / view.step_us)
        else:
            table.miss("loader_frac", NO_STEP)
            table.miss("loader_late_frac", NO_STEP)
        table.set("workers", stats.workers)
        if cores := view.profile.environment.cpu_count:
            table.set("workers_per_core", stats.workers / cores)
            _crowd(view, table, stats.workers, cores)
        table.set("pin_memory", stats.pin_memory)
        table.set("persistent_workers", stats.persistent_workers)
        if stats.workers:
            table.set("prefetch_factor", stats.prefetch_factor)
        else:
            table.miss("prefetch_factor", "the loader has no workers")
        table.set("moved_unchanged", stats.moved_unchanged)
        _normalising(view, table)
        _work(view, table)
        _epochs(view, table)
    else:
        for name in (
            "loader_us",
            "loader_frac",
            "loader_late_frac",
            "workers",
            "workers_per_core",
            "workers_crowd_frac",
            "pin_memory",
            "persistent_workers",
            "prefetch_factor",
            "moved_unchanged",
            "normalise",
            "normalise_us",
            "normalise_frac",
            *EPOCHS,
        ):
            table.miss(name, NO_LOADER)
        _work(view, table)
    if stats.batch_dtype:
        table.set("input_fp32_bytes", stats.batch_bytes if stats.batch_dtype == "fp32" else 0)
    else:
        table.miss("input_fp32_bytes", "the batch's dtype was not seen")
    if view.on_gpu:
        _copies(view, table)


def _crowd(view: View, table: MetricTable, workers: int, cores: int) -> None:
    """The scheduler shares the cores out evenly among all that want one: of a training's threads each has so much less."""
    threads = min(view.profile.model.cpu_threads, cores)
    if view.on_gpu or not threads:
        table.miss("workers_crowd_frac", "the step runs on a GPU" if view.on_gpu else "torch's threads were not read")
        return
    table.set("workers_crowd_frac", max(0.0, 1.0 - cores / (threads + workers)), Provenance.MODELLED)


def _epochs(view: View, table: MetricTable) -> None:
    """What beginning an epoch costs: in all, and a share of the training, which is its steps and these."""
    stats = view.profile.input
    table.set("iterators_per_step", stats.iterators_per_step)
    comes_again = stats.iterators > 1 or stats.epochs_in_loop
    again = stats.workers > 0 and comes_again and stats.iterators_per_step < EACH_STEP
    remade, lasting = stats.loaders > 1, stats.persistent_workers
    table.set(
        "workers_restarted_by",
        ""
        if not again or (lasting and not remade)
        else "a new DataLoader each epoch"
        if remade
        else "persistent_workers=False",
    )
    start_us = stats.epoch_make_us + stats.epoch_first_us
    if not stats.iterators:
        for name in ("epoch_start_us", "epoch_batches", "epoch_start_frac", "epoch_make_frac"):
            table.miss(name, "no iterator was seen to be made")
        return
    table.set("epoch_start_us", start_us)
    # Workers that keep up make a batch each in as many steps as there are workers, others in just that: what the first batch takes beyond
    # is their start (imports, where they are spawned).
    sure_us = stats.epoch_make_us + max(0.0, stats.epoch_first_us - max(1, stats.workers) * view.step_us)
    for name, value in (("epoch_start_frac", start_us), ("epoch_make_frac", sure_us)):
        if view.step_us <= 0:
            table.miss(name, NO_STEP)
        elif stats.iterators_per_step >= EACH_STEP:  # the steps hold them
            table.set(name, min(1.0, value * stats.iterators_per_step / view.step_us))
        elif stats.epoch_batches:
            steps = stats.epoch_batches / max(1, view.profile.model.accumulation)
            table.set(name, value / (steps * view.step_us + start_us))
        else:
            table.miss(name, "no epoch was seen to its end, and the loader does not tell its length")
    if stats.epoch_batches:
        table.set("epoch_batches", stats.epoch_batches)
    else:
        table.miss("epoch_batches", "no epoch was seen to its end, and the loader does not tell its length")


def _normalising(view: View, table: MetricTable) -> None:
    stats = view.profile.input
    table.set("normalise", stats.normalise)
    if not stats.normalise:
        for name in ("normalise_us", "normalise_frac"):
            table.miss(name, "no transforms that normalise images were recognised")
        return
    table.set("normalise_us", stats.normalise_us)
    if view.step_us > 0:
        table.set("normalise_frac", stats.normalise_us / max(stats.workers, 1) / view.step_us)
    else:
        table.miss("normalise_frac", NO_STEP)


def _work(view: View, table: MetricTable) -> None:
    """What one process of the loader does for a batch, and what of it a GPU could."""
    work = view.profile.input.work
    if view.profile.input.loader:
        table.miss("own_input_frac", "a DataLoader makes the batches")
    elif work is None or not work.told or view.step_us <= 0:
        table.miss("own_input_frac", "nothing that makes a batch was seen in the training's thread")
    else:
        table.set("own_input_frac", min(1.0, work.batch_us / view.step_us))
    if work is None or not work.told:
        for name in WORK:
            table.miss(
                name, "the loader was not sampled" if work is None else f"only {work.samples} samples were taken"
            )
        return
    table.set("batch_made_us", work.batch_us)
    table.set("loader_work", work.shares_text())
    lines = [line for line in work.for_gpu() if line.time_us >= LEAST_LINE * work.batch_us]
    table.set("gpu_work", ", ".join(dict.fromkeys(line.what for line in lines)))
    table.set("gpu_work_frac", min(1.0, sum(line.time_us for line in work.for_gpu()) / work.batch_us))


def _copies(view: View, table: MetricTable) -> None:
    h2d = [copy for copy in view.profile.copies if copy.kind == "h2d"]
    time, moved = sum(c.time_us for c in h2d), sum(c.bytes for c in h2d)
    if not view.profile.cost.traced_steps and not view.profile.copies:
        return
    table.set("h2d_copies", sum(c.calls for c in h2d))
    table.set("h2d_bytes", moved)
    table.set("d2h_bytes", sum(c.bytes for c in view.profile.copies if c.kind == "d2h"))
    table.set("d2h_copies", sum(c.calls for c in view.profile.copies if c.kind == "d2h"))
    if view.step_us > 0:
        table.set("h2d_frac", time / view.step_us)
    else:
        table.miss("h2d_frac", NO_STEP)
    if time > 0 and moved > 0:
        table.set("h2d_overlap_frac", sum(c.time_us * c.overlapped_frac for c in h2d) / time)
        table.set("h2d_pageable_frac", sum(c.bytes for c in h2d if c.pageable) / moved)
        table.set("h2d_gbps", moved / time / 1e3)
    else:
        for name in ("h2d_overlap_frac", "h2d_pageable_frac", "h2d_gbps"):
            table.miss(name, "nothing is copied to the device in a step")
