"""The measure mode of a CuPy loop: one arm of a comparison of fresh processes. As trials/measure.py for a loop of PyTorch's."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import random
from typing import Any

from advisor.core import storage
from advisor.cupy_loops.losses import Losses
from advisor.cupy_loops.period import REPEATS
from advisor.cupy_loops.standing import Standing
from advisor.cupy_loops.watch import Watcher
from advisor.loop.session import TIMING_FILE, Session, tell
from advisor.loop.stop import stop
from advisor.loop.timing import step_times
from advisor.loop.training import StepEvent
from advisor.trials import records

MOST_FACTOR = 10  # of the steps ordered are taken where `timed_s` is longer than these
SETTLING_S = 40.0  # that changes may take until the loop is as fast as they make it


class CupyMeasure:
    """A listener of a `Watcher`. Writes `measure.json` once its steps are taken, or when the script ends."""

    def __init__(self, module: Any, session: Session, watcher: Watcher, standing: Standing) -> None:
        self.module, self.session, self.watcher, self.standing = module, session, watcher, standing
        self._losses = Losses(module, watcher.patches, lambda: watcher.line(2), standing)
        self._boundaries: list[StepEvent] = []
        self._settling = True
        self._settled_s, self._settled_steps = 0.0, 0
        self._seen = 0
        self._first_ns = 0
        self._written = False
        self._process = os.getpid()
        self._timing = session.protecting / TIMING_FILE
        watcher.patches.on_fault.append(lambda error: stop(session, "advisor switched itself off"))
        tell(session, "phase", phase="warm-up")
        watcher.on_step.append(self.on_step)
        atexit.register(self.at_exit)

    def on_step(self, event: StepEvent) -> None:
        """One boundary.

        Raises:
            StopTraining: when the steps are taken.
        """
        self._seen += 1
        self._first_ns = self._first_ns or event.host_ns
        session = self.session
        self._losses.settle()
        seconds = (event.host_ns - self._first_ns) / 1e9
        if self._seen <= session.warmup or seconds < session.settle_s:
            return
        if self._settling and (not self.standing.settling or seconds > SETTLING_S):
            # A change that records steps makes its kernels meanwhile: those steps would be timed with it.
            self._settling, self._boundaries = False, []
            self._settled_s, self._settled_steps = seconds, self._seen - 1
        if not self._settling and not self._boundaries:
            with contextlib.suppress(OSError):
                self._timing.touch()
        self._boundaries.append(event)
        timed_s = (event.host_ns - self._boundaries[0].host_ns) / 1e9
        wanted = session.steps * (1 if timed_s >= session.timed_s else MOST_FACTOR)
        if not self._settling and len(self._boundaries) > wanted:
            self._write(complete=True)
            stop(session, "measured")

    def let_go(self) -> None:
        """Another driver has this process."""
        self._written = True
        self.standing.undo()
        self.watcher.detach()

    def at_exit(self) -> None:
        """What was timed before the script ended by itself."""
        if os.getpid() == self._process and not self._written and len(self._boundaries) > 1:
            with contextlib.suppress(Exception):  # a device that has failed: the script's own end says so
                self._write(complete=len(self._boundaries) > self.session.steps)

    def _write(self, *, complete: bool) -> None:
        self._written = True
        with contextlib.suppress(OSError):
            self._timing.unlink()
        times = step_times(self._boundaries)
        # The steps in which the loop's period was found came before the first boundary.
        losses = self._losses.values(self.session.warmup + self.session.steps, self._seen + REPEATS)
        record = records.Measurement(
            step_us=times.step_us,
            wall_us=times.wall_us,
            device_us=times.device_us,
            every_us=tuple((b.host_ns - a.host_ns) / 1e3 for a, b in itertools.pairwise(self._boundaries)),
            settled_s=self._settled_s,
            settled_steps=self._settled_steps,
            held=("",) * (len(self._boundaries) - 1),
            losses=losses,
            applied=self.standing.names,
            left_out=dict(self.standing.left_out),
            effects=self.standing.effects,
            complete=complete,
        )
        storage.save(self.session.folder / records.MEASURE_FILE, record)


def seed_everything(module: Any, seed: int) -> None:
    """Python's, NumPy's and CuPy's generators start from `seed`; a script that seeds them itself has the last word."""
    random.seed(seed)
    import numpy

    numpy.random.seed(seed % 2**32)
    module.random.seed(seed % 2**32)
