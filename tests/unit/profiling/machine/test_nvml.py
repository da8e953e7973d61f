"""NVML's faults, each planted in a fake module (research numbers 42 to 51)."""

from __future__ import annotations

import sys
import threading
from types import ModuleType

import pytest
from fake_nvml import (
    GPU_IS_LOST,
    LIBRARY_NOT_FOUND,
    NO_PERMISSION,
    NOT_SUPPORTED,
    UNKNOWN,
    VERSION_MISMATCH,
    FakeNvml,
    Gpu,
)

from advisor.profiling.machine import nvml

A, B = "GPU-aaaa1111-0000-0000-0000-000000000000", "GPU-bbbb2222-0000-0000-0000-000000000000"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.setattr(nvml, "GPM_INTERVAL_S", 0.0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    return FakeNvml().use(monkeypatch)


def test_a_healthy_gpu(fake: FakeNvml) -> None:
    reader = nvml.GpuReader()
    assert reader.read() == {
        "busy": 0.87,
        "memory_busy": 0.33,
        "memory_bytes": 300 << 20,
        "sm_clock_mhz": 1900,
        "power_w": 650,
        "temperature_c": 61,
        "clock_reasons": 0,
        "gpm_graphics": pytest.approx(0.99),
        "gpm_sm": pytest.approx(0.80),
        "gpm_occupancy": pytest.approx(0.40),
        "gpm_tensor": pytest.approx(0.25),
        "gpm_hmma": pytest.approx(0.24),
        "gpm_dram": pytest.approx(0.55),
        "pcie_tx_bytes_per_s": 100 * 2**20,
        "pcie_rx_bytes_per_s": 200 * 2**20,
    }
    assert reader.constants == {"sm_clock_max_mhz": 1980, "power_limit_w": 700, "memory_total_bytes": 140 << 30}
    assert reader.missing == {}
    assert fake.pcie_calls == 0  # each would wait 20 ms
    reader.close()
    assert fake.open_samples == 0


@pytest.mark.parametrize(
    ("code", "words"),
    [(LIBRARY_NOT_FOUND, "not found"), (VERSION_MISMATCH, "differ in version"), (UNKNOWN, "NVML failed (code 999)")],
)
def test_nvml_that_does_not_start(fake: FakeNvml, code: int, words: str) -> None:
    fake.faults["nvmlInit"] = code
    with pytest.raises(nvml.NvmlUnavailable) as error:
        nvml.GpuReader()
    assert words in str(error.value)


def test_nvml_that_hangs(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(nvml, "INIT_TIMEOUT_S", 0.05)
    monkeypatch.setattr(fake, "nvmlInit", release.wait)
    with pytest.raises(nvml.NvmlUnavailable, match="did not return"):
        nvml.GpuReader()
    release.set()


def test_another_module_named_pynvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", ModuleType("pynvml"))
    with pytest.raises(nvml.NvmlUnavailable, match=r"is not NVIDIA's.*Rename"):
        nvml.GpuReader()


def test_no_pynvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(nvml.NvmlUnavailable, match="pip install nvidia-ml-py"):
        nvml.GpuReader()


@pytest.mark.parametrize("code", [NOT_SUPPORTED, NO_PERMISSION])
@pytest.mark.parametrize(
    ("function", "column"),
    [
        ("nvmlDeviceGetPowerUsage", "power_w"),
        ("nvmlDeviceGetClockInfo", "sm_clock_mhz"),
        ("nvmlDeviceGetTemperature", "temperature_c"),
        ("nvmlDeviceGetCurrentClocksEventReasons", "clock_reasons"),
        ("nvmlDeviceGetMemoryInfo", "memory_bytes"),
    ],
)
def test_each_quantity_fails_alone(fake: FakeNvml, function: str, column: str, code: int) -> None:
    everything = set(nvml.GpuReader().read())
    fake.faults[function] = code
    reader = nvml.GpuReader()
    assert set(reader.read()) == everything - {column}
    assert reader.missing[column] in (
        "not supported on this GPU",
        "not permitted (MIG slice, container or missing rights)",
    )


def test_a_passing_fault_does_not_end_a_quantity(fake: FakeNvml) -> None:
    reader = nvml.GpuReader()
    fake.faults["nvmlDeviceGetPowerUsage"] = 10  # timeout
    assert "power_w" not in reader.read()
    del fake.faults["nvmlDeviceGetPowerUsage"]
    assert reader.read()["power_w"] == 650


def test_gpm_before_hopper(fake: FakeNvml) -> None:
    fake.gpus[0].gpm = False
    reader = nvml.GpuReader()
    values = reader.read()
    assert not reader.gpm
    assert "gpm_sm" not in values
    assert reader.missing["gpm_dram"] == "GPM needs Hopper or newer"
    assert (values["pcie_tx_bytes_per_s"], values["pcie_rx_bytes_per_s"]) == (1e9, 2e9)


def test_gpm_refused(fake: FakeNvml) -> None:
    fake.faults["nvmlGpmSampleGet"] = NO_PERMISSION
    reader = nvml.GpuReader()
    assert "busy" in reader.read()
    assert reader.missing["gpm_tensor"].startswith("GPM: not permitted")


def test_one_gpm_metric_fails_alone(fake: FakeNvml) -> None:
    fake.gpus[0].gpm_returns = {5: NOT_SUPPORTED, 20: NOT_SUPPORTED}
    fake.gpus[0].gpm_values[10] = float("nan")
    reader = nvml.GpuReader()
    values = reader.read()
    assert "gpm_sm" in values
    assert not values.keys() & {"gpm_tensor", "gpm_dram", "pcie_tx_bytes_per_s"}
    assert reader.missing["gpm_tensor"] == "GPM: not supported on this GPU"
    assert reader.read()["pcie_tx_bytes_per_s"] == 1e9  # NVML's own, from then on


def test_gpm_is_not_read_faster_than_it_allows(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "GPM_INTERVAL_S", 60.0)
    assert "gpm_sm" not in nvml.GpuReader().read()


def test_gpm_interval_is_more_than_what_nvml_needs() -> None:
    assert nvml.GPM_INTERVAL_S > 0.1


def test_a_gpu_that_falls_off_the_bus(fake: FakeNvml) -> None:
    reader = nvml.GpuReader()
    fake.faults["nvmlDeviceGetUtilizationRates"] = GPU_IS_LOST
    reader.read()
    assert reader.read() == {}
    assert reader.missing["power_w"] == reader.missing["gpm_sm"] == "the GPU has fallen off the bus"
    reader.close()


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, A), ("1", B), ("1,0", B), (B, B), ("GPU-bbbb", B), (f" {A},{B}", A)],
)
def test_the_gpu_that_the_script_sees_first(fake: FakeNvml, visible: str | None, expected: str) -> None:
    fake.gpus = [Gpu(uuid=A), Gpu(uuid=B)]
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert nvml.select(fake, environ=environ).uuid == expected


@pytest.mark.parametrize("gpu", [B, "bbbb2222-0000-0000-0000-000000000000", "00000000:b3:00.0", "1"])
def test_a_gpu_by_name(fake: FakeNvml, gpu: str) -> None:
    fake.gpus = [Gpu(uuid=A), Gpu(uuid=B, bus="00000000:b3:00.0")]
    assert nvml.select(fake, gpu).uuid == B


def test_a_dead_neighbour_does_not_hide_the_gpu(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.gpus = [Gpu(uuid=A), Gpu(uuid=B)]

    def handle(index: int) -> Gpu:
        if index == 0:
            raise fake.NVMLError(GPU_IS_LOST)
        return fake.gpus[index]

    monkeypatch.setattr(fake, "nvmlDeviceGetHandleByIndex", handle)
    assert nvml.select(fake, B).uuid == B
    assert nvml.select(fake, "1").uuid == B
    with pytest.raises(nvml.NvmlUnavailable, match="no GPU 0; expected one of 1"):
        nvml.select(fake, "0")


@pytest.mark.parametrize("visible", ["", "-1"])
def test_hidden_gpus(fake: FakeNvml, visible: str) -> None:
    with pytest.raises(nvml.NvmlUnavailable, match="hides every GPU"):
        nvml.select(fake, environ={"CUDA_VISIBLE_DEVICES": visible})


def test_unlike_gpus_are_not_mapped_by_number(fake: FakeNvml) -> None:
    fake.gpus = [Gpu(uuid=A), Gpu(uuid=B, name="NVIDIA T400")]
    with pytest.raises(nvml.NvmlUnavailable, match="CUDA_DEVICE_ORDER=PCI_BUS_ID"):
        nvml.select(fake, environ={"CUDA_VISIBLE_DEVICES": "1"})
    order = {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert nvml.select(fake, environ=order).uuid == B


@pytest.mark.parametrize("gpu", ["9", "GPU-cccc", "MIG-dddd"])
def test_a_gpu_that_is_not_there(fake: FakeNvml, gpu: str) -> None:
    with pytest.raises(nvml.NvmlUnavailable):
        nvml.select(fake, gpu)


@pytest.mark.parametrize("gpu", ["MIG-eeee3333", "eeee3333"])
def test_a_mig_slice(fake: FakeNvml, gpu: str) -> None:
    board = fake.gpus[0]
    fake.slices = [Gpu(uuid="MIG-eeee3333", used=1 << 30, parent=board, clock=0)]
    reader = nvml.GpuReader(gpu)
    values = reader.read()
    assert reader.mig
    assert (values["memory_bytes"], values["sm_clock_mhz"]) == (1 << 30, 1900)
    assert "busy" not in values
    assert reader.missing["busy"] == "not supported on this GPU"
    assert values["gpm_sm"] == pytest.approx(0.8)
    assert reader._gpm_samples[0].instance == 7
