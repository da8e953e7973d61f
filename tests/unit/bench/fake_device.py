"""A device that is made up: a queue that the host fills, and that works it off."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from advisor.bench import timing

LAUNCH_MS = 0.005
PAD_MS = 1.0
EVENTS_MS = 0.003  # between two events around nothing


class Device:
    """Milliseconds: the host's clock, when the device is done with all it was given, and from when to when it did what."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = self.done = 0.0
        self.pads = 0
        self.work: list[tuple[float, float, str]] = []
        monkeypatch.setattr(timing, "event", lambda: Event(self))
        monkeypatch.setattr(timing.torch, "empty", lambda *_, **__: SimpleNamespace(zero_=self.pad))
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=self.seconds, monotonic=self.seconds))

    def seconds(self) -> float:
        return self.host / 1e3

    def sleep(self, seconds: float) -> None:
        self.host += seconds * 1e3

    def pad(self) -> None:
        self.pads += 1
        self.launch(LAUNCH_MS, PAD_MS, "pad")

    def launch(self, host_ms: float, device_ms: float, what: str = "call") -> None:
        self.host += host_ms
        begin = max(self.done, self.host)
        self.done = begin + device_ms
        self.work.append((begin, self.done, what))

    def contender(self, host_ms: float, device_ms: float, *, waits: bool = False) -> Callable[[object], None]:
        def run(_: object) -> None:
            self.launch(host_ms, device_ms)
            self.host = max(self.host, self.done) if waits else self.host

        return run


class Event:
    """A CUDA event."""

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
