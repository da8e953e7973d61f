"""The steps that are timed with no profiler on: their boundaries, what their loader took, and what was compiled and allocated in them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from advisor.core import storage
from advisor.core.profile import MemoryStats, Site
from advisor.loop import rankrecords, ranks
from advisor.loop.compiles import Compilations, compiled_graphs
from advisor.loop.interval import EPOCH, EVALUATION, StepInterval
from advisor.loop.patches import Patches
from advisor.loop.records import Window
from advisor.loop.timing import step_times, window
from advisor.loop.training import StepEvent, Training
from advisor.profiling.inside.memory import MemoryProbe
from advisor.profiling.inside.own_work import OwnWork

MEMORY_READINGS = 6
BLOCK_BYTES = 512  # the least that the caching allocator gives a tensor


class TimedSteps:
    """They open at `begin`, with the boundary that ends the warm-up. `wanted`: how many are to be clean."""

    def __init__(self, training: Training, patches: Patches, wanted: int) -> None:
        self.training, self.patches, self.wanted = training, patches, wanted
        self.boundaries: list[StepEvent] = []
        self.loader_us: list[float] = []
        self.late_us: list[float] = []
        self.iterators = 0
        self.backwards: list[int] = []  # one for each clean step
        self.window: Window | None = None
        self.recompiles: int | None = None
        self.compiled: list[Site] = []
        self._own: OwnWork | None = None  # of several ranks
        self._probe: MemoryProbe | None = None
        self._graphs = 0  # compiled before these steps, and in evaluations among them
        self._graphs_seen = 0
        self._since: Compilations | None = None  # the last interval in which something was compiled

    @property
    def count(self) -> int:
        """Intervals so far, also those that are left out."""
        return max(len(self.boundaries) - 1, 0)

    def begin(self, step: StepEvent, *, records: bool) -> None:
        """From here on; `records`: memory and what is compiled are looked at as well, in this process."""
        if records:
            self._probe = MemoryProbe(self.training.device, self.patches)
            self._graphs = self._graphs_seen = compiled_graphs()
            self._since = Compilations()
        self.boundaries = [step]
        if ranks.group()[1] > 1:
            self._own = OwnWork(self.training.device, self.patches, step)
        self.window = window(step)

    def boundary(self, step: StepEvent, interval: StepInterval) -> None:
        """One step more, and what was seen in it."""
        self.boundaries.append(step)
        if self._own is not None:
            self._own.boundary(step)
        self.iterators += interval.iterators
        if step.clean:
            self.loader_us.append(interval.loader_ns / 1e3)
            self.late_us.append(interval.late_ns / 1e3)
            self.backwards.append(interval.backwards)
        self._leave_out_evaluation(not step.clean and bool(interval.marks & {EPOCH, EVALUATION}))
        self._read_memory()

    def end(self, step: StepEvent) -> None:
        """The window is closed."""
        self.window = window(step, self.window)

    def _leave_out_evaluation(self, held_one: bool) -> None:
        """What the last interval has compiled and allocated is no step's where it `held_one`."""
        graphs = compiled_graphs()
        if graphs != self._graphs_seen and self._since is not None:
            self.compiled += () if held_one else self._since.compiled()
            self._since = Compilations()
        if held_one:
            self._graphs += graphs - self._graphs_seen
            if self._probe is not None:
                self._probe.begin_anew(self.count)
        self._graphs_seen = graphs

    def _read_memory(self) -> None:
        """A few times in the window: what grows is told by several readings, and each may disturb the step behind it. So two of three steps
        at least are left alone, also of the few that a test measures.
        """
        if self._probe is not None and reading_is_due(self.count, self.wanted):
            self._probe.note(self.count, held_bytes=self._held_bytes())

    def _held_bytes(self) -> float:
        """Of the device's memory, what the losses of these steps take that are kept here."""
        losses = (step.loss for step in self.boundaries)
        return sum(BLOCK_BYTES for loss in losses if loss is not None and loss.device.type == "cuda")

    def memory(self) -> MemoryStats:
        """What these steps held; waits for the device. Counts what they have compiled, too."""
        if self._graphs:
            self.recompiles = compiled_graphs() - self._graphs
        return (self._probe or MemoryProbe(self.training.device)).stats(self.count)

    def save_rank(self, folder: Path) -> None:
        """Of several ranks each leaves what tells it from the others."""
        rank, count = ranks.group()
        if count > 1:
            walls = step_times([without_event(step) for step in self.boundaries]).wall_us
            own_us = self._own.times_us() if self._own is not None else []
            peak = torch.cuda.max_memory_allocated(self.training.device) if self.training.device.type == "cuda" else 0
            record = rankrecords.of(rank, count, walls, self.loader_us, self.late_us, own_us=own_us, peak_bytes=peak)
            with suppress(OSError):
                storage.save(rankrecords.file_of(folder, rank), record)


def without_event(step: StepEvent) -> StepEvent:
    """The boundary without CUDA events, for times that must not wait for the device: those of its draws may be ahead of it as well."""
    return replace(step, event=None, draws=())


def reading_is_due(step: int, window: int) -> bool:
    """Whether memory is read behind this step of a window of so many."""
    return step % max(3, window // MEMORY_READINGS) == 0
