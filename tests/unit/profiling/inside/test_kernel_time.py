"""The kernels' own time: what spans cover, by step, and by whom nothing is recorded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from advisor.profiling.inside import kernel_time, kinetosession, rawevents
from advisor.profiling.inside.kernel_time import KernelTime, covered_us


def test_kernels_that_run_side_by_side_count_once_and_gaps_do_not() -> None:
    spans = [(1_000, 3_000), (2_000, 4_000), (2_500, 3_500), (9_000, 10_000), (12_000, 99_000)]
    assert covered_us(spans, 0, 12_000) == 4.0
    assert covered_us(spans, 12_000, 20_000) == 87.0  # what begins in a step counts to its end
    assert covered_us(spans, 5_000, 8_000) == 0.0


def test_nothing_is_recorded_without_a_gpu() -> None:
    kernels = KernelTime(torch.device("cpu"), lasting=True)
    assert not kernels.start()
    assert kernels.stop() == ()


def test_each_steps_kernels_are_told_and_those_of_other_devices_and_copies_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def event(kind: str, start: int, end: int, device: int = 0) -> SimpleNamespace:
        return SimpleNamespace(
            kind=kind,
            start_ns=lambda: start,
            end_ns=lambda: end,
            device_index=lambda: device,
            activity=kind,
            name=lambda: "cudaDeviceSynchronize" if kind == "cuda_runtime" else "k",
        )

    clock = iter((500, 10_500, 20_500, 21_500))  # the trace's clock is 500 ns behind
    events = [event("kernel", 1_000, 5_000), event("gpu_memcpy", 5_000, 9_000), event("kernel", 1_000, 9_000, 1),
              event("cuda_runtime", 0, 9_000), event("cuda_runtime", 20_900, 21_000), event("kernel", 12_000, 14_000), event("kernel", 0, 0)]  # fmt: skip
    monkeypatch.setattr(kernel_time.torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(kernel_time.time, "time_ns", lambda: next(clock))
    running = iter((False, True))
    monkeypatch.setattr(kernel_time, "profiler_enabled", lambda: next(running))
    monkeypatch.setattr(kinetosession, "script_profiles", lambda: False)
    monkeypatch.setattr(kinetosession, "teardown", lambda wanted: None)
    monkeypatch.setattr(rawevents, "activity_of", lambda kind: lambda found: found.activity)
    monkeypatch.setattr(kinetosession, "end_profiler", lambda device: SimpleNamespace(events=lambda: events))
    profile = SimpleNamespace(_prepare_trace=lambda: None, _start_trace=lambda: None, entered=True)
    monkeypatch.setattr(kernel_time.autograd_profiler, "profile", lambda **_: profile)
    kernels = KernelTime(torch.device("cuda", 0), lasting=True)
    assert kernels.start()
    kernels.boundary()
    kernels.boundary()
    assert kernels.stop() == (4.0, 2.0)
    assert not profile.entered
