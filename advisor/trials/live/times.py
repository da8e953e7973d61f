"""The blocks of a trial so far, and what they say. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

from advisor.core.verdict import Blocks, Status
from advisor.loop.timing import spread
from advisor.trials.live import sizes
from advisor.trials.live.sizes import BlockPart
from advisor.trials.records import InTrial
from advisor.trials.statistics import (
    WAITS_FRAC,
    Decision,
    bursty,
    decide,
    gain_interval,
    rate_by_means,
    whole_blocks,
)

# A device that is behind the host by less of a step than this at most boundaries waits for the host's launches. So it does, now and
# then, where blocks wander by more than this between their tenth and their ninetieth percentile: a device's own do not.
HOST_BOUND_FRAC, WANDERING_FRAC = 0.1, 0.05


@dataclass(slots=True)
class Arm:
    """Parts of blocks with the change off, or on: median and mean step, its median without waits for the loader (0 where nobody
    saw), and on a GPU wall time a step, synchronised at both ends, and by how much of a step the device was behind the host."""

    medians: list[float] = field(default_factory=list)
    means: list[float] = field(default_factory=list)
    devices: list[float] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    peak_bytes: int = 0
    seen: list[BlockPart] = field(default_factory=list)  # the latest of them; those before an earlier process noted

    def put(self, position: int, steps: Sequence[float]) -> None:
        """What the part `position` of `seen` says, with these times for its steps."""
        part, at = self.seen[position], len(self.medians) - len(self.seen) + position
        mean = math.fsum(steps) / len(steps)
        self.medians[at], self.means[at] = median(steps), mean
        if not math.isnan(part.wall_us):  # and on a GPU
            self.walls[at] = part.wall_us * mean * len(part.step_us) / math.fsum(part.step_us)

    @property
    def host_bound(self) -> bool:
        """Whether the host's launches bound the step, or some steps; False where nobody saw."""
        if not self.lags:
            return False
        times = spread(self.medians)
        wanders = times is not None and times.p90 - times.p10 > WANDERING_FRAC * times.median
        return wanders or median(self.lags) < HOST_BOUND_FRAC


@dataclass(slots=True)
class Times:
    """Both arms; times are microseconds a step."""

    off: Arm = field(default_factory=Arm)
    on: Arm = field(default_factory=Arm)
    steps: int = 0  # of a part; 0 before there is any
    parts: int = 1  # of a block
    dropped: int = 0  # steps that were no clean training steps
    disturbed: int = 0  # blocks that did not count, for what the machine did meanwhile
    bursty: int = 0  # parts whose steps come in bursts
    kernels_off_us: list[float] = field(
        default_factory=list
    )  # medians of a few steps' kernel time, where noise hid the rest
    kernels_on_us: list[float] = field(default_factory=list)
    kernels_decide: bool = False
    exponent: float = 0.0  # a step's time grows as its input's elements to this, and is told for inputs of one size

    @classmethod
    def resumed(cls, found: InTrial) -> Times:
        """As an earlier process noted them."""
        off = Arm(list(found.off_us), list(found.off_mean_us), list(found.off_device_us), list(found.off_wall_us))
        on = Arm(list(found.on_us), list(found.on_mean_us), list(found.on_device_us), list(found.on_wall_us))
        return cls(off, on, found.steps_per_block, found.parts, bursty=found.bursty)

    def begin_anew(self, parts: int, steps: int) -> None:
        """Forget the pairs so far: blocks are of so many parts of so many steps from now on."""
        self.off = Arm(peak_bytes=self.off.peak_bytes)
        self.on = Arm(peak_bytes=self.on.peak_bytes)
        self.parts, self.steps, self.bursty = parts, steps, 0

    def add(self, arm: Arm, part: BlockPart) -> None:
        """One more part of this arm; with it all are put at one size anew, where inputs differ in size."""
        arm.seen.append(part)
        arm.medians.append(0.0)
        arm.means.append(0.0)
        arm.devices.append(median(part.device_us) if part.device_us else 0.0)
        arm.walls.append(part.wall_us)
        arm.put(len(arm.seen) - 1, part.step_us)
        before = self.exponent
        self.exponent, (off, on) = sizes.levelled([self.off.seen, self.on.seen])
        if before or self.exponent:
            for each, levelled in ((self.off, off), (self.on, on)):
                for position, steps in enumerate(levelled):
                    each.put(position, steps)
        self.bursty += bursty((on if arm is self.on else off)[-1])

    def noted(self, current: InTrial) -> InTrial:
        """`current` with every whole pair."""
        pairs = len(self.pairs) * self.parts
        return dataclasses.replace(
            current,
            off_us=tuple(self.off.medians[:pairs]),
            on_us=tuple(self.on.medians[:pairs]),
            off_mean_us=tuple(self.off.means[:pairs]),
            on_mean_us=tuple(self.on.means[:pairs]),
            off_wall_us=tuple(self.off.walls[:pairs]),
            on_wall_us=tuple(self.on.walls[:pairs]),
            off_device_us=tuple(self.off.devices[:pairs]),
            on_device_us=tuple(self.on.devices[:pairs]),
            steps_per_block=self.steps,
            parts=self.parts,
            bursty=self.bursty,
        )

    @property
    def by_means(self) -> bool:
        """Whether bursts make medians meaningless."""
        return rate_by_means(self.bursty, len(self.off.medians) + len(self.on.medians))

    @property
    def off_us(self) -> list[float]:
        """One time a block with the change off."""
        return whole_blocks(self.off.means if self.by_means else self.off.medians, self.parts)

    @property
    def on_us(self) -> list[float]:
        """One time a block with the change on."""
        return whole_blocks(self.on.means if self.by_means else self.on.medians, self.parts)

    @property
    def waits(self) -> bool:
        """Whether the device has waited for the loader at all."""
        arms = (self.off, self.on)
        return any(own < step for arm in arms for own, step in zip(arm.devices, arm.medians, strict=False))

    @property
    def by_device(self) -> bool:
        """Whether the device's own time decides: it waits for the loader for a good part of the step, with the change off or on."""
        if self.exponent or not self.off.devices or not self.on.devices:
            return False
        seen = min(*self.off.devices, *self.on.devices) > 0
        # Of means: behind workers that deliver several batches at once most steps do not wait, and few wait for long.
        arms = (self.off, self.on)
        return seen and any(math.fsum(arm.devices) < (1 - WAITS_FRAC) * math.fsum(arm.means) for arm in arms)

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Whole pairs (off, on) of what decides: the step, or the device's time in it."""
        if not self.by_device:
            return self.steps_in_pairs
        off, on = (whole_blocks(arm.devices, self.parts) for arm in (self.off, self.on))
        return list(zip(off, on, strict=False))

    @property
    def kernel_pairs(self) -> list[tuple[float, float]]:
        """Whole pairs (off, on) of the kernels' own time."""
        return list(zip(self.kernels_off_us, self.kernels_on_us, strict=False))

    @property
    def steps_in_pairs(self) -> list[tuple[float, float]]:
        """Whole pairs (off, on) of the step."""
        return list(zip(self.off_us, self.on_us, strict=False))

    @property
    def blocks(self) -> Blocks:
        """As a verdict has them."""
        own_off, own_on = self.kernels_off_us, self.kernels_on_us
        if not self.kernels_decide:
            own_off, own_on = (
                whole_blocks(arm.devices, self.parts) if self.waits else [] for arm in (self.off, self.on)
            )
        return Blocks(
            off_us=tuple(self.off_us),
            on_us=tuple(self.on_us),
            steps_per_block=self.steps,
            parts=self.parts,
            device_off_us=tuple(own_off),
            device_on_us=tuple(own_on),
            dropped=self.dropped,
            disturbed=self.disturbed,
            exponent=self.exponent,
        )

    @property
    def memory_bytes(self) -> int:
        """What the change adds to the peak of allocated memory; 0 where it was not seen both with and without."""
        return self.on.peak_bytes - self.off.peak_bytes if self.on.peak_bytes and self.off.peak_bytes else 0

    def last_look(self, why: str, min_gain: float, max_pairs: int) -> Decision:
        """What the pairs say when there will be no more, for this reason."""
        last = decide(self.pairs, min_gain, max_pairs=max_pairs, last=True, anew=True)
        return dataclasses.replace(last, reason=f"{why}: {last.reason}")

    def against_the_wall(self, decision: Decision) -> Decision:
        """A gain by CUDA events that wall time excludes is work moved out of the events' sight, and is not kept; a gain of the
        device's time is not, where the step is slower.
        """
        if decision.status != Status.KEPT or decision.gain is None:
            return decision
        if self.by_device or self.kernels_decide:
            return self._beside_the_step(decision)
        off, on = whole_blocks(self.off.walls, self.parts), whole_blocks(self.on.walls, self.parts)
        walls = [p for p in zip(off, on, strict=False) if not any(map(math.isnan, p))]
        by_wall = gain_interval(walls) if len(walls) >= 4 else None
        # The two clocks differ by what the host does after its last launch; hidden work leaves no gain on the wall at all.
        if by_wall is None or by_wall[0].high >= 0.5 * decision.gain.low:
            return decision
        reason = f"CUDA events and wall clock disagree: {decision.reason}, by wall clock at most {by_wall[0].high:+.1%}"
        return dataclasses.replace(decision, status=Status.INCONCLUSIVE, reason=reason)

    def _beside_the_step(self, decision: Decision) -> Decision:
        """A decision by the device's time, with what the step itself says."""
        found = gain_interval(self.steps_in_pairs) if len(self.steps_in_pairs) > 1 else None
        if found is None:
            return dataclasses.replace(
                decision, status=Status.INCONCLUSIVE, reason=f"{decision.reason}; the step itself was not timed"
            )
        step, point = found
        if step.high < 0.0:
            reason = f"it saves device time but makes the step slower: {decision.reason}, of the step {point:+.1%}"
            return dataclasses.replace(decision, status=Status.INCONCLUSIVE, reason=reason)
        cause = "its loader" if self.by_device else "the host's launches"
        told = f"device time: {decision.reason}; this step waits for {cause}, and is {point:.1%} shorter now"
        return dataclasses.replace(decision, reason=told, step_point=point)

    def step_us(self, decision: Decision) -> float | None:
        """The loop's step after this decision; None where no block was timed."""
        if not self.off_us:
            return None
        return median(self.on_us if decision.status == Status.KEPT else self.off_us)

    def host_bound(self, decision: Decision) -> bool:
        """Whether the host's launches bound the loop's step after this decision; False where nobody saw."""
        return (self.on if decision.status == Status.KEPT else self.off).host_bound

    def break_even_steps(self, first_us: float, decision: Decision | None) -> float | None:
        """After how many steps the extra time of the first one is saved; None where none is."""
        if decision is None or decision.point is None or not self.off_us:
            return None
        saved_us = decision.point * median(self.off_us)  # its share is of the step without the change
        return math.ceil(first_us / saved_us) if saved_us > 0 else None
