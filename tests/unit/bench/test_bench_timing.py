"""The clock of `advisor bench`, on a device that is made up."""

from __future__ import annotations

import pytest
from fake_device import EVENTS_MS, Device

from advisor.bench import timing


@pytest.mark.parametrize(
    ("host_ms", "device_ms", "calls"), [(0.01, 0.02, 8), (0.01, 5.0, 1), (0.3, 0.02, 8), (3.0, 0.02, 8), (0.05, 0.1, 3)]
)
def test_time_is_the_devices_whatever_the_host_takes(
    monkeypatch: pytest.MonkeyPatch, host_ms: float, device_ms: float, calls: int
) -> None:
    device = Device(monkeypatch)
    found = timing.interleaved({"one": device.contender(host_ms, device_ms)}, [0, 1])["one"]
    assert found.n == timing.ROUNDS
    assert found.median == pytest.approx(device_ms + EVENTS_MS / calls, rel=1e-6)


def test_what_waits_for_the_device_is_timed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pad hides its host time; it must not be padded for ever."""
    device = Device(monkeypatch)
    found = timing.interleaved({"waits": device.contender(0.1, 0.02, waits=True)}, [0], rounds=10)["waits"]
    assert found.n == 10
    assert 0.02 < found.median < 0.13
    assert device.pads < (10 + timing.WARMUP_ROUNDS + 8) * timing.MOST_PADS


def test_time_over_ends_it_with_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    contenders = {"a": device.contender(0.01, 50.0), "b": device.contender(0.01, 50.0)}
    found = timing.interleaved(contenders, [0], budget_s=0.1)
    assert {spread.n for spread in found.values()} == {timing.LEAST_ROUNDS}


def test_inputs_are_each_calls_own_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    device, seen = Device(monkeypatch), []

    def run(inputs: int) -> None:
        seen.append(inputs)
        device.launch(0.01, 0.02)

    timing.interleaved({"one": run}, [0, 1, 2], rounds=7)
    assert seen == [i % 3 for i in range(len(seen))]
