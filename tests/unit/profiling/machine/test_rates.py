"""A machine's rates: what they are made of, what disturbs them, and that they are measured again. Clocks and loads are planted."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from advisor.profiling.machine import hostload, nvml, rates

torch = pytest.importorskip("torch")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "CPU_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(rates, "CPU_MATRIX", 128)
    monkeypatch.setattr(rates, "PAUSE_S", 0.0)
    monkeypatch.setattr(rates, "wall", lambda work: 1e-3)


def test_the_clock_of_a_rate_is_what_the_rate_is_made_of() -> None:
    """A device on which every run takes a millisecond: rates follow from sizes alone."""

    def clock(work: object) -> float:
        return 1e-3

    assert rates.measure_copy(1 << 20, CPU, clock)[0] == pytest.approx(2 * 2**20 / 1e-3 / 1e9)
    rate, seconds = rates.measure_matrix(torch.float32, CPU, clock)
    assert rate == pytest.approx(2 * rates.CPU_MATRIX**3 / 1e-3 / 1e12)
    assert set(seconds) == {1e-3}
    assert len(seconds) >= rates.REPEATS


def test_a_slow_device_gets_smaller_products_and_fewer_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "CPU_MATRIX", 1024)
    runs = []

    def clock(work: object) -> float:
        runs.append(1)
        return 0.3

    rate, _ = rates.measure_matrix(torch.float32, CPU, clock)
    assert rate == pytest.approx(2 * 128**3 / 0.3 / 1e12)
    assert len(runs) <= 3


def cores(monkeypatch: pytest.MonkeyPatch, *others_s: float) -> None:
    """Four cores, each attempt a second in which this process works for two of one core, and others for so many."""
    clock, own, busy = itertools.count(), itertools.count(step=2), 0.0
    busy_s = []
    for seconds in others_s:  # before and after each attempt
        busy_s += [busy, busy := busy + 2 + seconds]
    monkeypatch.setattr(rates, "time", SimpleNamespace(
        perf_counter=lambda: float(next(clock)), process_time=lambda: float(next(own)), sleep=lambda seconds: None, monotonic=lambda: 0.0,
    ))  # fmt: skip
    monkeypatch.setattr(hostload, "cpu_count", lambda: 4)
    monkeypatch.setattr(hostload, "busy_seconds", lambda: busy_s.pop(0))


def test_rates_beside_a_quiet_machines_own_work_are_in_no_doubt(monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 0.4)
    found = rates.of_cpu()
    assert found.doubt == ""
    assert set(found.matrix_tflops) == {"fp32", "bf16", "fp16"}


def test_rates_beside_others_work_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cores(monkeypatch, 2.0, 0.0)
    assert rates.of_cpu().doubt == ""
    cores(monkeypatch, 2.0, 2.0, 2.4)
    assert rates.of_cpu().doubt == "other processes took 60 % of the cores"


def test_runs_that_differ_are_in_doubt_where_nothing_tells_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostload, "busy_seconds", lambda: None)
    times = itertools.cycle((1e-3, 1e-3, 3e-3, 4e-3))
    monkeypatch.setattr(rates, "wall", lambda work: next(times))
    assert "apart" in rates.of_cpu().doubt
    monkeypatch.setattr(rates, "wall", lambda work: 1e-3)
    assert rates.of_cpu().doubt == ""


def test_what_disturbs_is_said_first() -> None:
    apart = {"fp32 products": 0.02, "copies": 0.4}
    assert rates.disturbed(apart) == "runs of the same work (copies) took times 40 % apart"
    assert rates.disturbed(apart, throttled=True) == "the GPU throttled"
    assert rates.disturbed(apart, busy_frac=0.5) == "the GPU was already busy 50 % of the time"
    assert rates.disturbed({"copies": 0.05}, others_frac=0.1, busy_frac=0.05) == ""
    assert rates.disturbed({}) == ""


class Gpu:
    """NVML's readings, one after the other; the last one stays."""

    def __init__(self, busy: tuple[float, ...] = (0.0,), reasons: int = 0) -> None:
        self.busy, self.reasons = list(busy), reasons

    def read(self, only: frozenset[str]) -> dict[str, float]:
        if "busy" in only:
            return {"busy": self.busy.pop(0) if len(self.busy) > 1 else self.busy[0]}
        return {"clock_reasons": float(self.reasons)}


@pytest.mark.parametrize(
    ("gpu", "doubt"),
    [
        (Gpu(), ""),
        (Gpu(busy=(0.9, 0.0)), ""),  # what ran has ended
        (Gpu(busy=(0.9,)), "already busy 90 %"),
        (Gpu(reasons=nvml.POWER_CAP), ""),  # as in training
        (Gpu(reasons=nvml.THROTTLED & 0x40), "throttled"),
        (None, ""),  # without NVML nothing tells
    ],
)
def test_a_gpu_that_works_or_throttles_is_in_doubt(
    monkeypatch: pytest.MonkeyPatch, gpu: Gpu | None, doubt: str
) -> None:
    monkeypatch.setattr(rates, "rates", lambda device, kinds, clock, disturbance: rates.Rates(
        copy_gbps=1.0, matrix_tflops={}, doubt=disturbance(rates.Runs())
    ))  # fmt: skip
    found = rates.of_gpu(torch.device("cuda"), 90, gpu, shared=False)
    assert doubt in found.doubt
    assert bool(found.doubt) == bool(doubt)
    assert "another process" in rates.of_gpu(torch.device("cuda"), 90, gpu, shared=True).doubt
