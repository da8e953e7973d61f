from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from advisor.loop.patches import Patches
from advisor.profiling.inside import memory
from advisor.profiling.inside.memory import MemoryProbe

STATS = {"num_device_alloc": 4, "allocation.all.allocated": 100, "allocated_bytes.all.current": 10}


@pytest.fixture
def patches(monkeypatch: pytest.MonkeyPatch) -> Iterator[Patches]:
    """A GPU whose statistics do not change, and an allocator that gives nothing back."""
    calls = {"cuda": 0}

    def give_back() -> None:
        calls["cuda"] += 1

    monkeypatch.setattr(torch._C, "_cuda_emptyCache", give_back, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_emptyCache", give_back, raising=False)
    monkeypatch.setattr(MemoryProbe, "statistics", lambda self: dict(STATS))
    monkeypatch.setattr(
        memory.torch.cuda, "get_device_properties", lambda device: type("P", (), {"total_memory": 1000})
    )
    made = Patches()
    yield made
    made.restore_all()
    assert torch._C._cuda_emptyCache is give_back
    assert calls["cuda"] == 3  # the user's calls went through


def test_emptied_caches_are_counted_per_step_and_passed_on(patches: Patches) -> None:
    probe = MemoryProbe(torch.device("cuda"), patches)
    assert probe.stats(4).empty_cache_calls == 0.0
    torch._C._cuda_emptyCache()
    torch._C._accelerator_emptyCache()
    assert probe.stats(4).empty_cache_calls == 0.5
    assert probe.stats(0).empty_cache_calls is None
    assert MemoryProbe(torch.device("cuda")).stats(4).empty_cache_calls is None
    patches.restore_all()
    torch._C._cuda_emptyCache()
    assert probe.stats(4).empty_cache_calls == 0.5


def test_what_an_evaluation_takes_is_not_a_steps(patches: Patches, monkeypatch: pytest.MonkeyPatch) -> None:
    """158 cudaMallocs of an evaluation on an H200 were told as 7 a step, with the severity of memory taken in every step."""
    stats = dict(STATS)
    monkeypatch.setattr(MemoryProbe, "statistics", lambda self: dict(stats))
    probe = MemoryProbe(torch.device("cuda"), patches)
    stats["num_device_alloc"] += 160
    stats["num_alloc_retries"] = 1
    for _ in range(3):
        torch._C._cuda_emptyCache()
    probe.begin_anew(10)
    assert probe.stats(12).device_allocations == 160 / 12  # too few steps since
    stats["num_device_alloc"] += 5
    found = probe.stats(20)
    assert (found.device_allocations, found.empty_cache_calls, found.retries) == (0.5, 0.0, 1)


def test_what_the_warm_up_has_asked_for_in_vain_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    # cuDNN's search for algorithms tries workspaces that do not fit.
    stats = {**STATS, "num_alloc_retries": 3}
    monkeypatch.setattr(MemoryProbe, "statistics", lambda self: dict(stats))
    monkeypatch.setattr(
        memory.torch.cuda, "get_device_properties", lambda device: type("P", (), {"total_memory": 1000})
    )
    probe = MemoryProbe(torch.device("cuda"))
    assert probe.stats(20).retries == 0
    stats["num_alloc_retries"] = 5
    assert probe.stats(20).retries == 2


def test_calls_are_timed_with_the_line_that_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 10**9, 2_000_000))
    monkeypatch.setattr(memory.time, "perf_counter_ns", lambda: next(clock) + 1)
    calls = memory.Calls()
    counted = calls.counting(lambda value: value + 1)
    assert [counted(1), counted(2)] == [2, 3]
    assert (calls.number, calls.us) == (2, 4000)
    assert calls.line.startswith("tests/unit/profiling/inside/test_memory.py:")

    def fails() -> None:
        raise ValueError("out of memory")

    with pytest.raises(ValueError, match="out of memory"):
        calls.counting(fails)()
    assert (calls.number, calls.us) == (3, 6000)


def test_full_collections_of_garbage_are_counted_and_others_are_not() -> None:
    patches = Patches()
    watching = len(gc.callbacks)
    probe = MemoryProbe(torch.device("cpu"), patches)
    collecting = gc.isenabled()
    gc.disable()
    try:
        gc.collect(0)
        assert probe.stats(4).gc_calls == 0
        gc.collect()
        gc.collect()
        found = probe.stats(4)
    finally:
        if collecting:
            gc.enable()
    assert found.gc_calls == 0.5
    assert found.gc_us > 0
    assert "test_memory.py:" in found.gc_at
    assert MemoryProbe(torch.device("cpu")).stats(4).gc_calls is None
    patches.restore_all()
    assert len(gc.callbacks) == watching
