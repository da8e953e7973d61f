"""One fresh process: the script from its start with some changes on, timed for a while, its losses noted."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from advisor.core import storage
from advisor.core.errors import AdvisorError
from advisor.core.plan import PlanItem
from advisor.core.profile import StepProfile
from advisor.profiling.beside.launcher import NATIVE_FAULTS
from advisor.trials import records
from advisor.trials.script import GRACE_S, Script
from advisor.trials.statistics import WAITS_FRAC

# A fresh process is timed after this many steps (changes that wait for the optimizer's state settle within six), for so many,
# which bounds one on a fast GPU at its start-up, and at 40 steps of 120 ms for a ResNet-50 in fp32.
WARMUP, STEPS = 12, 30
# At least: thirty steps of a ResNet-18 on CIFAR are 66 ms on an H200, and one burst of noise on the host hid the 6 % that a change
# saved. Losses are compared over the same number of steps in both arms whatever was timed.
TIMED_S = 0.7
# Steps that take longer than this are timed for so many seconds in place of so many steps, and warm up sooner: their clocks and caches
# settle within seconds.
SLOW_S, SLOW_TIMED_S, SLOW_WARMUP, SLOW_LEAST = 0.25, 7.5, 8, 12
# And those that take longer than this are as good as bound by their device: so few tell, and their losses are enough to compare.
VERY_SLOW_S, VERY_SLOW_WARMUP, VERY_SLOW_LEAST = 1.0, 5, 8
FEW_STEPS = 15  # for what a short look mostly tells: that a step is much longer without a change
# Of so many steps the kernels' own time is taken, where it has nothing to do for a good part of the plain step.
KERNEL_STEPS, KERNEL_MOST_S = 6, 1.0
SEED = 20_240_229
TIMEOUT_S = 300.0


@dataclass(slots=True, eq=False)
class FreshRuns:
    """Starts `script` for one measurement at a time; `trial_s` is what a first step with a change may take.

    `last_call` says until when one may run (`time.time()`), however slow the machine has become.
    """

    script: Script
    trial_s: float
    step_s: float | None = None  # of the plain script
    settle_s: float = 0.0  # no step is timed before so many seconds behind the first
    kernel_steps: int = 0  # of so many steps the kernels' time is taken, behind those timed
    last_call: Callable[[], float] = lambda: math.inf
    last_s: float = 0.0  # what the latest one took, its start included
    why_none: str = ""  # why the latest one without a measurement gave none

    def profiled(self) -> records.Measurement | None:
        """What the process that was profiled has measured of the plain script, where it says all that a fresh run would."""
        found = records.load_plain(self.script.run_dir)
        if found is None or found.settled_s < self.settle_s or (self.kernel_steps and not found.kernel_us):
            return None
        return found

    def measure(
        self,
        phase: str,
        kept: Sequence[PlanItem],
        turn: int = 0,
        steps: int = STEPS,
        watched: Sequence[str] = (),
    ) -> records.Measurement | None:
        """One fresh process with these changes, seeded by its turn; None when it gave no measurement.

        Args:
            watched: source files of which the measurement is to say whether they were loaded.
        """
        self.why_none = ""
        found = self._measured(phase, kept, turn, steps, watched)
        if found is None:
            late = time.time() >= self.last_call() and not self.script.over
            self.why_none = (
                "it was ended, as its time was up; give it more with --max-time" if late else self.script.why_unmeasured
            )
        return found

    def _measured(
        self, phase: str, kept: Sequence[PlanItem], turn: int, steps: int, watched: Sequence[str]
    ) -> records.Measurement | None:
        path = self.script.run_dir / records.MEASURE_FILE
        path.unlink(missing_ok=True)
        began = time.time()
        warmup, steps = lengths(self.step_s, steps)
        ended = self.script.start(
            "measure",
            phase=phase,
            kept=tuple(kept),
            watched=tuple(watched),
            warmup=warmup,
            steps=steps,
            timed_s=TIMED_S * min(1.0, steps / STEPS),
            settle_s=self.settle_s,
            kernel_steps=self.kernel_steps,
            seed=SEED + turn,
            timeout_s=min(max(TIMEOUT_S, self.trial_s + GRACE_S), max(1.0, self.last_call() - began)),
        )
        self.last_s = time.time() - began
        if ended.fault and not kept:
            self.script.fault = f"advisor switched itself off in the plain script: {ended.fault}"
        try:
            found = storage.load(path, records.Measurement)
        except AdvisorError:
            return None
        # A tracer beside captured graphs has been seen to end a process: what was timed before it is whole.
        traced = self.kernel_steps and found.complete and ended.exit.signal in NATIVE_FAULTS
        if (ended.failed and not traced) or ended.fault:
            return None
        return found if found.step_us and found.every_us else None


def kernel_steps(profile: StepProfile | None) -> int:
    """Of how many steps fresh runs tell the kernels' time: 0 where the step is bound by its device, or waits for nothing but its loader, as
    the device's time between those waits tells all then."""
    step = profile.step_us or profile.wall_us if profile is not None else None
    mean_us = fmean(step.raw or (step.median,)) if step is not None else 0.0
    if profile is None or not 0 < profile.busy_us < (1 - WAITS_FRAC) * (mean_us - profile.input.next_us):
        return 0
    return KERNEL_STEPS if mean_us <= KERNEL_MOST_S * 1e6 else 0


def lengths(step_s: float | None, steps: int = STEPS) -> tuple[int, int]:
    """Steps of warm-up and steps timed, of a script whose plain step takes `step_s`: both arms make the same, however fast."""
    if step_s is None or step_s <= SLOW_S:
        return WARMUP, steps
    if step_s > VERY_SLOW_S:
        return VERY_SLOW_WARMUP, min(steps, max(VERY_SLOW_LEAST, int(SLOW_TIMED_S / step_s)))
    return SLOW_WARMUP, min(steps, max(SLOW_LEAST, int(SLOW_TIMED_S / step_s)))
