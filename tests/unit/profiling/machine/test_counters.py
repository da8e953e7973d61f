"""DramCounters over a simulated CUPTI: what is read, what is dropped, what happens when it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from emulation.cupti import FakeCupti

from advisor.core.errors import AdvisorError
from advisor.profiling.machine import counters, ownprocess


def series(count: int) -> list[tuple[int, int, float, float]]:
    return [(10**9 + 20_000 * i, 10**9 + 20_000 * (i + 1), 100.0 + i, 7.0 * i) for i in range(count)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeCupti:
    fake = FakeCupti(counters.METRICS, series(10))
    monkeypatch.setattr(counters.cupti, "load", lambda: fake)
    return fake


def test_all_samples_of_a_window_are_read(gpu: FakeCupti) -> None:
    with counters.DramCounters(0) as dram:
        dram.start()
        got = dram.stop()
    rows = list(zip(got.start_ns, got.end_ns, got.read_bytes, got.write_bytes, strict=True))
    assert rows == series(10)
    assert gpu.interval_ns == 20_000
    assert dram.note == ""
    assert gpu.calls[-2:] == ["cuptiPmSamplingDisable", "cuptiProfilerHostDeinitialize"]


def test_a_window_larger_than_one_image_is_read_in_chunks(gpu: FakeCupti) -> None:
    gpu.samples, gpu.chunk = series(2500), 1000
    dram = counters.DramCounters(0)
    dram.start()
    assert len(dram.stop().start_ns) == 2500
    assert gpu.calls.count("cuptiPmSamplingDecodeData") == 3


def test_two_windows_do_not_mix(gpu: FakeCupti) -> None:
    dram = counters.DramCounters(0)
    for count in (10, 4):
        gpu.samples = series(count)
        dram.start()
        assert len(dram.stop().start_ns) == count


def test_samples_without_a_beginning_are_dropped(gpu: FakeCupti) -> None:
    gpu.samples = [(0, 10**9, 1e18, 1e18), *series(3), (2 * 10**9, 2 * 10**9, 5.0, 5.0)]
    dram = counters.DramCounters(0)
    dram.start()
    assert dram.stop().read_bytes == [100.0, 101.0, 102.0]


def test_a_first_sample_that_spans_the_time_before_the_start_is_dropped(gpu: FakeCupti) -> None:
    gpu.samples = [(10**6, 10**9, 1e9, 1e9), *series(3)]
    dram = counters.DramCounters(0)
    dram.start()
    got = dram.stop()
    assert (got.start_ns, got.read_bytes) == ([s[0] for s in series(3)], [100.0, 101.0, 102.0])
    assert len(got.end_ns) == len(got.write_bytes) == 3


def test_a_decoder_that_makes_no_progress_ends(gpu: FakeCupti) -> None:
    gpu.chunk = 0
    dram = counters.DramCounters(0)
    dram.start()
    assert dram.stop().start_ns == []


def test_lost_samples_are_told(gpu: FakeCupti) -> None:
    gpu.overflow = 1
    dram = counters.DramCounters(0)
    dram.start()
    dram.stop()
    assert "no DRAM samples" in dram.note


def test_a_long_window_gets_a_longer_interval(gpu: FakeCupti) -> None:
    counters.DramCounters(0, window_s=10.0)
    assert gpu.interval_ns == 100_000


@pytest.mark.parametrize(
    ("function", "result", "words"),
    [
        ("cuptiPmSamplingGetCounterAvailability", 35, "administrators"),
        ("cuptiPmSamplingEnable", 7, "another profiler"),
        ("cuptiPmSamplingEnable", 26, "another profiler"),
        ("cuptiProfilerInitialize", 14, "does not fit the installed driver"),
        ("cuptiDeviceGetChipName", 43, "MIG"),
        ("cuptiPmSamplingSetConfig", 27, "not supported"),
        ("cuptiProfilerHostConfigAddMetrics", 1, "no DRAM byte counters"),
    ],
)
def test_a_refusal_is_a_reason_and_leaves_nothing_enabled(
    gpu: FakeCupti, function: str, result: int, words: str
) -> None:
    gpu.refuse[function] = result
    usable, reason = counters.available(0)
    assert not usable
    assert words in reason
    assert ("cuptiPmSamplingDisable" in gpu.calls) == (function == "cuptiPmSamplingSetConfig")
    after_host = gpu.calls.index("cuptiProfilerHostInitialize") if "cuptiProfilerHostInitialize" in gpu.calls else -1
    assert ("cuptiProfilerHostDeinitialize" in gpu.calls) == (after_host >= 0)


def test_metrics_that_need_several_passes_are_refused(gpu: FakeCupti) -> None:
    gpu.passes = lambda names: 3
    assert counters.available(0) == (
        False,
        "dram__bytes_read.sum, dram__bytes_write.sum need 3 passes on this GPU; expected 1",
    )


def test_a_fault_of_our_own_is_a_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters.cupti, "load", lambda: 1 / 0)
    usable, reason = counters.available(0)
    assert not usable
    assert "ZeroDivisionError" in reason


def test_closing_twice_and_on_a_dying_driver_is_silent(gpu: FakeCupti) -> None:
    dram = counters.DramCounters(0)
    gpu.refuse["cuptiPmSamplingDisable"] = 999
    dram.close()
    dram.close()
    assert gpu.calls.count("cuptiProfilerHostDeinitialize") == 1


def test_starting_while_refused_raises_ours(gpu: FakeCupti) -> None:
    dram = counters.DramCounters(0)
    gpu.refuse["cuptiPmSamplingStart"] = 7
    with pytest.raises(AdvisorError, match="another profiler"):
        dram.start()


def completed(returncode: int = 0, stdout: str = "", stderr: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.CompletedProcess([], returncode, stdout, stderr)


@pytest.mark.parametrize(
    ("child", "answer"),
    [
        (completed(stdout='noise\n{"available": true, "reason": ""}\n'), (True, "")),
        (completed(stdout='{"available": false, "reason": "no"}\n'), (False, "no")),
        (completed(returncode=-11), (False, "trying the hardware counters failed (signal 11)")),
        (completed(1, "", "Traceback\nboom\n"), (False, "trying the hardware counters failed (boom)")),
        (completed(3), (False, "trying the hardware counters failed (exit code 3)")),
    ],
)
def test_preflight_survives_its_child(
    monkeypatch: pytest.MonkeyPatch, child: subprocess.CompletedProcess[str], answer: tuple[bool, str]
) -> None:
    monkeypatch.setattr(ownprocess.subprocess, "run", lambda *_, **__: child)
    assert counters.preflight() == answer


def test_preflight_ends_a_hanging_child(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(words: list[str], **_: object) -> None:
        raise subprocess.TimeoutExpired(words, 60)

    monkeypatch.setattr(ownprocess.subprocess, "run", hang)
    assert counters.preflight() == (False, "trying the hardware counters took more than 60 s")


def test_check_runs_as_a_program_without_torch() -> None:
    code = "import sys, advisor.profiling.machine.counters; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.gpu
def test_counted_bytes_match_a_known_copy() -> None:
    usable, reason = counters.preflight()
    if not usable:
        pytest.skip(reason)
    words = [sys.executable, str(Path(__file__).with_name("counters_selftest.py"))]
    child = subprocess.run(words, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stdout + child.stderr
