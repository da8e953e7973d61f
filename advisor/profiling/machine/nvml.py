"""One GPU read through NVML, each quantity on its own: what fails is missing with its reason, the rest goes on.

Sources: NVML API reference (nvmlDeviceQueries, nvmlGpmFunctions). NVML's "utilization" is the share of time in which any
kernel ran; it is called busy here, because it says nothing about how much of the GPU was used.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from advisor.core.errors import AdvisorError

INIT_TIMEOUT_S = 5.0  # nvmlInit waits without end on a driver that hangs
GPM_INTERVAL_S = 0.11  # two GPM samples must lie more than 100 ms apart (NVML reference, nvmlGpmMetricsGet)

# clocks-event reasons (nvml.h, nvmlClocksEventReasons)
LOCKED = 0x2  # application clocks setting
POWER_CAP = 0x4
THROTTLED = 0x8 | 0x20 | 0x40 | 0x80  # hardware slowdown, software thermal, hardware thermal, power brake

_GPM_PERCENT = {"gpm_graphics": 1, "gpm_sm": 2, "gpm_occupancy": 3, "gpm_tensor": 5, "gpm_hmma": 7, "gpm_dram": 10}
_GPM_MIB = {"pcie_tx_bytes_per_s": 20, "pcie_rx_bytes_per_s": 21}
_GPM = {**_GPM_PERCENT, **_GPM_MIB}

_CLOCK_SM, _TEMPERATURE_GPU, _PCIE_TX, _PCIE_RX = 1, 0, 0, 1
_NOT_SUPPORTED, _NO_PERMISSION, _LIBRARY_NOT_FOUND, _FUNCTION_NOT_FOUND = 3, 4, 12, 13
_GPU_IS_LOST, _VERSION_MISMATCH, _DRIVER_NOT_LOADED = 15, 18, 9
_LASTING = {_NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND}
_MEANING = {
    _NOT_SUPPORTED: "not supported on this GPU",
    _NO_PERMISSION: "not permitted (MIG slice, container or missing rights)",
    _LIBRARY_NOT_FOUND: "NVML library (libnvidia-ml.so.1) not found",
    _FUNCTION_NOT_FOUND: "not in this driver's NVML",
    _GPU_IS_LOST: "the GPU has fallen off the bus",
    _VERSION_MISMATCH: "NVML and the kernel driver differ in version; restart the machine after the driver update",
    _DRIVER_NOT_LOADED: "the NVIDIA driver is not loaded",
}


class NvmlUnavailable(AdvisorError):
    """NVML cannot be used here, or it does not know the GPU; the text says why."""


def load() -> Any:
    """The `pynvml` module of nvidia-ml-py, initialised.

    Raises:
        NvmlUnavailable: it is not installed, another module of that name is in the way, the library or the driver is
            missing or does not answer within five seconds.
    """
    try:
        nv = importlib.import_module("pynvml")
    except Exception as error:
        raise NvmlUnavailable(f"pynvml does not import ({error})", fix="pip install nvidia-ml-py") from None
    if not hasattr(nv, "nvmlInit") or not hasattr(nv, "NVMLError"):
        raise NvmlUnavailable(
            f"the module pynvml at {getattr(nv, '__file__', 'an unknown place')} is not NVIDIA's",
            expected="the one of nvidia-ml-py",
            fix="Rename or remove it.",
        )
    outcome: list[BaseException | None] = []

    def initialise() -> None:
        try:
            nv.nvmlInit()
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=initialise, name="advisor-nvml-init", daemon=True)
    thread.start()
    thread.join(INIT_TIMEOUT_S)
    if not outcome:
        raise NvmlUnavailable(f"nvmlInit did not return within {INIT_TIMEOUT_S:.0f} s", fix="Check the driver.")
    if outcome[0] is not None:
        raise NvmlUnavailable(reason(outcome[0]))
    return nv


def reason(error: BaseException) -> str:
    """NVML's error in plain words."""
    return _MEANING.get(getattr(error, "value", -1), f"NVML failed ({error})")


def select(nv: Any, gpu: str | None = None, environ: Mapping[str, str] = os.environ) -> Any:
    """NVML's handle of the GPU that a process with `environ` sees first, or of `gpu`.

    `gpu` is a UUID as NVML or torch writes it ("GPU-…", "MIG-…", or bare), a beginning of one, a PCI bus id or an index
    in NVML's order. CUDA's own numbers are taken for NVML's only where the two orders must agree.

    Raises:
        NvmlUnavailable: no GPU is visible, or which one is meant cannot be told.
    """
    try:
        handles = _handles(nv)
        if gpu is None:
            first = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
            if first in ("", "-1", "NoDevFiles"):
                raise NvmlUnavailable("CUDA_VISIBLE_DEVICES hides every GPU")
            if first.isdecimal():
                _require_same_order(nv, handles, environ)
            gpu = first
        if gpu.isdecimal():
            if int(gpu) not in handles:
                raise NvmlUnavailable(f"there is no GPU {gpu}", expected=f"one of {', '.join(map(str, handles))}")
            return handles[int(gpu)]
        if gpu.upper().startswith("MIG-"):
            return nv.nvmlDeviceGetHandleByUUID(gpu)
        if gpu.count(":") >= 1:
            return nv.nvmlDeviceGetHandleByPciBusId(gpu)
        matches = [
            h for h in handles.values() if _text(nv.nvmlDeviceGetUUID(h)).removeprefix("GPU-").startswith(_bare(gpu))
        ]
    except nv.NVMLError as error:
        raise NvmlUnavailable(reason(error)) from None
    if len(matches) == 1:
        return matches[0]
    try:  # torch writes the UUID of a MIG slice without its prefix
        return nv.nvmlDeviceGetHandleByUUID(f"MIG-{_bare(gpu)}")
    except nv.NVMLError:
        raise NvmlUnavailable(f"NVML knows {len(matches) or 'no'} GPU with UUID {gpu}") from None


def _handles(nv: Any) -> dict[int, Any]:
    """Handles by NVML index; a GPU that does not answer is left out, so that it cannot hide the others."""
    found, failure = {}, "NVML sees no GPU"
    for index in range(nv.nvmlDeviceGetCount()):
        try:
            found[index] = nv.nvmlDeviceGetHandleByIndex(index)
        except nv.NVMLError as error:
            failure = reason(error)
    if not found:
        raise NvmlUnavailable(failure)
    return found


def _require_same_order(nv: Any, handles: dict[int, Any], environ: Mapping[str, str]) -> None:
    """CUDA numbers GPUs by speed unless told otherwise, NVML by PCI bus: they agree when all GPUs are alike."""
    alike = len({nv.nvmlDeviceGetName(handle) for handle in handles.values()}) <= 1
    if environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and not alike:
        raise NvmlUnavailable(
            "the GPUs differ, so CUDA's numbers cannot be mapped to NVML's", fix="Set CUDA_DEVICE_ORDER=PCI_BUS_ID."
        )


class GpuReader:
    """Readings of one GPU by column name.

    Columns: busy, memory_busy (0 to 1), memory_bytes, sm_clock_mhz, power_w, temperature_c, clock_reasons (bit mask),
    pcie_rx_bytes_per_s, pcie_tx_bytes_per_s; with GPM also gpm_graphics, gpm_sm, gpm_occupancy, gpm_tensor, gpm_hmma,
    gpm_dram (0 to 1, since the previous GPM sample).

    `constants` holds sm_clock_max_mhz, power_limit_w and memory_total_bytes, as far as known; `missing` the reason for
    each column or constant that has failed.
    """

    def __init__(self, gpu: str | None = None) -> None:
        """Raises NvmlUnavailable when there is no NVML or no such GPU."""
        self._nv = nv = load()
        self.missing: dict[str, str] = {}
        self.constants: dict[str, float] = {}
        self._handle = select(nv, gpu)
        self._board, self._instance = self._handle, None
        self._resolve_mig()
        board, handle = self._board, self._handle
        self._fields: dict[str, Callable[[], float]] = {
            "busy": lambda: nv.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_busy": lambda: nv.nvmlDeviceGetUtilizationRates(handle).memory / 100,
            "memory_bytes": self._memory_used,
            "sm_clock_mhz": lambda: nv.nvmlDeviceGetClockInfo(board, _CLOCK_SM),
            "power_w": lambda: nv.nvmlDeviceGetPowerUsage(board) / 1e3,
            "temperature_c": lambda: nv.nvmlDeviceGetTemperature(board, _TEMPERATURE_GPU),
            "clock_reasons": self._clock_reasons,
        }
        # Each of these waits 20 ms inside NVML, so they are read only where GPM does not give them.
        self._pcie: dict[str, Callable[[], float]] = {
            "pcie_rx_bytes_per_s": lambda: nv.nvmlDeviceGetPcieThroughput(board, _PCIE_RX) * 1e3,
            "pcie_tx_bytes_per_s": lambda: nv.nvmlDeviceGetPcieThroughput(board, _PCIE_TX) * 1e3,
        }
        for name, read in (
            ("sm_clock_max_mhz", lambda: nv.nvmlDeviceGetMaxClockInfo(board, _CLOCK_SM)),
            ("power_limit_w", lambda: nv.nvmlDeviceGetEnforcedPowerLimit(board) / 1e3),
            ("memory_total_bytes", lambda: nv.nvmlDeviceGetMemoryInfo(handle).total),
        ):
            self._read_into(self.constants, name, read)
        self._gpm_samples: list[Any] = []
        self._gpm_time = 0.0
        self._open_gpm()
        if not self._gpm_samples:
            self._fields.update(self._pcie)

    def identity(self) -> dict[str, str]:
        """name, uuid and driver, as far as NVML tells them."""
        nv = self._nv
        found: dict[str, str] = {}
        calls: dict[str, Callable[[], str | bytes]] = {
            "name": lambda: nv.nvmlDeviceGetName(self._handle),
            "uuid": lambda: nv.nvmlDeviceGetUUID(self._handle),
            "driver": lambda: nv.nvmlSystemGetDriverVersion(),
        }
        for key, call in calls.items():
            try:
                found[key] = _text(call())
            except nv.NVMLError as error:
                self.missing[key] = reason(error)
        return found

    def driver_cuda(self) -> tuple[int, int] | None:
        """The newest CUDA version that the installed driver runs."""
        try:
            version = int(self._nv.nvmlSystemGetCudaDriverVersion_v2())
        except (AttributeError, self._nv.NVMLError):
            return None
        return version // 1000, version % 1000 // 10

    @property
    def mig(self) -> bool:
        """Whether the GPU is a slice of a larger one."""
        return self._instance is not None

    @property
    def gpm(self) -> bool:
        """Whether SM, tensor and DRAM activity can be read."""
        return bool(self._gpm_samples)

    def read(self, only: frozenset[str] | None = None) -> dict[str, float]:
        """One reading of every column that works, or of those in `only`; a GPM column only when its interval has passed."""
        values: dict[str, float] = {}
        for name, read in list(self._fields.items()):
            if only is None or name in only:
                self._read_into(values, name, read)
        if only is None and self._gpm_samples and time.monotonic() - self._gpm_time >= GPM_INTERVAL_S:
            self._read_gpm(values)
        return values

    def processes(self) -> set[int] | None:
        """Ids of processes with compute work on the GPU, as the driver numbers them; None when it does not tell."""
        try:
            return {int(p.pid) for p in self._nv.nvmlDeviceGetComputeRunningProcesses(self._handle)}
        except self._nv.NVMLError as error:
            self.missing["processes"] = reason(error)
            return None

    def elsewhere(self, pids: set[int]) -> str | None:
        """UUID of another GPU on which one of `pids` works, when none of them works on this one; None otherwise."""
        nv = self._nv
        if self.mig or (self.processes() or set()) & pids:
            return None
        for handle in _handles(nv).values():
            with contextlib.suppress(nv.NVMLError):
                if pids & {int(p.pid) for p in nv.nvmlDeviceGetComputeRunningProcesses(handle)}:
                    return _text(nv.nvmlDeviceGetUUID(handle))
        return None

    def close(self) -> None:
        """NVML is released. Never raises."""
        try:
            for sample in self._gpm_samples:
                self._nv.nvmlGpmSampleFree(sample)
            self._nv.nvmlShutdown()
        except self._nv.NVMLError:
            pass  # the driver may be gone
        self._gpm_samples, self._fields = [], {}

    def _read_into(self, values: dict[str, float], name: str, read: Callable[[], float]) -> None:
        try:
            values[name] = float(read())
        except self._nv.NVMLError as error:
            self._failed(name, error)
        except (AttributeError, TypeError, ValueError) as error:  # an older pynvml without the call
            self.missing[name] = f"NVML failed ({error})"
            self._fields.pop(name, None)

    def _failed(self, name: str, error: BaseException) -> None:
        self.missing[name] = reason(error)
        code = getattr(error, "value", None)
        if code == _GPU_IS_LOST:
            self.missing.update(dict.fromkeys((*self._fields, *(_GPM if self._gpm_samples else ())), reason(error)))
            self._fields, self._gpm_samples = {}, []
        elif code in _LASTING:
            self._fields.pop(name, None)

    def _memory_used(self) -> float:
        nv = self._nv
        try:  # version 2 leaves out what the driver itself reserves
            return float(nv.nvmlDeviceGetMemoryInfo(self._handle, version=nv.nvmlMemory_v2).used)
        except (AttributeError, TypeError, nv.NVMLError):
            return float(nv.nvmlDeviceGetMemoryInfo(self._handle).used)

    def _clock_reasons(self) -> float:
        nv = self._nv
        call = getattr(nv, "nvmlDeviceGetCurrentClocksEventReasons", None) or (
            nv.nvmlDeviceGetCurrentClocksThrottleReasons  # its name before driver 535
        )
        return float(call(self._board))

    def _resolve_mig(self) -> None:
        nv = self._nv
        try:
            if nv.nvmlDeviceIsMigDeviceHandle(self._handle):
                self._board = nv.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self._handle)
                self._instance = nv.nvmlDeviceGetGpuInstanceId(self._handle)
        except (AttributeError, nv.NVMLError):
            pass  # a GPU or driver without MIG

    def _sample_gpm(self, sample: Any) -> None:
        if self._instance is None:
            self._nv.nvmlGpmSampleGet(self._board, sample)
        else:
            self._nv.nvmlGpmMigSampleGet(self._board, self._instance, sample)
        self._gpm_time = time.monotonic()

    def _open_gpm(self) -> None:
        nv = self._nv
        try:
            if not nv.nvmlGpmQueryDeviceSupport(self._board).isSupportedDevice:
                self.missing.update(dict.fromkeys(_GPM_PERCENT, "GPM needs Hopper or newer"))
                return
            samples = [nv.nvmlGpmSampleAlloc(), nv.nvmlGpmSampleAlloc()]
            self._sample_gpm(samples[0])
            self._gpm_samples = samples
        except nv.NVMLError as error:
            self.missing.update(dict.fromkeys(_GPM_PERCENT, f"GPM: {reason(error)}"))
        except AttributeError:
            self.missing.update(dict.fromkeys(_GPM_PERCENT, "this pynvml has no GPM; upgrade nvidia-ml-py"))

    def _read_gpm(self, values: dict[str, float]) -> None:
        nv, (before, after) = self._nv, self._gpm_samples
        try:
            self._sample_gpm(after)
            query = nv.c_nvmlGpmMetricsGet_t()
            query.version = nv.NVML_GPM_METRICS_GET_VERSION
            query.numMetrics, query.sample1, query.sample2 = len(_GPM), before, after
            for slot, identifier in enumerate(_GPM.values()):
                query.metrics[slot].metricId = identifier
            nv.nvmlGpmMetricsGet(query)
        except nv.NVMLError as error:
            for name in _GPM:
                self._failed(name, error)
            if getattr(error, "value", None) in _LASTING:
                self._gpm_samples = []
                self._fields.update(self._pcie)
            return
        self._gpm_samples = [after, before]
        for slot, name in enumerate(_GPM):
            metric = query.metrics[slot]
            if metric.nvmlReturn != 0:
                self.missing[name] = f"GPM: {_MEANING.get(metric.nvmlReturn, f'NVML error {metric.nvmlReturn}')}"
                if name in self._pcie:
                    self._fields.setdefault(name, self._pcie.pop(name))
            elif metric.value == metric.value:  # NaN when nothing was counted
                values[name] = float(metric.value) * (2**20 if name in _GPM_MIB else 0.01)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-").lower()
