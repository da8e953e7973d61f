"""The clock of `advisor bench`, on a device that is made up: a queue that the host fills, and that works it off."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from advisor.bench import timing

LAUNCH_MS = 0.005
PAD_MS = 1.0
EVENTS_MS = 0.003  # between two events around nothing


class Device:
    """Milliseconds: the host's clock, and when the device is done with all it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.done = 0.0
        self.pads = 0
        monkeypatch.setattr(timing, "_event", lambda: Event(self))
        monkeypatch.setattr(timing.torch, "empty", lambda *_, **__: SimpleNamespace(zero_=self.pad))
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=self.seconds, monotonic=self.seconds))

    def seconds(self) -> float:
        return self.host / 1e3

    def pad(self) -> None:
        self.pads += 1
        self.launch(LAUNCH_MS, PAD_MS)

    def launch(self, host_ms: float, device_ms: float) -> None:
        self.host += host_ms
        self.done = max(self.done, self.host) + device_ms

    def contender(self, host_ms: float, device_ms: float, *, waits: bool = False) -> Callable[[object], None]:
        def run(_: object) -> None:
            self.launch(host_ms, device_ms)
            self.host = max(self.host, self.done) if waits else self.host

        return run


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self) -> None:
        self.at = max(self.device.done, self.device.host)
        self.device.done = self.at + EVENTS_MS

    def query(self) -> bool:
        return self.device.host >= self.at

    def synchronize(self) -> None:
        self.device.host = max(self.device.host, self.at)

    def elapsed_time(self, end: Event) -> float:
        return end.at - self.at


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
