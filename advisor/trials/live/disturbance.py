"""Was the machine itself while a block was timed? Clock drops, throttling, other processes: such a block measures them.

On a GPU the driver tells: reasons for a reduced clock, the SM clock, how many processes compute there. On a CPU the kernel
tells how long our threads stood ready without a core to run on. Clock and waiting are held against the earlier blocks of
the same arm, because half precision may rightly run at another clock, and a machine may be shared all the time. A clock that the
power cap has lowered is the training's own: it goes up and down with what runs at the moment, as it will when nobody measures.

Sources: NVML reference, nvmlDeviceGetCurrentClocksEventReasons; Linux, Documentation/scheduler/sched-stats.rst (schedstat).
"""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median

import torch

from advisor.profiling.machine import nvml

# Earlier blocks of an arm that a block is held against; before there are so many none is disturbed by comparison.
LEAST_BLOCKS = 4
# SM clocks move in steps of 15 MHz (0.8 % at 1.98 GHz). Under the power cap they are not compared: half of the blocks of ResNets would be
# dropped, whose times all lie within 0.3 to 3 % (docs/notes/proof.md#clocks-under-the-power-cap).
CLOCK_FRAC = 0.05
# Time our threads waited for a core, a share of the block's time, above what is usual here.
WAIT_FRAC = 0.5

_READ = frozenset({"sm_clock_mhz", "clock_reasons"})


class MachineWatch:
    """`renew()` before a trial, `begin()` before a block, `end(on)` after its last step, the device still at work."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = open_reader(device)
        self._threads = Path("/proc/self/task") if device.type == "cpu" else None
        self._processes = self._count() if self._gpu is not None else None
        self._known: dict[tuple[bool, str], list[float]] = {}
        self._began = (0.0, 0.0)

    def renew(self) -> None:
        """A trial begins: what was usual in the one before is forgotten."""
        self._known = {}

    def begin(self) -> None:
        """A block begins."""
        self._began = time.perf_counter(), self._waited()

    def end(self, on: bool) -> str:
        """What disturbed the block that began last, in a few words; empty when nothing did.

        on: whether the change under trial was on in it.
        """
        try:
            return self._of_gpu(on) if self._gpu is not None else self._of_host(on)
        except Exception:
            self._gpu = self._threads = None  # a driver that fails tells nothing more: blocks count as they come
            return ""

    def _of_gpu(self, on: bool) -> str:
        assert self._gpu is not None  # the caller has looked
        now = self._gpu.read(_READ)
        processes = self._count()
        reasons = int(now.get("clock_reasons", 0.0))
        if reasons & nvml.THROTTLED:
            return "a throttled clock"
        if processes is not None and self._processes is not None and processes > self._processes:
            return "another process on the GPU"
        clock = None if reasons & nvml.POWER_CAP else now.get("sm_clock_mhz")
        if clock is not None and self._unusual(on, "clock", clock, CLOCK_FRAC * clock):
            return "a clock unlike the other blocks'"
        return ""

    def _of_host(self, on: bool) -> str:
        seconds, waited = time.perf_counter() - self._began[0], self._waited() - self._began[1]
        # A thread that ended in between took its account along.
        if seconds > 0 and waited >= 0 and self._unusual(on, "wait", waited / seconds, WAIT_FRAC, above=True):
            return "other processes on the CPU"
        return ""

    def _unusual(self, on: bool, what: str, value: float, margin: float, *, above: bool = False) -> bool:
        """Whether `value` is further from the arm's usual one than `margin`; if not, it joins what is usual."""
        known = self._known.setdefault((on, what), [])
        if len(known) >= LEAST_BLOCKS:
            difference = value - median(known)
            if (difference if above else abs(difference)) > margin:
                return True
        known.append(value)
        return False

    def _count(self) -> int | None:
        assert self._gpu is not None  # the caller has looked
        found = self._gpu.processes()
        return None if found is None else len(found)

    def _waited(self) -> float:
        """Seconds that this process's threads were ready to run and had no core, so far."""
        if self._threads is None:
            return 0.0
        total = 0
        for thread in self._threads.glob("*/schedstat"):
            try:
                total += int(thread.read_text().split()[1])
            except (OSError, IndexError, ValueError):
                continue  # the thread has ended, or the kernel keeps no such account
        return total / 1e9


def open_reader(device: torch.device) -> nvml.GpuReader | None:
    if device.type != "cuda":
        return None
    try:
        return nvml.GpuReader(str(torch.cuda.get_device_properties(device).uuid))
    except Exception:  # no NVML, no such GPU in it, a torch that tells no UUID: then nothing is watched
        return None
