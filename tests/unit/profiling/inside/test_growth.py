"""What grows is told by readings in a row, whatever its size; what jumps, ends or goes up and down is no growth."""

from __future__ import annotations

import ctypes

import pytest
import torch

from advisor.profiling.inside import growth, memory
from advisor.profiling.inside.growth import MemoryReadings
from advisor.profiling.inside.memory import MemoryProbe

KIB, MIB = 1024, 2**20


def readings(*nbytes: float, every: int = 3) -> MemoryReadings:
    return MemoryReadings([(every * i, value) for i, value in enumerate(nbytes)])


@pytest.mark.parametrize("rate", [4, 787_000, 40 * MIB])
def test_a_leak_is_steady_at_any_size(rate: float) -> None:
    found = readings(*(1e9 + 3 * rate * i for i in range(7)))
    assert found.steady()
    assert found.a_step() == pytest.approx(rate)


def test_one_pause_is_allowed() -> None:
    assert readings(0, 3, 6, 6, 12, 15, 18).steady()


@pytest.mark.parametrize(
    "nbytes",
    [
        (0, 50, 50, 50, 50, 50, 50),  # taken once
        (0, 9, 0, 9, 0, 9, 12),  # freed again
        (0, 5, 9, 12, 12, 12, 12),  # a cache that is full
        (9, 8, 7, 6, 5, 4, 3),
        (0, 3, 6, 9),  # too few
        (),
    ],
)
def test_what_ends_or_is_freed_is_no_leak(nbytes: tuple[float, ...]) -> None:
    assert not readings(*nbytes).steady()


def test_steps_between_readings_may_vary() -> None:
    steps = (0, 1, 5, 6, 11, 14, 20)
    found = MemoryReadings([(step, 100.0 * step) for step in steps])
    assert found.steady()
    assert found.a_step() == 100


def test_the_heap_is_counted_to_the_byte() -> None:
    before = growth.heap_bytes()
    if before is None:
        pytest.skip("no glibc with mallinfo2")
    kept = ctypes.create_string_buffer(3 * MIB)
    after = growth.heap_bytes()
    assert after is not None
    assert 3 * MIB <= after - before < 4 * MIB
    del kept


def series(probe: MemoryProbe, grow: float, device: float | None = None) -> object:
    """Statistics of 20 steps, each of which takes `grow` bytes of the host's memory, `device` of the device's."""
    for step in (3, 6, 9, 12, 15, 18, 20):
        PLANTED.update(host=1e9 + grow * step, device=1e6 + (device or 0.0) * step)
        probe.note(step)
    return probe.stats(20)


PLANTED = {"host": 1e9, "device": 1e6}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    PLANTED.update(host=1e9, device=1e6)
    monkeypatch.setattr(growth, "heap_bytes", lambda: PLANTED["host"])
    monkeypatch.setattr(growth, "resident_bytes", lambda: PLANTED["host"])
    monkeypatch.setattr(growth, "host_free_bytes", lambda: 10**9)


@pytest.mark.usefixtures("planted")
def test_on_a_cpu_the_process_is_what_grows() -> None:
    found = series(MemoryProbe(torch.device("cpu")), 1.5 * MIB)
    assert isinstance(found, memory.MemoryStats)
    assert found.growth_bytes == pytest.approx(1.5 * MIB)
    assert found.growth_steady
    assert found.host_growth_bytes == found.growth_bytes


@pytest.mark.usefixtures("planted")
def test_what_advisor_keeps_of_each_step_is_no_leak() -> None:
    found = series(MemoryProbe(torch.device("cpu")), 500)
    assert isinstance(found, memory.MemoryStats)
    assert (found.growth_bytes, found.growth_steady) == (0.0, False)


@pytest.mark.usefixtures("planted")
def test_without_a_series_growth_is_not_known_rather_than_nothing() -> None:
    found = MemoryProbe(torch.device("cpu")).stats(20)
    assert found.growth_bytes is None
    assert found.host_growth_bytes is None


@pytest.mark.usefixtures("planted")
def test_resident_pages_that_come_late_are_no_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "heap_bytes", lambda: None)
    found = series(MemoryProbe(torch.device("cpu")), 64 * KIB)
    assert isinstance(found, memory.MemoryStats)
    assert found.growth_bytes == 0.0


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(
    ("heap", "shared", "leak"),
    [
        (1e9, 0.0, False),  # free lists that grow behind a heap that does not
        (1e9, 1.0, True),  # batches of a loader's workers that the script keeps
        (1e6, 0.0, True),  # another allocator: glibc's heap is nearly empty
    ],
)
def test_resident_pages_are_a_leak_where_something_is_held_in_them(
    monkeypatch: pytest.MonkeyPatch, heap: float, shared: float, leak: bool
) -> None:
    monkeypatch.setattr(growth, "heap_bytes", lambda: heap)
    monkeypatch.setattr(growth, "beside_the_heap_bytes", lambda: 1e8 + shared * PLANTED["host"])
    found = series(MemoryProbe(torch.device("cpu")), MIB)
    assert isinstance(found, memory.MemoryStats)
    assert found.growth_bytes == pytest.approx(MIB if leak else 0.0)


@pytest.mark.usefixtures("planted")
def test_device_and_host_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryProbe, "statistics", lambda self: {"allocated_bytes.all.current": PLANTED["device"]})
    properties = type("P", (), {"total_memory": 80 * 2**30})
    monkeypatch.setattr(memory.torch.cuda, "get_device_properties", lambda device: properties)
    found = series(MemoryProbe(torch.device("cuda")), 0, device=512)
    assert isinstance(found, memory.MemoryStats)
    assert (found.growth_bytes, found.growth_steady, found.host_growth_bytes) == (512, True, 0.0)
    PLANTED.update(host=1e9, device=1e6)
    found = series(MemoryProbe(torch.device("cuda")), 2 * MIB)
    assert isinstance(found, memory.MemoryStats)
    assert (found.growth_bytes, found.growth_steady) == (0.0, False)
    assert found.host_growth_bytes == pytest.approx(2 * MIB)


@pytest.mark.usefixtures("planted")
def test_an_evaluation_begins_the_series_anew() -> None:
    probe = MemoryProbe(torch.device("cpu"))
    for step in (3, 6, 9):
        PLANTED["host"] = 1e9 + 9e6 * step
        probe.note(step)
    probe.begin_anew(10)
    for step in (12, 14, 16, 18):
        probe.note(step)
    assert probe.stats(20).growth_bytes == 0.0
