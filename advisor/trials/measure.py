"""The measure mode: one arm of a comparison of fresh processes. Applies what is kept, times some steps, and stops."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Sequence

import torch

from advisor.core import storage
from advisor.distributed import joining, place, prints
from advisor.loop import ranks
from advisor.loop.attach import attach_training
from advisor.loop.interval import BACKWARDS, EPOCH, EVALUATION, SHAPES
from advisor.loop.session import TIMING_FILE, Session, tell
from advisor.loop.steps import StepWatcher
from advisor.loop.stop import stop
from advisor.loop.timing import step_times
from advisor.loop.training import StepEvent, Training
from advisor.ops import nvrtc
from advisor.profiling.inside.kernel_time import KernelTime
from advisor.transforms import registry
from advisor.transforms.base import Transform
from advisor.trials import planfile, records
from advisor.trials.first_steps import Untuned
from advisor.trials.kept import KeptChanges
from advisor.trials.statistics import WAITS_FRAC

UNCLEAN_FACTOR = 3  # not all of the steps need be clean
MOST_FACTOR = 10  # of the steps ordered are taken where `timed_s` is longer than these
# What comes by the script's own schedule, whatever is on: how often it falls among the timed steps is chance. A recompilation is the change's.
SCHEDULED = frozenset({EPOCH, EVALUATION, SHAPES, BACKWARDS})
# A loop that waits for its loader is timed until each worker has delivered so many batches, or for so long: workers deliver in turn, and what is
# no whole number of turns tells of chance alone.
TURNS, TURNS_S = 5, 8.0
RANKS_FACTOR = 2  # of the steps ordered are taken where several processes train together


def attach_measure(session: Session) -> None:
    """The measure mode, in the child, once torch is imported."""
    training, watcher = attach_training(session)
    MeasureDriver(training, session, watcher)


class MeasureDriver:
    """A `Training.on_step` listener; made at attach. Writes `measure.json` once its steps are taken, or when the script ends.

    Steps are timed until there are `session.steps` and they took `session.timed_s`; the losses are those of the warm-up and the
    first `session.steps`, as many in every arm. Where the script ends before it has settled (`session.settle_s`), the steps until then
    are those timed.

    Processes that train together all end at the same step, a fixed one: how many of its steps were clean, and what they took, each knows
    of itself alone, and one that went earlier would leave the others waiting in a collective. Rank 0 writes.

    The kernels' own time is taken behind all that, of `session.kernel_steps`: what was timed is on disk by then, should a tracer beside
    captured graphs end the process.
    """

    def __init__(
        self,
        training: Training,
        session: Session,
        watcher: StepWatcher | None = None,
        find: Callable[[str], Transform] = registry.get,
    ) -> None:
        self.training, self.session, self.watcher = training, session, watcher
        if session.seed is not None:
            seed_everything(session.seed)
        self.kept = KeptChanges(training, session.kept, find)
        self._settled = self.kept.settle()
        self._untuned = Untuned(self.kept.waiting)
        self._losses: list[torch.Tensor | float | None] = []
        self._boundaries: list[StepEvent] = []
        self._unsettled: list[StepEvent] = []  # boundaries behind the warm-up, before `session.settle_s` were over
        self._settling = session.settle_s > 0
        self._first_ns = 0
        self._clean = self._seen = 0
        self._written = False
        self._shares: list[float] = []
        self._read = False
        self._prints: dict[str, tuple[float, ...]] = {}
        self._whole_products = prints.WholeProducts() if session.prints else None
        self._rank, self._ranks = 0, 1
        self._kernels: KernelTime | None = None
        self._traced = 0  # steps, since it was started
        self._timing = session.protecting / TIMING_FILE
        self._process = os.getpid()
        training.draws = []
        if watcher is not None:
            watcher.patches.on_fault.append(lambda error: stop(session, "advisor switched itself off"))
        tell(session, "phase", phase="warm-up")
        training.on_step.append(self.on_step)
        atexit.register(self._at_exit)

    def on_step(self, event: StepEvent) -> None:
        """One boundary.

        Raises:
            StopTraining: when the steps are taken.
        """
        if self._kernels is not None:
            self._trace(self._kernels)
            return
        self._seen += 1
        if self._seen == 1:
            self._rank, self._ranks = ranks.joined()  # a script that trains in several has made its group by now
        self._first_ns = self._first_ns or event.host_ns
        if self._seen <= self.session.warmup + self.session.steps + 1:
            self._losses.append(event.loss)
            self._shares.append(joining.share())
            if place.ranks() > 1 and self._seen > self.session.warmup + self.session.steps:
                self._read_losses()  # all ranks are here; at the end one may be gone
        if self._seen <= self.session.prints:
            self._prints |= prints.of(self.training, self._seen)
        if self._whole_products is not None and self._seen >= self.session.prints:
            self._whole_products.end()
            self._whole_products = None
        self._take(event)
        if self._is_over():
            self._write(complete=self._ranks == 1 or self._clean >= self.session.steps)
            if self.session.kernel_steps and self._ranks == 1:
                kernels = KernelTime(self.training.device, lasting=False)
                if kernels.start():
                    self._kernels = kernels
                    return
            stop(self.session, "measured")

    def _trace(self, kernels: KernelTime) -> None:
        """One boundary more, behind those that were timed. The first step is the tracer's start, and does not count."""
        kernels.boundary()
        self._traced += 1
        if self._traced > self.session.kernel_steps:
            path = self.session.folder / records.MEASURE_FILE
            known = storage.load(path, records.Measurement)
            storage.save(path, dataclasses.replace(known, kernel_us=kernels.stop()[1:]))
            stop(self.session, "measured")

    def _read_losses(self) -> None:
        """They are numbers from now on: of ranks of ours the means of all."""
        if not self._read and any(loss is not None for loss in self._losses):
            own = [float("nan") if loss is None else float(loss) for loss in self._losses]
            self._losses = list(joining.mean(own, self._shares))
        self._read = True

    def _take(self, event: StepEvent) -> None:
        """Keep the boundary of a step that is to be timed."""
        if not self._settled:
            self._settled = self.kept.settle()
            self._untuned.look(self.kept.waiting)
            return
        if self._seen <= self.session.warmup:
            return
        if self._settling and self._ranks == 1:
            self._unsettled.append(event)
            waited_s = (event.host_ns - self._first_ns) / 1e9
            self._settling = (
                waited_s < self.session.settle_s and len(self._unsettled) <= MOST_FACTOR * self.session.steps
            )
            return
        if not self._boundaries:
            with contextlib.suppress(OSError):
                self._timing.touch()
        self._clean += bool(self._boundaries) and event.clean
        self._boundaries.append(event)

    def _is_over(self) -> bool:
        """Whether enough steps are timed; of several processes, whether this is the last one of each."""
        if self._ranks > 1:
            return self._seen > self.session.warmup + RANKS_FACTOR * self.session.steps
        if not self._boundaries:
            return False
        timed_s = (self._boundaries[-1].host_ns - self._boundaries[0].host_ns) / 1e9
        if timed_s < TURNS_S and self._waits(timed_s) and self._clean < TURNS * loader_workers(self.training):
            return False
        wanted = self.session.steps * (1 if timed_s >= self.session.timed_s else MOST_FACTOR)
        return self._clean >= wanted or len(self._boundaries) > UNCLEAN_FACTOR * wanted + 1

    def _waits(self, timed_s: float) -> bool:
        """Whether the script stood in its loaders' `next()` for a good part of these seconds."""
        drawn = (draw for boundary in self._boundaries[1:] for draw in boundary.draws)
        return sum(draw.after[1] - draw.before[1] for draw in drawn) / 1e9 > WAITS_FRAC * timed_s

    def _at_exit(self) -> None:
        self._boundaries = max(self._boundaries, self._unsettled, key=len)
        if os.getpid() == self._process and not self._written and len(self._boundaries) > 1:
            with contextlib.suppress(Exception):  # a device that has failed: the script's own end says so
                self._write(complete=sum(b.clean for b in self._boundaries[1:]) >= self.session.steps)
        self.kept.standing.clear()  # for `attach`, which lets go of the script's objects next

    def _write(self, *, complete: bool) -> None:
        self._written = complete
        self._read_losses()
        if self._rank:
            return
        with contextlib.suppress(OSError):
            self._timing.unlink()
        record = dataclasses.replace(
            measurement(self.training, self._boundaries, [float(loss) for loss in self._losses if loss is not None]),
            batch_size=self.training.batch_size * self._ranks,
            applied=tuple(s.transform.id for s in self.kept.standing),
            left_out=dict(self.kept.left_out),
            loaded=loaded(self.session.watched),
            prints=self._prints,
            ranks=self._ranks,
            complete=complete,
        )
        storage.save(self.session.folder / records.MEASURE_FILE, record)


def measurement(training: Training, boundaries: Sequence[StepEvent], losses: Sequence[float]) -> records.Measurement:
    """What these boundaries and losses say of the training as it is. Waits for the device."""
    times = step_times(boundaries)
    return records.Measurement(
        step_us=times.step_us,
        wall_us=times.wall_us,
        device_us=times.device_us,
        every_us=times.every_us,
        waited_us=times.every_waited_us,
        cpu_us=times.every_cpu_us if all(b.cpu_ns for b in boundaries) else (),
        workers=loader_workers(training),
        held=tuple(b.reason if b.reason in SCHEDULED else "" for b in boundaries[1:]),
        losses=tuple(losses),
        batch_size=training.batch_size,
        model_hash=planfile.model_hash(root.module for root in training.roots),
        kernels=tuple(sorted(nvrtc.launched)),
    )


def loader_workers(training: Training) -> int:
    """The most workers that a loader of this training has; each delivers one batch in turn."""
    return max((getattr(loader, "num_workers", 0) for loader in training.loaders), default=0)


def loaded(watched: Sequence[str]) -> tuple[str, ...]:
    """Which of these files this process has loaded as modules, or runs as its script."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    found = {os.path.realpath(file) for file in files if isinstance(file, str)}
    return tuple(path for path in watched if os.path.realpath(path) in found)


def seed_everything(seed: int) -> None:
    """Python's, NumPy's and torch's generators start from `seed`; a script that seeds them itself has the last word."""
    random.seed(seed)
    if importlib.util.find_spec("numpy") is not None:
        import numpy

        numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)
