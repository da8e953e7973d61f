"""The running training as it stands: what every trial needs, and what one leaves to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from advisor.core import storage
from advisor.core.profile import StepProfile
from advisor.core.transform_row import TOGETHER
from advisor.core.verdict import Verdict
from advisor.loop.session import Session
from advisor.loop.steps import StepWatcher
from advisor.loop.training import Training
from advisor.transforms.base import Transform
from advisor.transforms.bundle import Bundle
from advisor.trials import records, spent
from advisor.trials.kept import KeptChanges
from advisor.trials.live.disturbance import MachineWatch
from advisor.trials.records import InTrial


@dataclass(slots=True, eq=False)
class Loop:
    """`find` looks a transform up by id."""

    training: Training
    session: Session
    watcher: StepWatcher | None
    find: Callable[[str], Transform]
    kept: KeptChanges
    step_us: float = 0.0  # of the loop as it stands
    host_bound: bool = False  # as it stands, and as far as a trial's blocks have shown
    parts: int = 1  # of the next trial's blocks, for the noise of the last
    traced: StepProfile | None = None  # a step of the loop as it stands, where one was traced
    spent: spent.Stopwatch = field(default_factory=lambda: spent.Stopwatch(spent.START))
    notes: list[str] = field(default_factory=list)  # for people, beside the verdicts
    _machine: MachineWatch | None = None

    @property
    def on_gpu(self) -> bool:
        """The training runs on a GPU."""
        return self.training.device.type == "cuda"

    @property
    def machine(self) -> MachineWatch:
        """The watch over what else the machine does, from its first use on."""
        if self._machine is None:
            self._machine = MachineWatch(self.training.device)
        return self._machine

    @property
    def standing(self) -> tuple[str, ...]:
        """Transforms that are on."""
        return tuple(s.transform.id for s in self.kept.standing)

    def transform(self, identifier: str) -> Transform:
        """The transform, or the one that stands for several.

        Raises:
            AdvisorError: when there is none of that name.
        """
        names = identifier.split(TOGETHER)
        return Bundle(identifier, [self.find(name) for name in names]) if len(names) > 1 else self.find(identifier)

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        if self.on_gpu:
            torch.cuda.synchronize(self.training.device)

    def verdicts(self) -> list[Verdict]:
        """Those on disk."""
        return records.verdicts(self.session.folder)

    def note(self, current: InTrial) -> None:
        """Whoever reads the run folder from now on, after a crash too, knows this trial as it is."""
        self.tell_spent()
        records.save_current(self.session.folder, current)

    def tell_spent(self) -> None:
        """The supervisor knows where the time of this process went."""
        told = records.Spent(seconds=self.spent.seconds())
        storage.save(self.session.folder / records.TRIALS_DIR / records.SPENT_FILE, told)
