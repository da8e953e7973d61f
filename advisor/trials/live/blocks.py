"""A trial's timed blocks, off and on in ABBA order, until they decide."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass
from statistics import median

import torch

from advisor.core.verdict import Status
from advisor.loop import graphs
from advisor.loop.timing import lags_us, mark, step_times
from advisor.loop.training import StepEvent
from advisor.transforms.graphs import captured
from advisor.trials.live.kernels import kernel_times
from advisor.trials.live.limit import Limit, OutOfTime
from advisor.trials.live.loop import Loop
from advisor.trials.live.sizes import BlockPart
from advisor.trials.live.switch import Switch
from advisor.trials.live.times import Times
from advisor.trials.records import InTrial
from advisor.trials.statistics import BLOCK_S, EARLY_STAGES, MAX_STEPS, MIN_STEPS, STAGES, Decision, parts, trial

# Of steps longer than this one makes a block of what fresh processes judge next: three pairs of three would take a minute of two.
SLOW_S = 0.5
# Where the pairs that a first look asks for take longer than this, three are looked at before.
EARLY_S = 15.0
# All pairs of a trial in parts fit into this time: where steps are long, blocks have fewer parts. In a search of four minutes one
# trial that took 40 s (CUDA graphs around ResNet-50, 20 pairs) cost the proof of another change its time.
PARTS_S = 25.0
# Of a block's steps this many times as many may be unclean (short epochs, evaluation) before the trial is given up.
UNCLEAN_FACTOR = 4


@dataclass(frozen=True, slots=True)
class TimedBlocks:
    """Adds blocks to `times`, each pair noted on disk."""

    loop: Loop
    limit: Limit
    times: Times

    def run(
        self, switch: Switch, current: InTrial, *, patient: bool = True, hasty: bool = False
    ) -> Generator[None, StepEvent, Decision]:
        """The decision; `patient` and `hasty` as `statistics.trial` has them. Afterwards the change is on or off, as the last block was.

        Where noise leaves the first stage open, it is taken anew with blocks in parts that alternate.
        """
        loop, times, session = self.loop, self.times, self.loop.session
        step_s = max(loop.step_us, 1.0) / 1e6
        # A process that ended before a pair was whole may be too short for one: the next tries with half as long ones.
        whole = min(MAX_STEPS, math.ceil(BLOCK_S / step_s)) >> (current.starts - 1)
        most = max(1, int(PARTS_S / (2 * STAGES[-1] * (_steps(whole, 2) + 1) * step_s)))
        if not times.steps:
            # The last trial's noise is the best guess at this one's.
            times.parts = 1 if hasty else min(most, loop.parts)
            times.steps = 1 if hasty and step_s > SLOW_S else _steps(whole, times.parts)
        loop.machine.renew()
        try:
            decision = yield from self._pairs(switch, current, patient=False, hasty=hasty)
            if decision.gain is not None and decision.status in (Status.MORE, Status.INCONCLUSIVE):
                decision = (yield from self._by_kernels(switch)) or decision
            if hasty and decision.status == Status.MORE and (decision.point or 0.0) <= 0.0:
                # Fresh processes take up what looks faster; what does not by three pairs may by six.
                decision = yield from self._pairs(switch, current, patient=False)
            if patient and decision.gain is not None and decision.status in (Status.MORE, Status.INCONCLUSIVE):
                finer = min(most, parts(times.pairs, session.min_gain, times.parts))
                if finer > times.parts and len(times.pairs) <= STAGES[0]:
                    times.begin_anew(finer, _steps(whole, finer))
                if decision.status == Status.MORE or not times.pairs:
                    decision = yield from self._pairs(switch, current, patient=True)
        except OutOfTime as late:
            decision = times.last_look(str(late), session.min_gain, session.max_pairs)
        decision = times.against_the_wall(decision)
        loop.parts = loop.parts if hasty else parts(times.pairs, session.min_gain, times.parts)
        loop.step_us = times.step_us(decision) or loop.step_us
        loop.host_bound = times.host_bound(decision)
        return decision

    def _pairs(
        self, switch: Switch, current: InTrial, *, patient: bool, hasty: bool = False
    ) -> Generator[None, StepEvent, Decision]:
        """Pairs of blocks, to those there are, until they decide, or without patience until the next stage is full."""
        loop, times, session = self.loop, self.times, self.loop.session
        first_look_s = 2 * STAGES[0] * times.parts * (times.steps + 1) * loop.step_us / 1e6
        course = trial(
            lambda: times.pairs,
            switch.is_on,
            session.min_gain,
            session.max_pairs,
            patient=patient,
            anew=True,
            stages=EARLY_STAGES if hasty or first_look_s > EARLY_S else STAGES,
            hasty=hasty,
        )
        try:
            state = next(course)
            while True:
                loop.synchronize()
                switch.on() if state else switch.off()
                before = len(times.pairs)
                reason = yield from self.block(state)
                if len(times.pairs) > before:
                    loop.note(times.noted(dataclasses.replace(current, phase="timing")))
                state = course.send(reason)
        except StopIteration as done:
            decision: Decision = done.value
            return decision

    def _by_kernels(self, switch: Switch) -> Generator[None, StepEvent, Decision | None]:
        """What the kernels' own time says where noise hides what the step does; None unless it is a gain.

        What saves only the host's time, or lets kernels run side by side, saves none of it: nothing is refused by it. Not beside captured
        graphs (docs/notes/profiling.md#cuptis-teardown).
        """
        loop, times, session = self.loop, self.times, self.loop.session
        if not session.kernel_steps or times.kernels_off_us or times.exponent or graphs.alive():
            return None
        course = trial(
            lambda: times.kernel_pairs, switch.is_on, session.min_gain, STAGES[0], anew=True, stages=EARLY_STAGES
        )
        try:
            state = next(course)
            while True:
                loop.synchronize()
                switch.on() if state else switch.off()
                found = yield from kernel_times(loop, session.kernel_steps // 2, loop.notes.append, self.limit.check)
                if not found:
                    return None
                (times.kernels_on_us if state else times.kernels_off_us).append(median(found))
                state = course.send("")
        except StopIteration as done:
            decision: Decision = done.value
        times.kernels_decide = decision.status == Status.KEPT
        return decision if times.kernels_decide else None

    def block(self, on: bool) -> Generator[None, StepEvent, str]:
        """Time a block, or a part of one. The step after a switch or a synchronisation is not timed: it pays for them.

        Returns:
            What disturbed it, so that it does not count; empty when it is in `times`.
        """
        loop, times = self.loop, self.times
        arm, device = times.on if on else times.off, loop.training.device
        if loop.on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
            captured.reset_peak_memory()
        start = time.perf_counter()
        idle = mark(device)
        boundaries = [(yield)]
        loop.machine.begin()
        clean = 0
        unlike: Counter[str] = Counter()
        while clean < times.steps:
            event = yield
            boundaries.append(event)
            clean += event.clean
            if not event.clean:
                unlike[event.reason] += 1
            self.limit.check()
            if len(boundaries) > UNCLEAN_FACTOR * times.steps + 10:
                why, count = unlike.most_common(1)[0]
                raise OutOfTime(
                    f"too few of its steps are clean training steps ({why} in {count} of {len(boundaries) - 1})"
                )
        disturbed = loop.machine.end(on)
        loop.synchronize()
        if disturbed:
            times.disturbed += 1
            return disturbed
        wall = (time.perf_counter() - start) * 1e6
        found = step_times(boundaries)
        unclean = len(boundaries) - 1 - clean
        times.dropped += unclean
        elements = tuple(boundaries[position].elements for position in found.positions)
        if loop.on_gpu:
            lags = lags_us(idle, boundaries[1:])
            if lags and found.step_us:
                arm.lags.append(median(lags) / max(median(found.step_us), 1.0))
            arm.peak_bytes = max(arm.peak_bytes, torch.cuda.max_memory_allocated(device) + captured.hidden_bytes())
        # An unclean step in the block (an epoch's end) is in its wall time too, which then stands for nothing.
        wall_us = math.nan if unclean or not loop.on_gpu else wall / len(boundaries)
        times.add(arm, BlockPart(found.step_us, elements, wall_us, found.device_us))
        return ""


def _steps(whole: int, parts: int) -> int:
    """Of each part of a block, that would have `whole` in one piece: half as many, for neighbours to be nearer."""
    return max(MIN_STEPS, whole if parts == 1 else -(-whole // 2))
