"""A model of one step that a change can be tried on: device work, host work, and waits that neither hides.

    step = data + copy + max(busy + gaps + sync, host)

`busy` is device work; `gaps` is device idle while the host prepares launches, and idle of no known cause; `sync` is device
idle after the host had waited for the device, which is host work again. `host` is the time in which the host alone could
issue the step: faster kernels gain nothing below it. The trace shows the host only where it is the limit, so `host` is a
range. On a CPU, operators are the device work and nothing overlaps.

Source of the idea: Zhu, Phanishayee, Pekhimenko, "Daydream", USENIX ATC 2020 (what-if on the measured rows).
"""

from __future__ import annotations

from dataclasses import dataclass

from advisor.analysis.idle import host_waiting_us, idle, operators_us
from advisor.analysis.view import View
from advisor.core.findings import Interval
from advisor.core.profile import STARVED_FRAC

# Host time of one operator that launches one kernel, in eager training. Measured on one H200 machine: 9.3 µs for an in-place
# add without autograd; recording for backward and the module call around it about double that (1.5 against 0.8 µs on a CPU).
OP_LOW_US, OP_HIGH_US = 9.3, 19.0
# A node of a replayed graph costs 1 to 2 us (published replay timings; 3.03 ms for ResNet-18 on one H200), and more where
# kernels are long and the host runs ahead: of 4.1 us idle at each of ConvNeXt-T's 642 kernels on one H200, graphs left 2.2 to
# 3.2. There the device itself takes that long from kernel to kernel.
GRAPH_NODE_US, GRAPH_NODE_WORST_US = 2.0, 3.2
# With more idle than this between kernels, the host may be the limit all through the step.
HOST_BOUND = 0.05
# A hundredth of a per cent of a step is below what any timing resolves: neither a gain nor a loss.
NEGLIGIBLE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Microseconds a step that a change takes away; below zero what it adds.

    Host work taken away shortens gaps too, unless `host_closes_gaps` is False: then `gaps_us` says it all.
    """

    device_us: float = 0.0
    host_us: float = 0.0
    host_closes_gaps: bool = True
    gaps_us: float = 0.0
    sync_us: float = 0.0
    data_us: float = 0.0
    copy_us: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What a change saves at worst and at best, and what that was computed from."""

    worst: Saving
    best: Saving
    basis: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The untraced step's parts, microseconds. `scale` turns a row's traced time into its part of `busy_us`; `longer_us` of that may be
    idle, as it was in the traced steps. A `starved` step is as long as the loader's workers take for a batch."""

    step_us: float
    busy_us: float
    gaps_us: float
    sync_us: float
    data_us: float
    copy_us: float
    host_low_us: float
    host_high_us: float
    scale: float
    longer_us: float = 0.0
    starved: bool = False

    @classmethod
    def of(cls, view: View) -> Step | None:
        """The step of a profile; None when no step was timed or nothing was traced."""
        if view.step_us <= 0 or view.device_us <= 0:
            return None
        return cls._on_gpu(view) if view.on_gpu else cls._on_cpu(view)

    @classmethod
    def untraced(cls, view: View) -> Step | None:
        """The step of a profile that holds no traced window: what waits for the loader, and the rest; None without a timed step."""
        if view.step_us <= 0:
            return None
        data = min(view.step_us, view.profile.input.next_us)
        return cls(
            step_us=view.step_us, busy_us=view.step_us - data, gaps_us=0.0, sync_us=0.0, data_us=data, copy_us=0.0,
            host_low_us=0.0, host_high_us=view.step_us - data, scale=1.0, starved=view.profile.starved,
        )  # fmt: skip

    @classmethod
    def _on_cpu(cls, view: View) -> Step:
        data = host_waiting_us(view)
        busy = view.step_us - data
        return cls(
            step_us=view.step_us, busy_us=busy, gaps_us=0.0, sync_us=0.0, data_us=data, copy_us=0.0,
            host_low_us=0.0, host_high_us=0.0, scale=operators_us(view) / view.device_us,
        )  # fmt: skip

    @classmethod
    def _on_gpu(cls, view: View) -> Step | None:
        found = idle(view)
        if found is None:
            return None
        causes = found.by_cause
        gaps, sync = causes["launch"] + causes["other"], causes["sync"]
        together = found.busy_us + gaps + sync
        profile = view.profile
        calls = profile.launch_us / (1.0 + max(0.0, profile.cost.overhead_frac))
        low = min(together, gaps + sync + calls)
        bound = gaps + sync > HOST_BOUND * together
        high = together if bound else min(together, max(low, profile.launches * OP_HIGH_US))
        return cls(
            step_us=view.step_us, busy_us=found.busy_us, gaps_us=gaps, sync_us=sync, data_us=causes["data"],
            copy_us=causes["copy"], host_low_us=low, host_high_us=high,
            scale=min(1.0, found.busy_us / view.device_us), longer_us=found.longer_us,
            starved=profile.starved and causes["data"] > STARVED_FRAC * view.step_us,
        )  # fmt: skip

    def after(self, saving: Saving, *, optimistic: bool) -> float:
        """Step time with the change, microseconds.

        Host work saved shortens gaps by as much at best; at worst in the share in which gaps are exposed at all. In a starved step the
        next batch comes no sooner for it: at worst all that is saved is waited for instead.
        """
        waits = max(0.0, self.data_us - saving.data_us) + max(0.0, self.copy_us - saving.copy_us)
        together = self.busy_us + self.gaps_us + self.sync_us
        exposed = 1.0 if optimistic or together <= 0 else (self.gaps_us + self.sync_us) / together
        closed = max(0.0, saving.host_us) * exposed if saving.host_closes_gaps else 0.0
        gaps = max(0.0, self.gaps_us - saving.gaps_us - closed)
        sync = max(0.0, self.sync_us - saving.sync_us)
        device = max(0.0, self.busy_us - saving.device_us * self.scale) + gaps + sync
        host = (self.host_low_us if optimistic else self.host_high_us) - saving.host_us
        found = waits + max(device, host)
        return max(found, self.step_us - saving.data_us) if self.starved and not optimistic else found

    def gain(self, change: Change) -> Interval:
        """The share of the step that the change saves; `low` may be below zero, `high` never is."""
        low = 1.0 - self.after(change.worst, optimistic=False) / self.step_us
        high = 1.0 - self.after(change.best, optimistic=True) / self.step_us
        low, high = (0.0 if abs(value) < NEGLIGIBLE else value for value in (low, high))
        high = max(0.0, low, high)
        return Interval(low=min(low, high), high=high, basis=change.basis)
