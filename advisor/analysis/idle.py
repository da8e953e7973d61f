"""How much of the untraced step the device stands idle, and why.

Busy time comes from the traced window, the step from steps without a profiler. Tracing slows the host, not kernels and copies, so
traced gaps are too long: idle is what the untraced step leaves beside busy. Copies take of it what they were traced with, waits for data
what the loader's `next()` took in untraced steps, and the other causes share the rest in the traced proportions.
"""

from __future__ import annotations

from dataclasses import dataclass

from advisor.analysis.time import NO_STEP
from advisor.analysis.view import View
from advisor.core.metrics import MetricTable
from advisor.core.provenance import Provenance
from advisor.core.units import time_text

UNTRACED = "no step was traced"
CAUSES = ("data", "launch", "copy", "sync", "other")
# Kernel times vary by a few per cent between traced and untraced steps; beyond this the two contradict each other.
CONTRADICTION = 1.05
# Below this share of the untraced time in `next()` the traced one does not tell how much of it the device stood idle for.
COMPARABLE = 0.1


@dataclass(frozen=True, slots=True)
class Idle:
    """Microseconds of the untraced step: device busy, and idle by cause. `note` tells a contradiction, else "".

    `longer_us`: by how much longer the device was idle in the traced steps, copies apart, as far as kernels that vary leave it open that
    it is so in the untraced ones.
    """

    busy_us: float
    by_cause: dict[str, float]
    note: str = ""
    longer_us: float = 0.0

    @property
    def total_us(self) -> float:
        """All idle time."""
        return sum(self.by_cause.values())


def idle(view: View) -> Idle | None:
    """Scale the traced idle to the untraced step; None without a timed step, a traced window or a GPU."""
    step, busy = view.step_us, view.profile.busy_us
    if not view.on_gpu or step <= 0 or busy <= 0:
        return None
    note = ""
    if busy > CONTRADICTION * step:
        note = f"the traced steps kept the device busy for {time_text(busy)}, longer than the untraced step of {time_text(step)}"
    busy = min(busy, step)
    traced = dict.fromkeys(CAUSES, 0.0)
    for row in view.profile.idle:
        traced[row.cause if row.cause in traced else "other"] += max(0.0, row.time_us)
    copies = min(traced.pop("copy"), step - busy)
    total, rest = sum(traced.values()), step - busy - copies
    longer = min(max(0.0, total - rest), (CONTRADICTION - 1.0) * busy)
    data = min(rest, _waiting_us(view, busy, traced["data"], rest * traced["data"] / total if total > 0 else 0.0))
    del traced["data"]
    others, left = sum(traced.values()), rest - data
    scaled = (
        {cause: left * (time / others) for cause, time in traced.items()} if others > 0 else {**traced, "other": left}
    )
    return Idle(busy, {"data": data, **scaled, "copy": copies}, note, longer)


def _waiting_us(view: View, busy_us: float, traced_us: float, scaled_us: float) -> float:
    """Idle time of an untraced step in the loader's `next()`, of which a traced one had `traced_us`, scaled like the rest `scaled_us`.

    Tracing slows the host, and the workers catch up meanwhile: two of them kept a ResNet-18 on an H200 waiting for 9 of 19 ms a step, and
    for 1.7 of 23 in the traced ones. How long `next()` took is known of both; how much of that the device stood idle, of the traced ones.
    """
    stats, traced_next_us = view.profile.input, view.profile.cost.traced_next_us
    if stats.next_us <= 0:
        return scaled_us
    if traced_next_us > COMPARABLE * stats.next_us:
        return stats.next_us * min(1.0, traced_us / traced_next_us)
    # Work in the queue hides so much of it at most, and it is no more than all of it.
    return min(stats.next_us, max(scaled_us, stats.next_us - busy_us))


def host_waiting_us(view: View) -> float:
    """Time of a step on a CPU in the loader's `next()`: of untraced ones where it is known, as tracing lets the workers catch up."""
    stats = view.profile.input
    traced_us = sum(row.time_us for row in view.profile.idle if row.cause == "data")
    return min(view.step_us, stats.next_us or traced_us)


def operators_us(view: View) -> float:
    """Time of an untraced step on a CPU in operators: as in the traced one, where the step has room for it besides its waits.

    Tracing makes the Python between operators longer. Where steps were traced in a quieter moment than they were timed in, operators
    have at least their share of the traced step; where in a busier one, so that they alone are longer than the step, just that.
    """
    works, busy = view.step_us - host_waiting_us(view), view.device_us
    between = sum(row.time_us for row in view.profile.idle if row.cause != "data")
    if busy <= 0:
        return 0.0
    share = works * busy / (busy + between)
    if busy > works:
        return share
    return max(busy, share) if view.profile.cost.overhead_frac < 0 else busy


def _waiting(view: View, table: MetricTable, found: Idle | None) -> None:
    """The share of the step that waits for data: of steps that were timed, whether any was traced or not."""
    if view.step_us <= 0:
        table.miss("data_wait_frac", NO_STEP)
    elif found is not None:
        table.set("data_wait_frac", found.by_cause["data"] / view.step_us, reason=found.note)
    elif view.on_gpu:
        waiting = min(1.0, view.profile.input.next_us / view.step_us)
        if view.profile.input.loader:
            table.set("data_wait_frac", waiting, Provenance.MODELLED, f"{UNTRACED}: all of the time in next(), at most")
        else:
            table.miss("data_wait_frac", "no device activity was traced, and no DataLoader used")
    else:
        table.set("data_wait_frac", host_waiting_us(view) / view.step_us)


def fill(view: View, table: MetricTable) -> None:
    """Set busy and idle shares of the untraced step; they add up to 1."""
    found = idle(view)
    if not view.on_gpu and view.step_us > 0:
        table.set("work_frac", operators_us(view) / view.step_us)
    _waiting(view, table, found)
    names = ["work_frac", "busy_frac", "idle_frac", *(f"idle_{cause}_frac" for cause in CAUSES)]
    if found is None:
        if view.on_gpu:
            for name in names:
                table.miss(name, NO_STEP if view.step_us <= 0 else "no device activity was traced")
        return
    step = view.step_us
    for name in ("work_frac", "busy_frac"):
        table.set(name, found.busy_us / step, reason=found.note)
    table.set("idle_frac", found.total_us / step, reason=found.note)
    for cause, time in found.by_cause.items():
        table.set(f"idle_{cause}_frac", time / step, reason=found.note)
