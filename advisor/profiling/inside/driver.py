"""The profile mode: warm-up, steps timed with no profiler on, a short traced window, then the end of the script.

What is known is on disk at any time: `steps.json` and `facts.json` are written early, renewed, and written a last time
when the script ends, crashes or is stopped. Under torchrun every rank counts the same boundaries, so that all stop at
the same one and no collective waits for a rank that has gone; rank 0 alone records.
"""

from __future__ import annotations

import atexit
import itertools
import os
import time
from typing import Any

from advisor.core import storage
from advisor.core.profile import MemoryStats
from advisor.core.stderr import say
from advisor.loop import ranks
from advisor.loop.attach import Attached, attach_training
from advisor.loop.compiles import together
from advisor.loop.discover import LOOK_STEPS, Discovery
from advisor.loop.interval import PATTERN
from advisor.loop.records import (
    FACTS_FILE,
    MAX_LOSSES,
    MEASURED,
    STEPS_FILE,
    FactsRecord,
    StepsRecord,
)
from advisor.loop.session import Session, tell
from advisor.loop.steps import FORWARD, StepWatcher
from advisor.loop.stop import stop
from advisor.loop.timing import StepTimes, spread, step_times
from advisor.loop.training import StepEvent, Training
from advisor.loop.waiting import others_worked
from advisor.profiling.inside.behind import LooksBehind
from advisor.profiling.inside.facts import model_facts
from advisor.profiling.inside.inputfacts import input_stats
from advisor.profiling.inside.loading.watch import LoaderWatch
from advisor.profiling.inside.timed import TimedSteps, without_event
from advisor.profiling.inside.traced import TracedSteps

# Long steps need no ten of them to warm up. Counted from the second boundary, because the first step may compile.
WARMUP_S, TIMED_S = 20.0, 60.0
MIN_WARMUP, MIN_TIMED = LOOK_STEPS + 1, 3
# Of this many times the wanted steps none need be clean before the search for clean ones is given up.
PATIENCE = 4
OWN_FROM = 2  # boundaries behind which a loop without a DataLoader is sampled: the first steps import and set up
SAVE_EVERY_S = 5.0
TELL_EVERY_S = 0.25
KEPT_WARMUP = 256  # warm-up boundaries remembered, for scripts that end before the timed window


class ProfileDriver:
    """A `Training.on_step` listener. `phase` goes warm-up, timed, traced, watched (behind.py), done."""

    def __init__(self, training: Training, session: Session, watcher: StepWatcher, discovery: Discovery) -> None:
        self.training, self.session, self.watcher, self.discovery = training, session, watcher, discovery
        self.phase = "warm-up"
        self.records = ranks.group()[0] == 0
        # Ranks see each other's clocks and shapes only through what they must agree on: the number of the boundary.
        # So it is in a script that makes so few steps that there is no warm-up worth the name.
        self.handful = session.brief and session.warmup < MIN_WARMUP
        self.loading: LoaderWatch | None = None  # how its batches are made, where that is looked at
        self.compiled: bool | None = None  # whether the step runs compiled code, where the caller has seen it
        self._notes: list[str] = []
        self._process = os.getpid()
        self._warm_boundaries: list[StepEvent] = []
        self._warm = 0
        self._warm_since_ns = 0
        self.timed = TimedSteps(training, watcher.patches, session.steps)
        self.traced = TracedSteps(training, session, self._notes)
        self._times: StepTimes | None = None
        self._losses: tuple[float, ...] = ()
        self._memory = MemoryStats()
        self._behind: LooksBehind | None = None
        self._facts: FactsRecord | None = None
        self._saved_ns = self._told_ns = 0

    @property
    def in_step(self) -> bool:
        """The boundaries are counted and nothing else. Asked at each one: some scripts make their process group late."""
        return self.handful or ranks.group()[1] > 1

    def attach(self) -> None:
        """Listen to the steps, and write what there is when the script ends in any way that runs `atexit`."""
        self.training.on_step.append(self.on_step)
        self.watcher.patches.on_fault.append(self._on_fault)
        if self.records:
            atexit.register(self.at_exit)
            self._tell_phase(0, self.session.warmup, always=True)

    def on_step(self, step: StepEvent) -> None:
        """One boundary.

        Raises:
            StopTraining: when everything is measured and the script is not to run on.
        """
        if self.phase == "warm-up":
            self._warm_up(step)
        elif self.phase == "timed":
            self._time(step)
        elif self.phase == "traced":
            self._trace(step)
        elif self.phase == "watched":
            self._look_behind()

    # -- warm-up ----------------------------------------------------------------------------------------------------

    def _warm_up(self, step: StepEvent) -> None:
        if step.reason == PATTERN:
            self._warm, self._warm_since_ns = 0, 0  # what was taken for a step was none
        self._warm += 1
        if self._warm == 2:
            self._warm_since_ns = step.host_ns
        if self._warm == OWN_FROM and self.loading is not None:
            self.loading.look_for_own()
        if len(self._warm_boundaries) < KEPT_WARMUP:
            self._warm_boundaries.append(step)
        if self._warm == LOOK_STEPS and not self.handful:
            self._read_facts()
        wanted = self.session.warmup if self.handful else max(self.session.warmup, MIN_WARMUP)
        slow = (
            not self.in_step
            and self._warm > MIN_WARMUP
            and step.host_ns - self._warm_since_ns > self.session.pace * WARMUP_S * 1e9
        )
        settled = self.in_step or self.is_settled(step)  # by the clock, which is each rank's own
        if self._over() or ((self._warm >= wanted or slow) and settled):
            self._begin_timed(step)
            return
        self._tell_phase(self._warm, wanted)
        # At 1, 2, 4, 8: early enough for a script that ends with os._exit.
        if self._warm & (self._warm - 1) == 0 and not self.handful:
            self._save_steps()

    def is_settled(self, step: StepEvent) -> bool:
        """Whether steps from here on are as they stay, once those of the warm-up are over."""
        return True

    # -- timed ------------------------------------------------------------------------------------------------------

    def _begin_timed(self, step: StepEvent) -> None:
        self.phase = "timed"
        if self.loading is not None:
            self.loading.rest(self._warm - OWN_FROM)
        self.timed.begin(step, records=self.records)
        if not self.handful:
            self._save_steps()  # takes longer than a hundredth of a short step, which then counts as disturbed
        self._tell_phase(0, self.session.steps, always=True)

    def _time(self, step: StepEvent) -> None:
        timed = self.timed
        timed.boundary(step, self.watcher.interval)
        clean, total = len(timed.backwards), timed.count
        wanted = max(self.session.steps, 1)
        if self.in_step or self.session.brief:
            done = total >= wanted
        else:
            seconds = (step.host_ns - timed.boundaries[0].host_ns) / 1e9
            done = (
                clean >= wanted
                or total >= PATIENCE * wanted
                or (clean >= MIN_TIMED and seconds > self.session.pace * TIMED_S)
            )
        if done or self._over():
            self._begin_trace(step)
            return
        self._tell_phase(clean, wanted)
        if step.host_ns - self._saved_ns > SAVE_EVERY_S * 1e9:
            self._save_steps()

    def _begin_trace(self, step: StepEvent) -> None:
        self.timed.end(step)
        self.phase = "traced"
        self.timed.save_rank(self.session.folder)
        if not self.records:
            return
        self._measure()
        self._read_facts()
        self._save_steps()
        self._tell_phase(0, self.session.detail_steps, always=True)
        if self.session.detail_steps < 1:
            self._finish()
            return
        self.discovery.rest()
        self.traced.start(self._step_us() / 1e6, compiled=self.compiled, in_step=self.in_step)

    # -- traced -----------------------------------------------------------------------------------------------------

    def _trace(self, step: StepEvent) -> None:
        self.traced.boundary(step, in_step=self.in_step)
        if self.traced.full or self._over():
            self._finish()
        else:
            self._tell_phase(len(self.traced.bounds) - 1, self.traced.wanted, always=True)

    def _finish(self) -> None:
        self._take_trace()
        self.phase = "watched"
        self._save_steps()  # all is measured, should the script end in a look behind the trace
        if self.records and not self.in_step and not self._over():
            of = self.training, self.session, self._notes, self._memory
            self._behind = LooksBehind(*of, step_us=self._step_us(), steps=self.watcher.seen)
        self._look_behind()

    def _look_behind(self) -> None:
        """The next step belongs to a look behind the trace, or it is the end."""
        if self._behind is None or not self._behind.next():
            self._wind_up()

    def _wind_up(self) -> None:
        self.phase = "done"
        if self.records:
            self._save_steps()
            tell(self.session, MEASURED, steps=len(self.timed.backwards))
        if self.session.keep_running:
            self.watcher.detach()
            self._let_go()
            return
        self._end()

    def _end(self) -> None:
        """Everything is measured.

        Raises:
            StopTraining: always, here.
        """
        stop(self.session, "measured")

    def abandon(self) -> None:
        """End whatever records, without a result, and let go of the training: its step has raised. May be called twice."""
        self.phase = "done"
        self.traced.abandon()
        if self._behind is not None:
            self._behind.abandon()
        self._let_go()

    def _let_go(self) -> None:
        """Drop every reference into the script: what it frees from now on is to be freed."""
        of = self.training
        for found in (of.roots, of.guides, of.optimizers, of.scalers, of.loaders, of.on_step):
            found.clear()
        self._warm_boundaries, self.timed.boundaries, self.traced.bounds = [], [], []

    def _take_trace(self) -> None:
        if self.traced.running and self.records:
            tell(self.session, "phase", phase="reading the trace", done=0, total=0)
        self.traced.stop()

    # -- ends that come early ---------------------------------------------------------------------------------------

    def at_exit(self) -> None:
        """Write what there is. A process that has seen no step leaves a record that another has written alone."""
        if os.getpid() != self._process or self.phase == "done":
            return
        self.watcher.patches.active = False
        try:
            if not self.watcher.seen and (self.session.folder / STEPS_FILE).exists():
                return
            self._close()
        except Exception as error:
            say(f"could not write what was measured: {type(error).__name__}: {error}")

    def _on_fault(self, error: BaseException) -> None:
        self._notes.append(f"advisor switched itself off: {type(error).__name__}: {error}")
        if self.records and self.phase != "done":
            self._close()
            self.phase = "done"
        if not self.session.keep_running:
            stop(self.session, "advisor switched itself off")

    def _close(self) -> None:
        if self.phase in ("warm-up", "timed"):
            self._measure()
        if self._behind is not None:
            self._behind.abandon()
        self._take_trace()
        self._read_facts()
        self._save_steps()
        tell(self.session, "ended", phase=self.phase, steps=self.watcher.seen)

    def _measure(self) -> None:
        """Read times, losses and memory; waits for the device."""
        boundaries = self._boundaries()
        self._times = step_times(boundaries)
        self._losses = _values([boundaries[position].loss for position in self._times.positions[:MAX_LOSSES]])
        self._memory = self.timed.memory()

    # -- writing ----------------------------------------------------------------------------------------------------

    def _read_facts(self) -> None:
        if not self.records:
            return
        self._facts = FactsRecord(
            model=model_facts(
                self.training,
                self.discovery,
                self.watcher,
                self.timed.recompiles,
                together(self.timed.compiled, self.timed.count),
            ),
            input=input_stats(
                self.training,
                self.discovery,
                self.timed.loader_us,
                self.timed.late_us,
                self.timed.iterators / max(self.timed.count, 1),
                self.loading,
            ),
            memory=self._memory,
        )
        storage.save(self.session.folder / FACTS_FILE, self._facts)

    def _save_steps(self) -> None:
        if not self.records:
            return
        self._saved_ns = time.perf_counter_ns()
        storage.save(self.session.folder / STEPS_FILE, self.record())

    def _provisional(self) -> bool:
        """No clean step has been timed yet: the warm-up's are all there is."""
        return not self.timed.backwards

    def _boundaries(self) -> list[StepEvent]:
        return self._warm_boundaries + self.timed.boundaries[1:] if self._provisional() else self.timed.boundaries

    def record(self) -> StepsRecord:
        """Everything about the steps so far. Event times appear once a phase is over: reading them waits for the GPU."""
        provisional = self._provisional()
        times = self._times or step_times([without_event(step) for step in self._boundaries()])
        notes = list(self._notes)
        if provisional and self.watcher.seen:
            notes.append(f"the script ended after {self.watcher.seen} steps: these times include its warm-up")
        if self.handful:
            notes.append("the script has so few steps that these times include its warm-up")
        if self.watcher.kind == FORWARD:
            # First, for it says of what all else is told.
            notes.insert(0, "the script trains nothing, so each round of model calls counts as a step")
        notes += [] if self.watcher.seen else others_worked()
        first_ns = self.discovery.seen.first_ns
        first = self._warm_boundaries[0].host_ns if self._warm_boundaries else 0
        bounds = [bound.host_ns for bound in self.traced.bounds]
        return StepsRecord(
            kind=self.watcher.kind,
            device=self.training.device.type,
            step_us=spread(times.step_us),
            wall_us=spread(times.wall_us),
            steps_seen=self.watcher.seen,
            warmup=self._warm,
            forward_steps=self.watcher.forward_steps if self.watcher.kind == "none" else 0,
            first_step_us=(first - first_ns) / 1e3 if first_ns and first else None,
            excluded=times.excluded,
            every_us=times.every_us,
            held=times.held,
            loader_us=tuple(self.timed.loader_us),
            losses=self._losses,
            backwards=tuple(self.timed.backwards),
            timed=self.timed.window,
            traced=self.traced.window,
            traced_wall_us=tuple((b - a) / 1e3 for a, b in itertools.pairwise(bounds)),
            phase=self.phase,
            complete=self.phase in ("watched", "done") and self.watcher.patches.fault is None,
            provisional=provisional,
            notes=tuple(notes),
        )

    # -- progress ---------------------------------------------------------------------------------------------------

    def _step_us(self) -> float:
        """What a timed step has taken; 0 where none is known."""
        wall = spread(self._times.wall_us) if self._times else None
        return wall.median if wall else 0.0

    def _over(self) -> bool:
        deadline = self.session.deadline_unix_s
        return not self.in_step and 0 < deadline < time.time()

    def _tell_phase(self, done: int, total: int, *, always: bool = False) -> None:
        now = time.perf_counter_ns()
        if self.records and (always or now - self._told_ns > TELL_EVERY_S * 1e9):
            self._told_ns = now
            tell(self.session, "phase", phase=self.phase, done=done, total=total)


def _values(losses: list[Any]) -> tuple[float, ...]:
    """Losses as numbers, waiting for the device; a missing one is NaN."""
    return tuple(float(loss) if loss is not None else float("nan") for loss in losses)


def attach_profile(session: Session) -> None:
    """The profile mode: measure, write the run folder, stop the script (or go on without hooks)."""
    training, watcher = attach_training(session)
    assert Attached.discovery is not None
    driver = ProfileDriver(training, session, watcher, Attached.discovery)
    driver.loading = LoaderWatch(session.folder)
    driver.loading.attach(watcher.patches)
    driver.attach()
