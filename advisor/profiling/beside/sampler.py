"""The GPU and the host, sampled from outside the training process while the script runs."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from advisor.core import storage
from advisor.core.errors import AdvisorError
from advisor.core.profile import Quantity
from advisor.core.provenance import Provenance
from advisor.profiling.machine import hostload, nvml

INTERVAL_S = 0.12  # GPM needs more than 0.1 s between two readings (see nvml.GPM_INTERVAL_S)
FLUSH_S = 2.0  # what a killed supervisor loses at most
MAX_SAMPLES = 20_000  # forty minutes; then every second sample goes and the interval doubles
TREE_REFRESH_S = 1.0  # looking for new child processes reads all of /proc
FOREIGN_MEMORY_BYTES = 2 << 30  # held before the script started by processes that a container does not show
STOP_TIMEOUT_S = 2.0  # a driver call that hangs must not hold up the report
DRIFT_SAMPLES = 8  # fewer have no quarters worth comparing
NEAR_NS = 300_000_000  # a window too short to hold a sample is told by the nearest one within this distance


_HOST_COLUMNS = {"cpu_s", "others_cpu_s", "resident_bytes", "swap_frac"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledRecording:
    """Samples in columns; a value that could not be read is NaN. Times are CLOCK_REALTIME and monotonic nanoseconds.

    Columns: those of `nvml.GpuReader`, and
    - cpu_s: CPU seconds so far of the script's processes
    - others_cpu_s: of all that is neither the script's nor advisor's, on the cores that these may use
    - resident_bytes, swap_frac
    - foreign_processes: 0 or more on the GPU that are not the script's

    `constants` are the reader's, and cpu_count. `missing` tells for a column or constant why it has no (or fewer) values.
    """

    time_ns: list[int] = field(default_factory=list)
    monotonic_ns: list[int] = field(default_factory=list)
    columns: dict[str, list[float]] = field(default_factory=dict)
    constants: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)


class Sampler:
    """Samples in a thread of the supervisor, from before the script starts until it has ended.

    Args:
        interval_s: time between samples. When it is too short for GPM, GPM is read less often.
        gpu: UUID, PCI bus id or NVML index; by default the first GPU that this environment shows to CUDA. When the
            script turns out to work on another one, that is sampled instead.
        path: where the recording is written, every two seconds and at the end.
        root_pid: process whose descendants are the script's; this process by default.
    """

    def __init__(
        self,
        interval_s: float = INTERVAL_S,
        *,
        gpu: str | None = None,
        path: Path | None = None,
        root_pid: int | None = None,
    ) -> None:
        self._interval_s = max(0.01, interval_s)
        self._gpu, self._path = gpu, path
        self._root = os.getpid() if root_pid is None else root_pid
        self._recording = SampledRecording()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._pids: set[int] = set()
        self._pids_time = -math.inf
        self._here_before: set[int] | None = None
        self._strangers: set[int] = set()
        self._held = False  # memory of the GPU was taken before the script began, by processes that are not shown
        self._followed = -math.inf

    def start(self) -> None:
        """Sampling goes on in the background from now on; never raises for want of a GPU."""
        self._thread = threading.Thread(target=self._run, name="advisor-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> SampledRecording:
        """Sampling has ended, the file is complete; returns everything recorded. May be called twice."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
            self._thread = None
            self._write()
        return self.recording()

    def recording(self) -> SampledRecording:
        """A copy of what has been recorded so far."""
        with self._lock:
            now = self._recording
            return SampledRecording(
                time_ns=list(now.time_ns),
                monotonic_ns=list(now.monotonic_ns),
                columns={name: list(values) for name, values in now.columns.items()},
                constants=dict(now.constants),
                missing=dict(now.missing),
            )

    def _run(self) -> None:
        reader = self._open()
        flushed = next_at = time.monotonic()
        flush_s = FLUSH_S
        while not self._ended.is_set():
            self._sample(reader)
            reader = self._follow(reader)
            if time.monotonic() - flushed >= flush_s:
                began = time.monotonic()
                self._write()
                flushed = time.monotonic()
                flush_s = max(FLUSH_S, 20 * (flushed - began))  # a slow disk must not become the load we measure
            next_at = max(next_at + self._interval_s, time.monotonic())
            self._ended.wait(next_at - time.monotonic())
        if reader is not None:
            reader.close()

    def _open(self) -> nvml.GpuReader | None:
        missing, constants = self._recording.missing, self._recording.constants
        constants["cpu_count"] = float(hostload.cpu_count())
        if not hostload.supported():
            missing.update(dict.fromkeys(sorted(_HOST_COLUMNS), "this system has no Linux /proc"))
        elif hostload.busy_seconds() is None:
            missing["others_cpu_s"] = (
                "a quota allows fewer cores than there are: cores that others use are not subtracted"
            )
        try:
            reader = nvml.GpuReader(self._gpu)
        except Exception as error:
            missing["gpu"] = str(error)
            return None
        constants.update(reader.constants)
        self._here_before = reader.processes()
        return reader

    def _follow(self, reader: nvml.GpuReader | None) -> nvml.GpuReader | None:
        """The reader of the GPU that the script works on; a script may choose its GPU itself."""
        if reader is None or self._followed == self._pids_time:
            return reader
        self._followed = self._pids_time  # once for each look at the process tree
        try:
            uuid = reader.elsewhere(self._pids)
            if uuid is None:
                return reader
            there = nvml.GpuReader(uuid)
        except Exception as error:
            self._recording.missing["sampler"] = f"{type(error).__name__}: {error}"
            return reader
        reader.close()
        with self._lock:  # what was read of the other GPU says nothing about the script
            now = self._recording
            for name in now.columns.keys() - _HOST_COLUMNS:
                del now.columns[name]
            now.constants.update(there.constants)
        self._here_before = (there.processes() or set()) - self._pids
        return there

    def _sample(self, reader: nvml.GpuReader | None) -> None:
        values: dict[str, float] = {}
        moment, monotonic = time.time_ns(), time.monotonic_ns()
        missing: dict[str, str] = {}
        for part in (self._host, *((lambda: self._of_gpu(reader),) if reader else ())):
            try:
                values.update(part())
            except Exception as error:  # one bad reading must not end the recording
                missing["sampler"] = f"{type(error).__name__}: {error}"
        with self._lock:
            now = self._recording
            count = len(now.time_ns)
            now.time_ns.append(moment)
            now.monotonic_ns.append(monotonic)
            for name in values.keys() | now.columns.keys():
                now.columns.setdefault(name, [math.nan] * count).append(values.get(name, math.nan))
            now.missing.update(missing)
            if reader:
                now.missing.update(reader.missing)
            if count + 1 >= MAX_SAMPLES:
                del now.time_ns[1::2], now.monotonic_ns[1::2]
                for values_so_far in now.columns.values():
                    del values_so_far[1::2]
                self._interval_s *= 2

    def _host(self) -> dict[str, float]:
        if not hostload.supported():
            return {}
        if time.monotonic() - self._pids_time >= TREE_REFRESH_S:
            self._pids, self._pids_time = hostload.descendants(self._root), time.monotonic()
        values = {
            "cpu_s": hostload.cpu_seconds(self._pids),
            "resident_bytes": float(hostload.resident_bytes(self._pids)),
        }
        busy = hostload.busy_seconds()
        if busy is not None:
            values["others_cpu_s"] = busy - hostload.cpu_seconds(self._pids | {os.getpid()})
        swap = hostload.swap_frac()
        if swap is not None:
            values["swap_frac"] = swap
        return values

    def _of_gpu(self, reader: nvml.GpuReader) -> dict[str, float]:
        values = reader.read()
        here = reader.processes()
        if here is None:
            reader.missing["foreign_processes"] = reader.missing["processes"]
        else:
            before = (self._here_before or set()) & here
            ours = self._pids | {self._root}
            # Ids that /proc does not know come from another namespace: most likely our own script seen by its host id.
            others = {pid for pid in here - ours if pid in before or (hostload.PROC / str(pid)).exists()}
            if others - before - self._strangers:  # perhaps a child younger than the last look
                self._pids, self._pids_time = hostload.descendants(self._root), time.monotonic()
                others -= self._pids
                self._strangers |= others
            if not self._recording.time_ns and not here:
                self._held = values.get("memory_bytes", 0.0) >= FOREIGN_MEMORY_BYTES
            values["foreign_processes"] = float(len(others) + self._held)  # when those end is not shown either
        return values

    def _write(self) -> None:
        if self._path is not None:
            with contextlib.suppress(AdvisorError):  # a full disk must not end the run
                storage.save(self._path, self.recording())


def load(path: Path) -> SampledRecording:
    """The recording that a sampler wrote.

    Raises:
        AdvisorError: the file is missing or not one.
    """
    return storage.load(path, SampledRecording)


def summarise(
    recording: SampledRecording, start_ns: int | None = None, end_ns: int | None = None
) -> dict[str, Quantity]:
    """Metrics of core.metrics over the samples taken in [start_ns, end_ns] (CLOCK_REALTIME; the whole run by default).

    A window too short to hold a sample of a quantity is told by the nearest one, and `reason` says so. Every metric this
    module knows is in the result: measured, or unavailable with the reason.
    """
    begin = -math.inf if start_ns is None else start_ns
    view = _View(recording, begin, math.inf if end_ns is None else end_ns)
    result = {name: view.reduce(column, statistics.fmean) for name, column in _MEANS.items()}
    result |= {name: view.reduce(column, statistics.median) for name, column in _MEDIANS.items()}
    for name, column in (("pcie_rx_gbps", "pcie_rx_bytes_per_s"), ("pcie_tx_gbps", "pcie_tx_bytes_per_s")):
        result[name] = view.reduce(column, lambda values: statistics.fmean(values) / 1e9)
    for name, column, constant in (
        ("power_frac", "power_w", "power_limit_w"),
        ("clock_frac", "sm_clock_mhz", "sm_clock_max_mhz"),
    ):
        result[name] = view.over(column, constant)
    for name, mask in (("throttled_frac", nvml.THROTTLED), ("power_capped_frac", nvml.POWER_CAP)):
        result[name] = view.reduce("clock_reasons", _share_with(mask))
    result["clock_drift_frac"] = view.reduce("sm_clock_mhz", _drift, at_least=DRIFT_SAMPLES)
    result["cpu_util_frac"] = view.cpu_utilisation("cpu_s")
    result["cpu_others_frac"] = view.cpu_utilisation("others_cpu_s")
    # Who had gone before the first step was timed has disturbed nothing; who came later may have disturbed the traced steps.
    since = _View(recording, begin - NEAR_NS, math.inf)
    result["gpu_shared"] = since.reduce("foreign_processes", lambda values: float(max(values) > 0))
    return result


_MEANS = {
    "gpu_busy_nvml_frac": "busy",
    "sm_active_frac": "gpm_sm",
    "sm_occupancy_frac": "gpm_occupancy",
    "tensor_active_frac": "gpm_tensor",
    "dram_active_frac": "gpm_dram",
}
_MEDIANS = {"power_w": "power_w", "gpu_temperature": "temperature_c", "host_swap_frac": "swap_frac"}


def _share_with(mask: int) -> Callable[[list[float]], float]:
    return lambda values: statistics.fmean(bool(int(value) & mask) for value in values)


def _drift(values: list[float]) -> float:
    """Relative change from the first to the last quarter."""
    quarter = len(values) // 4
    first, last = statistics.fmean(values[:quarter]), statistics.fmean(values[-quarter:])
    return (last - first) / first if first else 0.0


class _View:
    """The samples of a recording in a window."""

    def __init__(self, recording: SampledRecording, begin: float, end: float) -> None:
        self._recording, self._begin, self._end = recording, begin, end

    def reduce(self, column: str, reduction: Callable[[list[float]], float], at_least: int = 1) -> Quantity:
        known = self._known(column)
        inside = [i for i in known if self._distance(i) == 0]
        how = f"{len(inside)} samples"
        if known and not inside and at_least == 1:
            nearest = min(known, key=self._distance)
            if self._distance(nearest) <= NEAR_NS:
                inside, how = [nearest], f"one sample {self._distance(nearest) / 1e6:.0f} ms beside the short window"
        if len(inside) < at_least:
            return _missing(self._why(column, known, inside))
        values = self._recording.columns[column]
        return _measured(reduction([values[i] for i in inside]), how)

    def over(self, column: str, constant: str) -> Quantity:
        """The column's median over a constant."""
        whole = self._recording.constants.get(constant, 0.0)
        if whole <= 0:
            return _missing(self._recording.missing.get(constant) or self._why(column, [], []))
        return self.reduce(column, lambda values: statistics.median(values) / whole)

    def cpu_utilisation(self, column: str) -> Quantity:
        """CPU time gained over wall time and cores, between the window's samples or else those around it."""
        known = self._known(column)
        inside = [i for i in known if self._distance(i) == 0]
        if len(inside) < 2:
            near = [i for i in known if self._distance(i) <= NEAR_NS]
            before = [i for i in near if self._recording.time_ns[i] < self._begin]
            after = [i for i in near if self._recording.time_ns[i] > self._end]
            inside = [*before[-1:], *inside, *after[:1]]
        if len(inside) < 2:
            return _missing(self._why(column, known, inside))
        used, clock = self._recording.columns[column], self._recording.monotonic_ns
        # The sum falls when the script's processes are gone; what follows its highest value is not the script's time.
        first, last = inside[0], max(inside, key=lambda i: (used[i], i))
        seconds = (clock[last] - clock[first]) / 1e9
        if seconds <= 0:
            return _missing("the script's processes had ended")
        cores = max(1.0, self._recording.constants.get("cpu_count", 1.0))
        return _measured(max(0.0, used[last] - used[first]) / seconds / cores, f"{len(inside)} samples")

    def _known(self, column: str) -> list[int]:
        return [i for i, value in enumerate(self._recording.columns.get(column, ())) if math.isfinite(value)]

    def _distance(self, index: int) -> float:
        """How far outside the window a sample lies, ns; 0 inside."""
        moment = self._recording.time_ns[index]
        return max(self._begin - moment, moment - self._end, 0)

    def _why(self, column: str, known: list[int], inside: list[int]) -> str:
        missing = self._recording.missing
        if known:
            return f"{len(inside) or 'no'} sample{'' if len(inside) == 1 else 's'} fell into the measured window"
        if not self._recording.time_ns:
            return "nothing was sampled"
        return missing.get(column) or missing.get("gpu") or missing.get("sampler") or "not sampled"


def _measured(value: float, how: str) -> Quantity:
    return Quantity(value=value, provenance=Provenance.MEASURED, reason=how)


def _missing(why: str) -> Quantity:
    return Quantity(value=None, provenance=Provenance.UNAVAILABLE, reason=why)
