"""A trial's timed blocks, off and on in ABBA order, until they decide."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Generator
from dataclasses import dataclass
from statistics import median

import torch

from advisor.core.verdict import INCONCLUSIVE
from advisor.profiling.timing import lags_us, mark, step_times
from advisor.profiling.training import StepEvent
from advisor.transforms.graphs import captured
from advisor.trials.live.limit import Limit, OutOfTime
from advisor.trials.live.loop import Loop
from advisor.trials.live.sizes import Part
from advisor.trials.live.switch import Switch
from advisor.trials.live.times import Times
from advisor.trials.records import InTrial
from advisor.trials.statistics import EARLY_STAGES, MORE, STAGES, Decision, parts, trial

# A block lasts this long, so that a timer, a straggler or a clock step weighs little in its median ...
BLOCK_S = 0.15
# ... but has steps enough for a median, and not more than a fast loop needs.
MIN_STEPS, MAX_STEPS = 3, 30
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
            times.parts = min(most, loop.parts)  # the last trial's noise is the best guess at this one's
            times.steps = _steps(whole, times.parts)
        loop.machine.renew()
        try:
            decision = yield from self._pairs(switch, current, patient=False, hasty=hasty)
            if patient and decision.gain is not None and decision.status in (MORE, INCONCLUSIVE):
                finer = min(most, parts(times.pairs, session.min_gain, times.parts))
                if finer > times.parts and len(times.pairs) <= STAGES[0]:
                    times.begin_anew(finer, _steps(whole, finer))
                if decision.status == MORE or not times.pairs:
                    decision = yield from self._pairs(switch, current, patient=True)
        except OutOfTime as late:
            decision = times.last_look(str(late), session.min_gain, session.max_pairs)
        decision = times.against_the_wall(decision)
        loop.parts = parts(times.pairs, session.min_gain, times.parts)
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
            stages=EARLY_STAGES if first_look_s > EARLY_S else STAGES,
            hasty=hasty,
        )
        try:
            state = next(course)
            while True:
                loop.synchronize()
                switch.on() if state else switch.off()
                before = len(times.pairs)
                reason = yield from self._block(state)
                if len(times.pairs) > before:
                    loop.note(times.noted(dataclasses.replace(current, phase="timing")))
                state = course.send(reason)
        except StopIteration as done:
            decision: Decision = done.value
            return decision

    def _block(self, on: bool) -> Generator[None, StepEvent, str]:
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
        while clean < times.steps:
            event = yield
            boundaries.append(event)
            clean += event.clean
            self.limit.check()
            if len(boundaries) > UNCLEAN_FACTOR * times.steps + 10:
                raise OutOfTime("too few of its steps are clean training steps")
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
        times.add(arm, Part(found.step_us, elements, wall_us, found.device_us))
        return ""


def _steps(whole: int, parts: int) -> int:
    """Of each part of a block, that would have `whole` in one piece: half as many, for neighbours to be nearer."""
    return max(MIN_STEPS, whole if parts == 1 else -(-whole // 2))
