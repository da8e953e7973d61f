"""What disturbs a block, planted in a fake driver and a fake /proc."""

import pytest
import torch
from fake_nvml import GPU_IS_LOST, FakeNvml

from advisor.profiling.machine import nvml
from advisor.trials.live import disturbance
from advisor.trials.live.disturbance import LEAST_BLOCKS, MachineWatch


@pytest.fixture
def gpu(monkeypatch):
    """One GPU on which this process trains: NVML's reader of it, and its fake driver."""
    fake = FakeNvml().use(monkeypatch)
    monkeypatch.setattr(disturbance, "open_reader", lambda device: nvml.GpuReader(fake.gpus[0].uuid))
    fake.gpus[0].pids = [1]
    return fake


def watch(blocks=LEAST_BLOCKS):
    found = MachineWatch(torch.device("cuda"))
    for _ in range(blocks):
        for on in (False, True):
            found.begin()
            assert found.end(on) == ""
    return found


def test_a_quiet_gpu_disturbs_nothing(gpu):
    quiet = watch()
    gpu.gpus[0].clock -= 30  # two steps of the clock
    gpu.gpus[0].reasons = nvml.POWER_CAP  # as under any load
    assert quiet.end(True) == ""


@pytest.mark.parametrize("bit", [0x8, 0x20, 0x40, 0x80])
def test_a_throttled_clock(gpu, bit):
    gpu_watch = watch(0)
    gpu.gpus[0].reasons = bit
    assert "throttled" in gpu_watch.end(False)


def test_another_process(gpu):
    gpu_watch = watch(0)
    gpu.gpus[0].pids = [1, 2]
    assert "another process" in gpu_watch.end(False)
    gpu.gpus[0].pids = [1]
    assert gpu_watch.end(False) == ""


def test_a_clock_unlike_the_arms_own(gpu):
    gpu_watch = watch()
    gpu.gpus[0].clock = 1500
    assert "clock" in gpu_watch.end(True)
    gpu_watch.renew()  # another change: its arms may rightly run at another clock
    assert gpu_watch.end(True) == ""


def test_the_power_cap_is_the_trainings_own(gpu):
    """Its readings neither disturb nor become what is usual: a block between them at full clock is none either."""
    gpu_watch = MachineWatch(torch.device("cuda"))
    full = gpu.gpus[0].clock
    for clock, reasons in [(0.8 * full, nvml.POWER_CAP), (full, 0), (0.9 * full, nvml.POWER_CAP)] * LEAST_BLOCKS:
        gpu.gpus[0].clock, gpu.gpus[0].reasons = int(clock), reasons
        assert gpu_watch.end(True) == ""
    gpu.gpus[0].clock, gpu.gpus[0].reasons = int(0.8 * full), 0
    assert "clock" in gpu_watch.end(True)


def test_arms_may_differ(gpu):
    gpu_watch = MachineWatch(torch.device("cuda"))
    for _ in range(2 * LEAST_BLOCKS):
        for on, clock in ((False, 1980), (True, 1700)):
            gpu.gpus[0].clock = clock
            assert gpu_watch.end(on) == ""


def test_a_driver_that_fails_is_not_asked_again(gpu, monkeypatch):
    gpu_watch = watch()
    gpu.faults["nvmlDeviceGetClockInfo"] = GPU_IS_LOST
    assert gpu_watch.end(True) == ""

    def fail(*_):
        raise RuntimeError("planted")

    monkeypatch.setattr(nvml.GpuReader, "read", fail)
    other = watch(0)
    assert other.end(True) == ""
    assert other._gpu is None


def test_no_nvml_means_no_watch():
    assert disturbance.open_reader(torch.device("cpu")) is None


def test_threads_that_wait_for_a_core(monkeypatch, tmp_path):
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
    clock, waited = [0.0], [0.0]

    def block(found, on, seconds, wait):
        found.begin()
        clock[0] += seconds
        waited[0] += wait
        for name in ("1", "2"):
            (tmp_path / name / "schedstat").write_text(f"0 {int(waited[0] * 5e8)} 1\n")
        return found.end(on)

    for name in ("1", "2"):
        (tmp_path / name / "schedstat").write_text("0 0 1\n")
    monkeypatch.setattr(disturbance.time, "perf_counter", lambda: clock[0])
    found = MachineWatch(torch.device("cpu"))
    found._threads = tmp_path
    for _ in range(LEAST_BLOCKS):
        assert block(found, True, 1.0, 0.2) == ""  # this machine is always shared a little
    assert block(found, True, 1.0, 0.4) == ""
    assert "other processes" in block(found, True, 1.0, 0.9)
    assert block(found, False, 1.0, 0.9) == ""  # the other arm has no blocks to compare with
    assert block(found, True, 1.0, 0.2) == ""
