"""A trial's timed blocks, off and on in ABBA order, until they decide."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Generator
from dataclasses import dataclass

import torch

from advisor.profiling.timing import step_times
from advisor.profiling.training import StepEvent
from advisor.trials.live.limit import Limit, OutOfTime
from advisor.trials.live.loop import Loop
from advisor.trials.live.switch import Switch
from advisor.trials.live.times import Times
from advisor.trials.records import InTrial
from advisor.trials.statistics import Decision, bursty, median, stretch, trial

# A block lasts this long, so that a timer, a straggler or a clock step weighs little in its median ...
BLOCK_S = 0.15
# ... but has steps enough for a median, and not more than a fast loop needs.
MIN_STEPS, MAX_STEPS = 3, 30
# Of a block's steps this many times as many may be unclean (short epochs, evaluation) before the trial is given up.
UNCLEAN_FACTOR = 4


@dataclass(frozen=True, slots=True)
class TimedBlocks:
    """Adds blocks to `times`, each pair noted on disk."""

    loop: Loop
    limit: Limit
    times: Times

    def run(self, switch: Switch, current: InTrial, *, patient: bool = True) -> Generator[None, StepEvent, Decision]:
        """The decision; `patient` as `statistics.trial` has it. Afterwards the change is on or off, as the last block was."""
        loop, times, session = self.loop, self.times, self.loop.session
        step_s = max(loop.step_us, 1.0) / 1e6
        # A process that ended before a pair was whole may be too short for one: the next tries with half as long ones.
        # The last trial's noise is the best guess at this one's.
        wanted = int(loop.stretch * min(MAX_STEPS, math.ceil(BLOCK_S / step_s))) >> (current.starts - 1)
        times.steps = times.steps or max(MIN_STEPS, wanted)
        course = trial(lambda: times.pairs, switch.is_on, session.min_gain, session.max_pairs, patient=patient)
        loop.machine.renew()
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
        except OutOfTime:
            decision = times.last_look(session.min_gain, session.max_pairs)
        decision = times.against_the_wall(decision)
        loop.stretch = stretch(times.pairs, session.min_gain, loop.stretch)
        loop.step_us = times.step_us(decision) or loop.step_us
        return decision

    def _block(self, on: bool) -> Generator[None, StepEvent, str]:
        """Time one block. The step after a switch or a synchronisation is not timed: it pays for them.

        Returns:
            What disturbed it, so that it does not count; empty when it is in `times`.
        """
        loop, times = self.loop, self.times
        arm, device = times.on if on else times.off, loop.training.device
        if loop.on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        start = time.perf_counter()
        boundaries = [(yield)]
        loop.machine.begin()
        clean = 0
        while clean < times.steps:
            event = yield
            boundaries.append(event)
            clean += event.clean
            self.limit.check()
            if len(boundaries) > UNCLEAN_FACTOR * times.steps + 10:
                raise OutOfTime
        disturbed = loop.machine.end(on)
        loop.synchronize()
        if disturbed:
            times.disturbed += 1
            return disturbed
        wall = (time.perf_counter() - start) * 1e6
        measured = step_times(boundaries).step_us
        unclean = len(boundaries) - 1 - clean
        times.dropped += unclean
        times.bursty += bursty(measured)
        arm.medians.append(median(measured))
        arm.means.append(math.fsum(measured) / len(measured))
        if loop.on_gpu:
            # An unclean step in the block (an epoch's end) is in its wall time too, which then stands for nothing.
            arm.walls.append(math.nan if unclean else wall / len(boundaries))
            arm.peak_bytes = max(arm.peak_bytes, torch.cuda.max_memory_allocated(device))
        return ""
