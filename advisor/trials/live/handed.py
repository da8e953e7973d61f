"""The profile mode of a process that goes on afterwards as a search by orders that come then."""

from __future__ import annotations

import dataclasses
import time

import torch

from advisor.core import storage
from advisor.core.errors import AdvisorError
from advisor.loop.attach import Attached, attach_training
from advisor.loop.records import NEXT_FILE
from advisor.loop.session import Session
from advisor.loop.stop import stop
from advisor.loop.training import StepEvent
from advisor.profiling.inside.driver import ProfileDriver
from advisor.trials import fresh, measure, records
from advisor.trials.handover import ENDS
from advisor.trials.live.driver import SearchDriver, name_native_faults

# The supervisor reads a trace and asks the rules meanwhile: a second or two, more for large nets. One that is gone writes no orders.
PATIENCE_S, POLL_S = 90.0, 0.02
# As many losses as a fresh run notes; and so many steps timed make the two blocks that an interval needs.
LOSSES, LEAST_TIMED = fresh.WARMUP + fresh.STEPS + 1, 6


class HandedDriver(ProfileDriver):
    """A `Training.on_step` listener: as ProfileDriver, and in the place of its end a search begins. What it has timed with no profiler on,
    and the losses from the first step on, are a run of the plain script for the proof."""

    def attach(self) -> None:
        """As ProfileDriver, with the seed of fresh runs."""
        self._first_losses: list[torch.Tensor | None] = []
        self._first_ns = 0
        self.training.draws = []
        if self.session.seed is not None:
            measure.seed_everything(self.session.seed)
        super().attach()

    def on_step(self, step: StepEvent) -> None:
        """One boundary.

        Raises:
            StopTraining: when everything is measured and nothing is to be tried.
        """
        self._first_ns = self._first_ns or step.host_ns
        if len(self._first_losses) < LOSSES:
            self._first_losses.append(step.loss)
        super().on_step(step)

    def is_settled(self, step: StepEvent) -> bool:
        """Loader workers work off what they have made ahead before the loop waits for them, as fresh runs are left to do."""
        workers = any(getattr(loader, "num_workers", 0) for loader in self.training.loaders)
        return not workers or step.host_ns - self._first_ns >= self.session.settle_s * 1e9

    def _measure(self) -> None:
        super()._measure()
        timed = self.timed.boundaries
        settled_s = (timed[0].host_ns - self._first_ns) / 1e9 if timed else 0.0
        seen = [loss for loss in self._first_losses if loss is not None]
        losses = [float("nan") if loss is None else float(loss) for loss in self._first_losses] if seen else []
        found = measure.measurement(self.training, timed, losses)
        if self.records and len(found.step_us) >= LEAST_TIMED:
            found = dataclasses.replace(found, settled_s=settled_s, complete=True)
            records.save_plain(self.session.folder, found)

    def _end(self) -> None:
        orders = self._orders()
        if orders is None or orders.mode == ENDS:
            stop(self.session, "measured")
            return
        training, watcher = self.training, self.watcher
        training.on_step.remove(self.on_step)
        watcher.patches.on_fault.remove(self._on_fault)
        self._warm_boundaries, self.timed.boundaries, self.traced.bounds = [], [], []
        self.discovery.keep_inputs = True  # some changes need the inputs to find their places
        self.discovery.look_anew()
        name_native_faults(orders)
        SearchDriver(training, orders, watcher)

    def _orders(self) -> Session | None:
        """What the supervisor has written by now; None where nothing comes."""
        path, until = self.session.folder / NEXT_FILE, time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            if path.exists():
                try:
                    return storage.load(path, Session)
                except AdvisorError:
                    return None
            time.sleep(POLL_S)
        return None


def attach_handed(session: Session) -> None:
    """As `attach_profile`, of a session that hands over, in the child, once torch is imported."""
    training, watcher = attach_training(session)
    assert Attached.discovery is not None
    HandedDriver(training, session, watcher, Attached.discovery).attach()
