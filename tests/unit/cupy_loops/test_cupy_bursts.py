"""The traced window of a CuPy loop with DRAM counters: bursts at both ends, on the trace's clock. The device is planted."""

from __future__ import annotations

import functools
import itertools
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import stub_cupy

from advisor.core.trace import DeviceTable, DramSamples, RuntimeTable, Trace
from advisor.cupy_loops import bursts
from advisor.cupy_loops.bursts import CupyBursts
from advisor.cupy_loops.window import Window
from advisor.profiling.machine.clock import BURST, BURST_SAMPLES, bursts_of

INTERVAL_NS = 20_000


class Event:
    """Marks that are a tenth of a millisecond apart."""

    def record(self) -> None:
        pass

    synchronize = record


@pytest.fixture
def cp(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CuPy's stub with a GPU that notes its copies, by a planted clock."""
    module, copies = stub_cupy.module(), []
    now = functools.partial(next, itertools.count(1_000_000, 1000))
    monkeypatch.setattr(bursts, "time", types.SimpleNamespace(time_ns=now, sleep=lambda seconds: None))
    pool = types.SimpleNamespace(malloc=lambda size: types.SimpleNamespace(ptr=size))
    module.copies = copies
    module.cuda = types.SimpleNamespace(
        Event=Event,
        MemoryPool=lambda: pool,
        get_elapsed_time=lambda a, b: 0.1,
        runtime=types.SimpleNamespace(
            getDevice=lambda: 0,
            getDeviceProperties=lambda index: {"l2CacheSize": 50 << 20},
            memGetInfo=lambda: (60 << 30, 80 << 30),
            deviceSynchronize=lambda: None,
            memcpyAsync=lambda *given: copies.append((given[2], now())),
        ),
    )
    return module


class Activity:
    """Records of the copies that the planted GPU made."""

    def __init__(self, copies: list[tuple[int, int]]) -> None:
        self.copies = copies

    def start(self) -> None:
        self.copies.clear()

    def stop(self) -> tuple[RuntimeTable, DeviceTable]:
        runtime, device = RuntimeTable(), DeviceTable()
        for link, (nbytes, now) in enumerate(self.copies, start=1):
            runtime.name.append("cudaMemcpyAsync")
            runtime.start_ns.append(now)
            runtime.end_ns.append(now + 10)
            runtime.thread.append(1)
            runtime.correlation.append(link)
            device.name.append("Memcpy DtoD (Device -> Device)")
            device.start_ns.append(now + 100)
            device.end_ns.append(now + 200)
            device.stream.append(7)
            device.correlation.append(link)
            device.op.append(0)
            device.grid.append("")
            device.block.append("")
            device.nbytes.append(nbytes)
            device.device.append(0)
        return runtime, device


class Counters:
    """Stands for DramWindow; says what the bursts look like in the trace."""

    def __init__(self, index: int, *, window_s: float, bursts: Any) -> None:
        self.source, self.notes, self.found = bursts(index, INTERVAL_NS), ["counted"], []

    def start(self) -> None:
        self.source.fire()

    stop = start

    def laid_over(self, trace: Trace) -> Trace:
        self.found += bursts_of(trace, self.source.copies, self.source.copy_bytes)
        return replace(trace, dram=DramSamples(start_ns=[1], end_ns=[2], read_bytes=[3], write_bytes=[4]))

    def close(self) -> None:
        pass


def test_a_burst_lasts_some_samples(cp: Any) -> None:
    source = CupyBursts(cp, 0, INTERVAL_NS)
    assert source.copies == np.ceil(BURST_SAMPLES * INTERVAL_NS / (1e5 / 4))
    cp.copies.clear()
    source.fire()
    assert len(cp.copies) == source.copies
    first, last = source.ranges[0]
    assert all(first < now < last for _, now in cp.copies)


def test_the_window_has_a_burst_at_each_end(cp: Any) -> None:
    made: list[Counters] = []

    def counters(*given: Any, **named: Any) -> Counters:
        made.append(Counters(*given, **named))
        return made[-1]

    window = Window(cp, lambda: Activity(cp.copies), counters)
    window.start()
    (cp.ones(3) + 1.0).sum()
    trace = window.stop([])
    assert trace.dram.read_bytes == [3]
    assert "counted" in trace.notes
    assert trace.ops.name.count(BURST) == 2
    first, last = made[0].found
    assert first.read_bytes == last.read_bytes == made[0].source.copies * made[0].source.copy_bytes
    assert first.end_ns < last.start_ns


def test_without_counters_the_trace_says_why(cp: Any) -> None:
    def counters(*given: Any, **named: Any) -> Any:
        raise MemoryError("1 MiB of GPU memory are free")

    window = Window(cp, lambda: Activity(cp.copies), counters)
    window.start()
    assert "DRAM counters unavailable: MemoryError: 1 MiB of GPU memory are free" in window.stop([]).notes
