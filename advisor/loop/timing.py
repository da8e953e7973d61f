"""Step times from step boundaries: only intervals that hold one training step and nothing else."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from advisor.core.profile import Spread
from advisor.loop.records import Window
from advisor.loop.training import Draw, StepEvent

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Times of the clean intervals in order, µs, with their positions in the sequence, and why others were left out."""

    wall_us: tuple[float, ...] = ()
    event_us: tuple[float, ...] = ()  # by CUDA events; empty on a CPU
    waited_us: tuple[float, ...] = ()  # of each, what the device (a CPU: the thread) waited in loaders' `next()`
    positions: tuple[int, ...] = ()  # index of the interval's closing boundary in the sequence given
    excluded: dict[str, int] = field(default_factory=dict)
    every_us: tuple[float, ...] = ()  # wall time of every interval, those left out included
    every_waited_us: tuple[float, ...] = ()  # of each of these, as `waited_us`
    every_cpu_us: tuple[float, ...] = ()  # and what all threads of the process computed in it
    held: tuple[str, ...] = ()  # of each of these why it was left out; "" for a clean one

    @property
    def step_us(self) -> tuple[float, ...]:
        """The times that stand for the step: by CUDA events where there are any."""
        return self.event_us or self.wall_us

    @property
    def device_us(self) -> tuple[float, ...]:
        """What the device itself took of each step."""
        return tuple(step - waited for step, waited in zip(self.step_us, self.waited_us, strict=True))


def step_times(boundaries: Sequence[StepEvent]) -> StepTimes:
    """Intervals between neighbours of `boundaries`; the first one only opens the first interval.

    Waits for the device when there are CUDA events: call it outside the timed stretch.
    """
    wall, events, waited, positions, excluded = [], [], [], [], Counter[str]()
    if boundaries and boundaries[-1].event is not None:
        boundaries[-1].event.synchronize()
    every_waited = [math.fsum(map(_waited_us, boundary.draws)) for boundary in boundaries[1:]]
    for position in range(1, len(boundaries)):
        before, after = boundaries[position - 1], boundaries[position]
        if not after.clean:
            excluded[after.reason] += 1
            continue
        if after.event is not None and before.event is not None:
            events.append(before.event.elapsed_time(after.event) * 1e3)
        wall.append((after.host_ns - before.host_ns) / 1e3)
        waited.append(every_waited[position - 1])
        positions.append(position)
    if len(events) != len(wall):
        events = []  # the device became known in between: two kinds of time do not mix
    return StepTimes(
        wall_us=tuple(wall),
        event_us=tuple(events),
        waited_us=tuple(waited),
        positions=tuple(positions),
        excluded=dict(excluded),
        every_us=tuple((b.host_ns - a.host_ns) / 1e3 for a, b in itertools.pairwise(boundaries)),
        every_waited_us=tuple(every_waited),
        every_cpu_us=tuple((b.cpu_ns - a.cpu_ns) / 1e3 for a, b in itertools.pairwise(boundaries)),
        held=tuple("" if b.clean else b.reason for b in boundaries[1:]),
    )


def _waited_us(draw: Draw) -> float:
    """For how long the device had nothing to do in this `next()`: on its own clock between two events, of which the first is
    reached when all work before it is done, and the second at once."""
    (first, began_ns), (last, ended_ns) = draw.before, draw.after
    if first is None or last is None:
        return (ended_ns - began_ns) / 1e3
    last.synchronize()  # a loader that is drawn from on a stream of its own is not behind the boundary's event
    return float(first.elapsed_time(last)) * 1e3


def clocks(device: torch.device) -> tuple[torch.cuda.Event | None, int]:
    """Now, on both clocks: an event recorded on the device's current stream (None on a CPU), and the host's `perf_counter_ns`."""
    event = None
    if device.type == "cuda":
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
    return event, time.perf_counter_ns()


def mark(device: torch.device) -> StepEvent:
    """A boundary here and now, between steps: where the device is idle, its clock and the host's meet there."""
    event, now = clocks(device)
    return StepEvent(index=-1, host_ns=now, event=event, clean=False)


def lags_us(idle: StepEvent, boundaries: Sequence[StepEvent]) -> tuple[float, ...]:
    """How far the device was behind the host at each clean boundary, µs: about 0 where it had done all it was given.

    Waits for the device. Empty without CUDA events.

    Args:
        idle: a mark before these, made while the device had nothing to do.
    """
    found = []
    for boundary in boundaries:
        if boundary.clean and boundary.event is not None and idle.event is not None:
            boundary.event.synchronize()
            found.append(idle.event.elapsed_time(boundary.event) * 1e3 - (boundary.host_ns - idle.host_ns) / 1e3)
    return tuple(found)


def spread(values: Sequence[float]) -> Spread | None:
    """Median, 10th and 90th percentile (linear between ranks), and the values; None for none."""
    if not values:
        return None
    ordered = sorted(values)

    def quantile(share: float) -> float:
        at = share * (len(ordered) - 1)
        low = int(at)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (ordered[high] - ordered[low]) * (at - low)

    return Spread(
        median=quantile(0.5), p10=quantile(0.1), p90=quantile(0.9), n=len(ordered), raw=tuple(float(v) for v in values)
    )


def window(step: StepEvent, begun: Window | None = None) -> Window:
    """A window that ends at this boundary and begins at `begun`'s beginning, or here."""
    behind_ns = time.perf_counter_ns() - step.host_ns
    unix, monotonic = time.time_ns() - behind_ns, time.monotonic_ns() - behind_ns
    return Window(
        start_unix_ns=begun.start_unix_ns if begun else unix,
        end_unix_ns=unix,
        start_monotonic_ns=begun.start_monotonic_ns if begun else monotonic,
        end_monotonic_ns=monotonic,
    )
