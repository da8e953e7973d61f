"""The supervisor's sampler: what it records, whose processes are foreign, what remains after a kill, how windows reduce."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from clocks import until
from fake_nvml import GPU_IS_LOST, FakeNvml, Gpu

from advisor.core.metrics import BY_NAME
from advisor.core.provenance import Provenance
from advisor.profiling.beside import sampler
from advisor.profiling.beside.sampler import SampledRecording, Sampler, summarise
from advisor.profiling.machine import hostload, nvml

linux = pytest.mark.skipif(not hostload.supported(), reason="needs /proc")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    monkeypatch.setattr(nvml, "GPM_INTERVAL_S", 0.0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return FakeNvml().use(monkeypatch)


def record(**options: object) -> SampledRecording:
    """A recording of at least five samples."""
    taken = Sampler(0.01, **options)
    taken.start()
    samples(taken, 5)
    return taken.stop()


def samples(taken: Sampler, more: int) -> None:
    """Waits until so many have been added."""
    count = len(taken.recording().time_ns) + more
    until(lambda: len(taken.recording().time_ns) >= count)


@pytest.fixture
def busy_child() -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    yield child
    child.kill()
    child.wait()


def test_every_metric_is_in_the_vocabulary_and_measured(fake: FakeNvml) -> None:
    summary = summarise(record())
    assert set(summary) <= set(BY_NAME)
    unmeasured = {name: q.reason for name, q in summary.items() if q.provenance is not Provenance.MEASURED}
    assert set(unmeasured) <= {"clock_drift_frac"}  # needs more samples
    assert summary["gpu_busy_nvml_frac"].value == pytest.approx(0.87)
    assert summary["power_frac"].value == pytest.approx(650 / 700)
    assert summary["clock_frac"].value == pytest.approx(1900 / 1980)
    assert summary["sm_active_frac"].value == pytest.approx(0.8)
    assert summary["pcie_rx_gbps"].value == pytest.approx(200 * 2**20 / 1e9)
    assert summary["gpu_shared"].value == 0


def test_without_nvml_the_host_is_still_sampled(fake: FakeNvml) -> None:
    fake.faults["nvmlInit"] = 12
    summary = summarise(record())
    assert summary["power_w"].value is None
    assert summary["power_w"].provenance is Provenance.UNAVAILABLE
    assert "not found" in summary["power_w"].reason
    assert summary["power_frac"].reason == summary["power_w"].reason
    if hostload.supported():
        assert summary["cpu_util_frac"].value is not None


def test_a_gpu_lost_in_mid_run_keeps_what_was_read_before(fake: FakeNvml) -> None:
    taken = Sampler(0.01)
    taken.start()
    samples(taken, 3)
    fake.faults["nvmlDeviceGetUtilizationRates"] = GPU_IS_LOST
    samples(taken, 3)
    recording = taken.stop()
    assert recording.columns["power_w"][0] == 650
    assert math.isnan(recording.columns["power_w"][-1])
    assert recording.missing["power_w"] == "the GPU has fallen off the bus"
    assert summarise(recording)["power_w"].value == 650
    late = summarise(recording, recording.time_ns[-1] + sampler.NEAR_NS)
    assert late["power_w"].value is None


@linux
def test_our_own_children_are_not_foreign(fake: FakeNvml, busy_child: subprocess.Popen[bytes]) -> None:
    fake.gpus[0].pids = [os.getpid(), busy_child.pid]
    # A child that was there before sampling began is looked up in the process tree, not taken for a stranger.
    assert summarise(record())["gpu_shared"].value == 0


@linux
def test_a_stranger_on_the_gpu_is_seen(fake: FakeNvml) -> None:
    fake.gpus[0].pids = [os.getppid()]
    assert summarise(record())["gpu_shared"].value == 1


@linux
def test_a_process_of_another_namespace_is_foreign_only_if_it_was_there_first(fake: FakeNvml) -> None:
    unknown = 2**22 + 1  # above the kernel's largest process id
    taken = Sampler(0.01)
    taken.start()
    samples(taken, 1)
    fake.gpus[0].pids = [unknown]
    samples(taken, 2)
    assert summarise(taken.stop())["gpu_shared"].value == 0
    assert summarise(record())["gpu_shared"].value == 1


@linux
def test_a_script_that_chooses_its_gpu_itself_is_followed(
    fake: FakeNvml, monkeypatch: pytest.MonkeyPatch, busy_child: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setattr(sampler, "TREE_REFRESH_S", 0.0)
    fake.gpus[0].busy = 0
    fake.gpus.append(Gpu(uuid="GPU-bbbb2222", busy=90, pids=[busy_child.pid]))
    summary = summarise(record())
    assert summary["gpu_busy_nvml_frac"].value == pytest.approx(0.9)
    assert summary["gpu_shared"].value == 0


def test_memory_held_by_processes_that_nvml_does_not_list(fake: FakeNvml) -> None:
    fake.gpus[0].used = 20 << 30
    recording = record()
    assert summarise(recording)["gpu_shared"].value == 1
    assert all(recording.columns["foreign_processes"])  # nobody sees them end


def test_processes_that_cannot_be_listed_leave_sharing_unknown(fake: FakeNvml) -> None:
    fake.faults["nvmlDeviceGetComputeRunningProcesses"] = 4
    shared = summarise(record())["gpu_shared"]
    assert shared.value is None
    assert "not permitted" in shared.reason


@linux
def test_cpu_time_of_the_tree(busy_child: subprocess.Popen[bytes]) -> None:
    taken = Sampler(0.05)
    taken.start()
    until(lambda: len(set(taken.recording().columns.get("cpu_s", ()))) > 1)  # the child has had a tick of the kernel's
    used = summarise(taken.stop())["cpu_util_frac"].value
    assert used is not None
    assert used > 0


@linux
def test_cpu_time_does_not_fall_when_the_script_ends(busy_child: subprocess.Popen[bytes]) -> None:
    recording = SampledRecording(
        time_ns=[0, 10**9, 2 * 10**9, 3 * 10**9],
        monotonic_ns=[0, 10**9, 2 * 10**9, 3 * 10**9],
        columns={"cpu_s": [5.0, 6.0, 7.0, 0.0]},
        constants={"cpu_count": 2.0},
    )
    assert summarise(recording)["cpu_util_frac"].value == pytest.approx(0.5)


def test_the_file_is_complete_after_stop(fake: FakeNvml, tmp_path: Path) -> None:
    path = tmp_path / "samples.json"
    recording = record(path=path)
    assert sampler.load(path).time_ns == recording.time_ns
    assert json.loads(path.read_text())["schema_version"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["samples.json"]


def test_a_killed_supervisor_leaves_a_file(tmp_path: Path) -> None:
    path = tmp_path / "samples.json"
    code = (
        "import sys, time; from pathlib import Path; from advisor.profiling.beside import sampler;"
        "sampler.FLUSH_S = 0.05; sampler.Sampler(0.01, path=Path(sys.argv[1])).start(); time.sleep(10**6)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(path)])
    until(path.exists)
    child.kill()
    child.wait()
    assert sampler.load(path).time_ns


def test_an_unwritable_folder_does_not_end_the_run(fake: FakeNvml, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert len(record(path=tmp_path / "file" / "samples.json").time_ns) >= 5


def test_a_reading_that_raises_does_not_end_the_recording(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostload, "cpu_seconds", lambda pids: 1 / 0)
    recording = record()
    assert "ZeroDivisionError" in recording.missing["sampler"]
    assert summarise(recording)["power_w"].value == 650


def test_a_driver_that_hangs_does_not_hold_up_stop(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "STOP_TIMEOUT_S", 0.1)
    hangs, released = threading.Event(), threading.Event()

    def hang(gpu: object) -> int:
        hangs.set()
        released.wait()
        return 0

    monkeypatch.setattr(fake, "nvmlDeviceGetPowerUsage", hang)
    taken = Sampler(0.01)
    taken.start()
    try:
        hangs.wait()
        taken.stop()  # returns while the driver still hangs
        assert any(thread.name == "advisor-sampler" for thread in threading.enumerate())
    finally:
        released.set()


def test_a_long_recording_is_thinned(fake: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "MAX_SAMPLES", 4)
    taken = Sampler(0.01)
    taken.start()
    until(lambda: taken._interval_s > 0.03)  # it has thinned them twice
    recording = taken.stop()
    assert len(recording.time_ns) <= 4
    assert {len(values) for values in recording.columns.values()} == {len(recording.time_ns)}


def made(**columns: list[float]) -> SampledRecording:
    count = len(next(iter(columns.values())))
    times = [i * 10**8 for i in range(count)]
    constants = {"power_limit_w": 700.0, "sm_clock_max_mhz": 2000.0}
    return SampledRecording(time_ns=times, monotonic_ns=list(times), columns=columns, constants=constants)


def test_only_samples_in_the_window_count() -> None:
    recording = made(busy=[0.0, 0.2, 0.4, 1.0])
    assert summarise(recording, 10**8, 2 * 10**8)["gpu_busy_nvml_frac"].value == pytest.approx(0.3)
    outside = summarise(recording, 10**12)["gpu_busy_nvml_frac"]
    assert outside.value is None
    assert outside.reason == "no samples fell into the measured window"


@pytest.mark.parametrize(("seen", "shared"), [([1, 1, 0, 0, 0, 0, 0, 0, 0, 0], 0), ([0, 0, 0, 0, 0, 0, 0, 0, 0, 1], 1)])
def test_who_left_the_gpu_before_the_steps_were_timed_shares_nothing(seen: list[float], shared: int) -> None:
    recording = made(foreign_processes=[float(value) for value in seen])
    assert summarise(recording, 6 * 10**8, 7 * 10**8)["gpu_shared"].value == shared
    assert summarise(recording)["gpu_shared"].value == 1  # no steps were timed: the whole run counts


def test_a_window_between_two_samples_is_told_by_the_nearest() -> None:
    recording = made(busy=[0.0, 0.2, 0.9, 1.0], gpm_sm=[0.1, 0.2, math.nan, 0.4], cpu_s=[1.0, 1.1, 1.2, 1.2])
    summary = summarise(recording, 17 * 10**7, 19 * 10**7)
    assert summary["gpu_busy_nvml_frac"].value == 0.9
    assert summary["gpu_busy_nvml_frac"].reason == "one sample 10 ms beside the short window"
    assert summary["sm_active_frac"].value == 0.2  # the nearest that has a value
    assert summary["cpu_util_frac"].value == pytest.approx(1.0)  # over the samples around the window
    assert summary["clock_drift_frac"].value is None


def test_throttling_and_power_cap_are_told_apart() -> None:
    summary = summarise(made(clock_reasons=[0x0, 0x4, 0x4, 0x20, 0x1, 0x40, 0x80, 0x8]))
    assert summary["throttled_frac"].value == pytest.approx(4 / 8)
    assert summary["power_capped_frac"].value == pytest.approx(2 / 8)


def test_clock_drift_compares_quarters() -> None:
    falling = summarise(made(sm_clock_mhz=[2000.0, 2000.0, 1900.0, 1900.0, 1900.0, 1900.0, 1500.0, 1500.0]))
    assert falling["clock_drift_frac"].value == pytest.approx(-0.25)
    short = summarise(made(sm_clock_mhz=[2000.0] * 7))["clock_drift_frac"]
    assert short.value is None
    assert short.reason == "7 samples fell into the measured window"


def test_an_empty_recording_says_so() -> None:
    assert summarise(SampledRecording())["power_w"].reason == "nothing was sampled"


def test_what_others_take_of_the_cores_is_told_beside_the_scripts_own() -> None:
    recording = SampledRecording(
        time_ns=[0, 10**9, 2 * 10**9],
        monotonic_ns=[0, 10**9, 2 * 10**9],
        columns={"cpu_s": [5.0, 6.0, 7.0], "others_cpu_s": [90.0, 90.5, 91.0]},
        constants={"cpu_count": 2.0},
    )
    summary = summarise(recording)
    assert summary["cpu_util_frac"].value == pytest.approx(0.5)
    assert summary["cpu_others_frac"].value == pytest.approx(0.25)


def test_cores_and_their_work_are_read_for_the_processors_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stat").write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\n"
        "cpu0 100 20 30 5000 7 1 2 3 0 0\n"  # busy: 156 ticks
        "cpu1 900 0 0 0 0 0 0 0 0 0\n"
        "cpu2 10 0 10 0 0 0 0 24 0 0\n"  # 44
        "intr 5\n"
    )
    for cpu, siblings in ((0, "0,2"), (2, "0,2"), (4, "4")):
        (tmp_path / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (tmp_path / f"cpu{cpu}" / "topology" / "thread_siblings_list").write_text(siblings + "\n")
    monkeypatch.setattr(hostload, "PROC", tmp_path)
    monkeypatch.setattr(hostload, "SYS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2}, raising=False)
    monkeypatch.setattr(hostload, "cpu_count", lambda: 2)
    assert hostload.busy_seconds() == pytest.approx(200 / os.sysconf("SC_CLK_TCK"))
    assert hostload.core_count() == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 4}, raising=False)
    assert hostload.core_count() == 2
    assert hostload.busy_seconds() is None  # a quota of two of these three
