"""A stand-in for nvidia-ml-py with GPUs that tests describe and faults that tests plant."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

NOT_SUPPORTED, NO_PERMISSION, LIBRARY_NOT_FOUND, GPU_IS_LOST, VERSION_MISMATCH, UNKNOWN = 3, 4, 12, 15, 18, 999


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        self.value = value
        super().__init__(f"code {value}")


@dataclass
class Gpu:
    """One GPU, or a MIG slice of `parent`."""

    uuid: str = "GPU-aaaa1111-0000-0000-0000-000000000000"
    name: str = "NVIDIA H200"
    bus: str = "00000000:65:00.0"
    busy: int = 87
    used: int = 300 << 20
    total: int = 140 << 30
    clock: int = 1900
    max_clock: int = 1980
    power_mw: int = 650_000
    limit_mw: int = 700_000
    temperature: int = 61
    reasons: int = 0
    gpm: bool = True
    gpm_values: dict[int, float] = field(
        default_factory=lambda: {1: 99.0, 2: 80.0, 3: 40.0, 5: 25.0, 7: 24.0, 10: 55.0, 20: 100.0, 21: 200.0}
    )
    gpm_returns: dict[int, int] = field(default_factory=dict)
    pids: list[int] = field(default_factory=list)
    parent: Gpu | None = None


class FakeNvml(ModuleType):
    """Install with `use`. `faults` maps a function's name to the NVML error it raises from now on."""

    NVMLError = NVMLError
    NVML_GPM_METRICS_GET_VERSION = 1
    nvmlMemory_v2 = 2

    def __init__(self, *gpus: Gpu) -> None:
        super().__init__("pynvml")
        self.gpus = list(gpus) or [Gpu()]
        self.slices: list[Gpu] = []
        self.faults: dict[str, int] = {}
        self.gpm_interval_violations = 0
        self.open_samples = 0
        self.pcie_calls = 0

    def use(self, monkeypatch: Any) -> FakeNvml:
        monkeypatch.setitem(sys.modules, "pynvml", self)
        return self

    def __getattribute__(self, name: str) -> Any:
        value = super().__getattribute__(name)
        if name.startswith("nvml") and callable(value) and name in super().__getattribute__("faults"):
            code = super().__getattribute__("faults")[name]

            def fail(*_: Any, **__: Any) -> None:
                raise NVMLError(code)

            return fail
        return value

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.65.06"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13000

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:
        return self.gpus[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Gpu:
        for gpu in (*self.gpus, *self.slices):
            if gpu.uuid == uuid:
                return gpu
        raise NVMLError(6)

    def nvmlDeviceGetHandleByPciBusId(self, bus: str) -> Gpu:
        return next(gpu for gpu in self.gpus if gpu.bus == bus)

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:
        return gpu.name

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:
        return gpu.uuid

    def nvmlDeviceIsMigDeviceHandle(self, gpu: Gpu) -> int:
        return int(gpu.parent is not None)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, gpu: Gpu) -> Gpu | None:
        return gpu.parent

    def nvmlDeviceGetGpuInstanceId(self, gpu: Gpu) -> int:
        return 7

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> SimpleNamespace:
        if gpu.parent:
            raise NVMLError(NOT_SUPPORTED)
        return SimpleNamespace(gpu=gpu.busy, memory=33)

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu, version: int | None = None) -> SimpleNamespace:
        return SimpleNamespace(used=gpu.used, total=gpu.total)

    def nvmlDeviceGetClockInfo(self, gpu: Gpu, kind: int) -> int:
        assert kind == 1
        return gpu.clock

    def nvmlDeviceGetMaxClockInfo(self, gpu: Gpu, kind: int) -> int:
        assert kind == 1
        return gpu.max_clock

    def nvmlDeviceGetPowerUsage(self, gpu: Gpu) -> int:
        return gpu.power_mw

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: Gpu) -> int:
        return gpu.limit_mw

    def nvmlDeviceGetTemperature(self, gpu: Gpu, kind: int) -> int:
        return gpu.temperature

    def nvmlDeviceGetCurrentClocksEventReasons(self, gpu: Gpu) -> int:
        return gpu.reasons

    def nvmlDeviceGetPcieThroughput(self, gpu: Gpu, kind: int) -> int:
        self.pcie_calls += 1
        return (1_000_000, 2_000_000)[kind]  # KB/s sent, received

    def nvmlDeviceGetComputeRunningProcesses(self, gpu: Gpu) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in gpu.pids]

    def nvmlGpmQueryDeviceSupport(self, gpu: Gpu) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=int(gpu.gpm))

    def nvmlGpmSampleAlloc(self) -> SimpleNamespace:
        self.open_samples += 1
        return SimpleNamespace(gpu=None, instance=None)

    def nvmlGpmSampleFree(self, sample: SimpleNamespace) -> None:
        self.open_samples -= 1

    def nvmlGpmSampleGet(self, gpu: Gpu, sample: SimpleNamespace) -> None:
        sample.gpu, sample.instance = gpu, None

    def nvmlGpmMigSampleGet(self, gpu: Gpu, instance: int, sample: SimpleNamespace) -> None:
        sample.gpu, sample.instance = gpu, instance

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, value=0.0, nvmlReturn=0) for _ in range(16)])

    def nvmlGpmMetricsGet(self, query: SimpleNamespace) -> None:
        for metric in query.metrics[: query.numMetrics]:
            metric.nvmlReturn = query.sample1.gpu.gpm_returns.get(metric.metricId, 0)
            metric.value = query.sample1.gpu.gpm_values[metric.metricId]
