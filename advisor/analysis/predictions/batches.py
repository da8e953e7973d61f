"""Batches: their workers, their bytes, their copies."""

from __future__ import annotations

from collections.abc import Mapping

from advisor.analysis.machine import core_use
from advisor.analysis.memory import BYTES
from advisor.analysis.predictions.basis import (
    nothing,
)
from advisor.analysis.view import View
from advisor.analysis.whatif import Change, Saving, Step
from advisor.core.profile import InputStats
from advisor.core.units import bytes_text, time_text

PREFETCH_WORST = 0.5  # of the copies' time: as rules/transfer/copies-stall-compute.yaml
# Handing a batch from a worker to the training thread: a fixed part, and two copies through shared memory (1 GB/s on one x86 server of
# two cores; faster elsewhere). Where making one is dearer by so much, workers save at least this share of what they could.
CROSSING_US, CROSSING_BYTES_PER_US = 1_000.0, 1_000.0
DEARER, WORKERS_WORST = 5.0, 0.25
# Of a batch's bytes, those that it has in uint8.
UINT8_BYTES = 1 / BYTES["fp32"]


def prefetch(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """Copies to the device beside its work."""
    copies = [copy for copy in view.profile.copies if copy.kind == "h2d"]
    if not copies:
        return nothing("nothing is copied to the device in a step")
    if not view.profile.input.moved_unchanged:
        return nothing("batches are changed before they are copied, so they cannot be copied ahead")
    alone = sum(copy.time_us * (1 - copy.overlapped_frac) for copy in copies)
    # A pageable batch must be copied into pinned memory by the host first, which may take as long as it saves. Others wait for the end
    # of what uses the memory that they are given, and share the device's with its kernels.
    worst = 0.0 if any(copy.pageable for copy in copies) else PREFETCH_WORST * min(alone, step.copy_us)
    return Change(
        worst=Saving(copy_us=worst),
        best=Saving(copy_us=step.copy_us),
        basis=f"copies to the device run {time_text(alone)} a step while no kernel runs; they cause {time_text(step.copy_us)} of idle time",
    )


def loader_workers(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """Batches made by more processes at once."""
    stats, machine = view.profile.input, view.profile.environment
    if not stats.loader:
        return nothing("no DataLoader was used")
    cores = machine.cpu_count or stats.workers + 1
    if not view.on_gpu:
        # What others use is theirs: of the rest the script has this share.
        others = core_use(view.profile, "cpu_others_frac") or 0.0
        used = min(1.0, (core_use(view.profile, "cpu_util_frac") or 0.0) / max(1.0 - others, 1e-9))
        threads = view.profile.model.cpu_threads or cores
        return _beside_training(step, stats, parameters, cores, used, others, threads)
    wanted = parameters.get("workers", "")
    most = (
        int(wanted) if wanted.isdigit() and int(wanted) > 0 else max(1, cores // max(1, view.profile.model.world_size))
    )
    # One batch of loading: seen whole without workers; with w starved workers, each makes one batch in w steps.
    batch = stats.next_us if stats.workers == 0 else stats.workers * step.step_us

    # Batches that were there take what they take from one process to the other, however many make them.
    waited = min(step.data_us, stats.late_us)

    def saved(workers: int) -> float:
        return max(0.0, min(waited, step.step_us - batch / workers))

    return Change(
        worst=Saving(data_us=saved(max(1, most // 2))),
        best=Saving(data_us=saved(most)),
        basis=(
            f"the device waits {time_text(waited)} a step for batches that are not there; one takes {time_text(batch)} of one worker, "
            f"shared by {max(1, most // 2)} to {most} of {cores} cores"
        ),
    )


def _beside_training(
    step: Step,
    stats: InputStats,
    parameters: Mapping[str, str],
    cores: int,
    used: float,
    others: float,
    threads: int,
) -> Change:
    """Workers on the cores of the training itself; its threads then leave them those cores.

    `others` have that share of the cores' time, and of the rest these are at work for `used`.
    """
    wanted = parameters.get("workers", "")
    workers = max(1, min(int(wanted) if wanted.isdigit() else cores, cores))
    left = min(threads, max(1, cores - workers))
    made, computed = step.data_us, step.step_us - step.data_us

    def saved(work_us: float) -> float:
        """At best, where all cores share so much work evenly; one batch is one worker's, and the training's own part is not shortened."""
        return max(0.0, step.step_us - max(work_us, made / workers, computed)) if stats.workers < cores else 0.0

    work = max(used, 1 / cores) * step.step_us
    # Threads that wait for each other or for the next operator look busy: they do no more than one of them loads and those left compute.
    best = saved(min(work, (made + left * computed) / max(cores * (1 - others), 1e-9)))
    crossing = 2 * stats.batch_bytes / CROSSING_BYTES_PER_US + CROSSING_US
    # A batch that takes hardly longer to make than to hand over from process to process may lose.
    worst = WORKERS_WORST * saved(work) if made > DEARER * crossing else 0.0
    # So may a training that is mostly its own operators, with fewer threads.
    slower = step.step_us - max(made / workers, computed * threads / left)
    threads_told = f", with {left} threads of {threads} left to it" if left < threads else ""
    return Change(
        worst=Saving(data_us=min(worst, slower)),
        best=Saving(data_us=best),
        basis=(
            f"{time_text(made)} a step wait for the loader; {cores * max(0.0, 1 - used):.1f} of {cores} cores are free for "
            f"it{threads_told}, and handing a batch over takes {time_text(crossing)}"
        ),
    )


def uint8_batches(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """Batches of a quarter of the bytes, normalised on the device."""
    stats = view.profile.input
    if not stats.normalise:
        return nothing("no transforms that normalise images were recognised")
    if not stats.workers or stats.batch_dtype != "fp32":
        return nothing("no workers make fp32 batches")
    if not stats.moved_unchanged:
        return nothing("batches are changed before they are copied, so their values are needed on the host")
    # Each of w starved workers makes one batch in w steps. What batches of a quarter of the bytes save between processes and in
    # pinned memory comes on top, and at best takes what is left of the wait.
    saved = stats.normalise_us / stats.workers
    return Change(
        worst=Saving(),
        best=Saving(data_us=step.data_us, copy_us=(1 - UINT8_BYTES) * step.copy_us),
        basis=(
            f"{stats.normalise} takes a worker {time_text(stats.normalise_us)} a batch, {time_text(saved)} a step with {stats.workers} "
            f"workers; the device waits {time_text(step.data_us)} a step for data and {time_text(step.copy_us)} for copies, of "
            f"{bytes_text(stats.batch_bytes)} that become {bytes_text(stats.batch_bytes * UINT8_BYTES)}"
        ),
    )
