"""Compiling ahead, with a stand-in for CuPy's modules."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from advisor.core.errors import AdvisorError
from advisor.ops import catalog, nvrtc
from advisor.ops.sites import recording


def test_every_variant_is_compiled_once_and_a_refused_one_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[str, tuple[tuple[str, int], ...]]] = []
    lock = threading.Lock()

    class Module:
        def __init__(self, name: str, defines: tuple[tuple[str, int], ...]) -> None:
            self.variant = name, defines

        def compile(self) -> None:
            with lock:
                compiled.append(self.variant)
            if dict(self.variant[1])["ACT"] == 1:
                raise RuntimeError("planted")

    monkeypatch.setattr(nvrtc, "compiled_module", lambda name, defines, device: Module(name, defines))
    variants = catalog.get("batchnorm_act").variants()
    nvrtc.warm((*variants, *variants))
    assert sorted(compiled) == sorted((name, tuple(defines.items())) for name, defines in variants)


def test_no_kernel_runs_where_tensors_have_no_memory_or_carry_tangents(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvrtc.on_device(torch.ones(2)) == "not on a CUDA device"
    monkeypatch.setattr(nvrtc, "unavailable", lambda: "")
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    plain, said, seen = torch.ones(2), [], []

    def inside(x: torch.Tensor) -> torch.Tensor:
        said.append((nvrtc.on_device(plain), nvrtc.on_device(x)))
        seen.append(x)
        return x.sum()

    inside(torch.ones(2))
    torch.func.grad(inside)(torch.ones(2))
    with forward_ad.dual_level():
        inside(torch.ones(2))
    assert said == [
        (reason, reason) for reason in ("", "inside a torch.func transform", "forward-mode differentiation")
    ]
    assert [nvrtc.on_device(x) for x in seen] == ["", "outlived a torch.func transform", ""]


def test_shared_memory_asked_for_by_one_launch_is_there_for_another_that_needs_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = SimpleNamespace(max_dynamic_shared_size_bytes=48 * 1024, kernel="f")  # CUDA has one for all who ask
    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(Device=lambda _: nullcontext())
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(nvrtc, "compiled_module", lambda *_: SimpleNamespace(get_function=lambda _: kernel))
    monkeypatch.setattr(nvrtc, "most_dynamic_by_kernel", {})
    monkeypatch.setattr(nvrtc, "launched", set())
    monkeypatch.setattr(nvrtc, "Kernel", lambda loaded, entry, types, *, device, overlapping: loaded)
    monkeypatch.setattr(nvrtc.sources, "overlaps", lambda _: False)
    monkeypatch.setattr(nvrtc.sources, "parameters", lambda *_: "")
    nvrtc.function.cache_clear()
    try:
        for asked in (75_000, 70_000):
            assert nvrtc.function("f.cu", "f", (), 0, asked) == "f"
            assert kernel.max_dynamic_shared_size_bytes == 75_000
        assert nvrtc.launched == {"f.cu"}  # for the record of what a training ran
    finally:
        nvrtc.function.cache_clear()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device whose current stream and capture the test sets, with no memory had before. What is allocated lies on the CPU."""
    found = SimpleNamespace(current=1, capturing=False, waits=0)

    def synchronize(device: torch.device) -> None:
        found.waits += 1

    monkeypatch.setattr(nvrtc, "tickets_of", {})
    monkeypatch.setattr(nvrtc, "exchanges", {})
    monkeypatch.setattr(nvrtc, "exchange_of", {})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: found.current, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: found.capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    return found


def test_counters_are_zeroed_before_any_stream_has_its_own(streams: SimpleNamespace) -> None:
    """On the stream that asks first, for all: another one would not wait for it."""
    device = torch.device("cpu")
    streams.capturing = True
    with pytest.raises(AdvisorError, match="first launch is inside a CUDA graph capture"):
        nvrtc.tickets(device)
    assert not streams.waits
    streams.capturing = False
    found = []
    for streams.current in (1, 2, 1):
        found.append(nvrtc.tickets(device))
        assert streams.waits == 1  # once a device
        streams.capturing = True
    assert found[0] == found[2]
    assert abs(found[1] - found[0]) == 4 * 1024


def exchanges(streams: SimpleNamespace, numbers: range | list[int]) -> list[int]:
    found = []
    for streams.current in numbers:
        found.append(nvrtc.exchange(torch.device("cpu"), 64))
    return found


def test_each_stream_has_memory_of_its_own_to_exchange_sums_through(streams: SimpleNamespace) -> None:
    first = exchanges(streams, range(12))
    assert exchanges(streams, range(12)) == first
    assert len(set(first)) == 12
    assert all(abs(a - b) >= (4 + 2 * 64) * 4 for a in first for b in first if a != b)
    assert streams.waits == 2  # once for eight of them
    blocks, _ = nvrtc.exchanges[0]
    for words in torch.cat(blocks):
        assert not words[:4].any()
        assert bool((words[4:] == nvrtc.ABSENT).all())


def test_a_capture_takes_what_is_there_and_allocates_nothing(streams: SimpleNamespace) -> None:
    streams.capturing = True
    assert exchanges(streams, [1]) == [0]
    streams.capturing = False
    exchanges(streams, [1])
    streams.capturing = True
    assert all(exchanges(streams, range(2, 9)))
    assert exchanges(streams, [9]) == [0]
    assert exchanges(streams, [1]) != [0]


def test_some_are_kept_for_captures(streams: SimpleNamespace) -> None:
    first = exchanges(streams, range(6))
    streams.capturing = True
    more = exchanges(streams, range(6, 16))
    assert all(more)
    assert len({*first, *more}) == 16


def test_there_is_an_end_to_streams(streams: SimpleNamespace) -> None:
    assert all(exchanges(streams, range(nvrtc.STREAMS)))
    assert exchanges(streams, [nvrtc.STREAMS]) == [0]


def in_two_threads(function: Callable[[], Any]) -> list[Any]:
    """What both got, having begun at once."""
    found: list[Any] = []
    begin = threading.Barrier(2)

    def work() -> None:
        begin.wait()
        found.append(function())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_two_threads_that_come_first_share_a_streams_exchange_and_it_stays(
    streams: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: time.sleep(0.02))
    first, second = in_two_threads(lambda: nvrtc.exchange(torch.device("cpu"), 64))
    assert first == second == nvrtc.exchange(torch.device("cpu"), 64)
    assert nvrtc.keeps(first)


def test_two_streams_that_come_at_once_have_counters_of_their_own(
    streams: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Slots(dict[int, int]):
        def __len__(self) -> int:
            found = super().__len__()
            time.sleep(0.02)  # another thread's turn
            return found

    monkeypatch.setattr(nvrtc, "tickets_of", {0: (torch.zeros(4096, dtype=torch.int32), Slots())})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: threading.get_ident(), raising=False)
    assert len(set(in_two_threads(lambda: nvrtc.tickets(torch.device("cpu"))))) == 2


def test_two_threads_that_ask_first_have_one_kernel_with_its_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    class Module:  # which is a CUfunction of its own each time that it is loaded
        def __init__(self, **_: object) -> None:
            time.sleep(0.02)
            self.function = SimpleNamespace(max_dynamic_shared_size_bytes=48 * 1024, kernel=self)

        def get_function(self, entry: str) -> SimpleNamespace:
            return self.function

    cupy = ModuleType("cupy")
    cupy.cuda = SimpleNamespace(Device=lambda _: nullcontext())
    cupy.RawModule = Module
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(nvrtc, "most_dynamic_by_kernel", {})
    monkeypatch.setattr(nvrtc, "launched", set())
    monkeypatch.setattr(nvrtc, "Kernel", lambda loaded, entry, types, *, device, overlapping: loaded)
    for name, found in (("overlaps", False), ("target", ()), ("source", "")):
        monkeypatch.setattr(nvrtc.sources, name, lambda _, found=found: found)
    monkeypatch.setattr(nvrtc.sources, "parameters", lambda *_: "")
    caches = nvrtc.function, nvrtc.compiled_module
    for cache in caches:
        cache.cache_clear()
    try:
        for module in in_two_threads(lambda: nvrtc.function("f.cu", "f", (), 0, 70_000)):
            assert module.function.max_dynamic_shared_size_bytes == 70_000
    finally:
        for cache in caches:
            cache.cache_clear()


def test_what_is_made_for_good_is_no_part_of_a_recorded_call(streams: SimpleNamespace) -> None:
    """Or each replay would make it again."""
    x = torch.zeros(8)
    with recording.Tape([x]) as tape:
        nvrtc.tickets(x.device)
        nvrtc.exchange(x.device, 64)
    assert (tape.steps, tape.refused) == ([], "")
