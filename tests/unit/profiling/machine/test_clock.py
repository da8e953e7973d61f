"""Alignment of counter samples with the trace, over simulated counters of known clock; each doubt is planted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from synthetic_trace import BASE, US, Builder

from advisor.core.environment import Environment
from advisor.core.trace import DramSamples
from advisor.profiling.after.aggregate import aggregate
from advisor.profiling.machine.clock import BURST, Burst, BurstSource, align, bursts_of, share_inside

INTERVAL = 20_000
RATE = 2.1  # bytes a nanosecond in each direction, here; any will do
GPU_CLOCK = (2.1, 71_120_607_230)  # units per nanosecond and the units at BASE, as on an H200
KINETO_CLOCK = (1.0, BASE)
Span = tuple[int, int]  # ns since BASE

FIRST, LAST = (1_005_130, 1_195_130), (61_307_770, 61_497_770)
STEPS = [(2_000_000 + 1_000_000 * i, 2_950_000 + 1_000_000 * i) for i in range(58)]  # gaps: 50 µs
END = 62_000_000


def sampled(
    work: Sequence[Span],
    clock: tuple[float, int],
    *,
    end: int = END,
    jitter_ns: float = 0.0,
    interval: float = INTERVAL,
    noise_bytes: float = 0.0,
    wobble: float = 0.0,
) -> DramSamples:
    """What the counters would show of `work`, each of whose nanoseconds reads and writes RATE bytes.

    `wobble` makes the GPU's clock run that share slower in every other sample.
    """
    chance = random.Random(7)
    edges = [i * interval + chance.uniform(-jitter_ns, jitter_ns) for i in range(int(end / interval))]
    stamp, stamps = float(clock[1]), []
    for i, edge in enumerate(edges):
        stamps.append(int(stamp) if wobble else clock[1] + round(edge * clock[0]))
        if i + 1 < len(edges):
            stamp += (edges[i + 1] - edge) * clock[0] * (1 - wobble * (i % 2))
    samples = DramSamples()
    for i in range(len(edges) - 1):
        a, b = edges[i], edges[i + 1]
        moved = RATE * sum(max(0.0, min(b, y) - max(a, x)) for x, y in work) + chance.uniform(0, noise_bytes)
        samples.start_ns.append(stamps[i])
        samples.end_ns.append(stamps[i + 1])
        samples.read_bytes.append(moved)
        samples.write_bytes.append(moved)
    return samples


def absolute(spans: Sequence[Span]) -> list[Span]:
    return [(BASE + a, BASE + b) for a, b in spans]


def bursts(*spans: Span) -> list[Burst]:
    return [Burst(start_ns=a, end_ns=b, read_bytes=int((b - a) * RATE)) for a, b in absolute(spans)]


def placed(samples: DramSamples, work: Sequence[Span], *, known: Sequence[Burst] | None = None):
    return align(
        samples,
        bursts(FIRST, LAST) if known is None else known,
        interval_ns=INTERVAL,
        window_ns=(BASE - 10_000, BASE + END + 10_000),
        work=absolute(work),
    )


EVERYTHING = [FIRST, *STEPS, LAST]


@pytest.mark.parametrize("jitter_ns", [0.0, 400.0])
@pytest.mark.parametrize("clock", [GPU_CLOCK, (0.9, 5), (1.0, 1_000_000), (1.0, BASE + 40_000_000)])
def test_samples_of_any_steady_clock_land_on_the_trace(clock: tuple[float, int], jitter_ns: float) -> None:
    raw = sampled(EVERYTHING, clock, jitter_ns=jitter_ns, noise_bytes=RATE * 20)
    got, note = placed(raw, EVERYTHING)
    assert note == ""
    truth = sampled(EVERYTHING, KINETO_CLOCK, jitter_ns=jitter_ns, noise_bytes=RATE * 20)
    assert got.read_bytes == truth.read_bytes
    worst = max(abs(a - b) for a, b in zip(got.start_ns, truth.start_ns, strict=True))
    assert worst < INTERVAL / 4
    assert got.end_ns[:-1] == got.start_ns[1:]
    assert share_inside(got, absolute(EVERYTHING), slack_ns=INTERVAL) > 0.99


def test_samples_on_the_trace_s_clock_stay_as_they_are() -> None:
    raw = sampled(EVERYTHING, KINETO_CLOCK)
    assert placed(raw, EVERYTHING) == (raw, "")
    assert placed(raw, EVERYTHING)[0] is raw


def test_without_bursts_only_the_trace_s_own_clock_is_trusted() -> None:
    own, other = (sampled(EVERYTHING, clock) for clock in (KINETO_CLOCK, GPU_CLOCK))
    assert placed(own, EVERYTHING, known=[])[0] is own
    got, note = placed(other, EVERYTHING, known=[])
    assert got == DramSamples()
    assert "could not be aligned: 0 of its 2 bursts" in note


def test_samples_that_end_before_the_last_burst_are_refused() -> None:
    for end in (61_000_000, 60_000_000, 59_970_000, 61_400_000):
        got, note = placed(sampled(EVERYTHING, GPU_CLOCK, end=end), EVERYTHING)
        assert got == DramSamples()
        assert note.startswith("counter clock could not be aligned")


def test_training_that_looks_like_the_missing_last_burst_is_refused() -> None:
    early = (LAST[0] - 3_000_000, LAST[1] - 3_000_000)
    steps = [step for step in STEPS if step[1] < early[0] - 100_000]
    got, note = placed(sampled([FIRST, *steps, early], GPU_CLOCK), EVERYTHING)
    assert got == DramSamples()
    assert "expected 20000 ns" in note


def test_a_missing_first_burst_is_refused() -> None:
    got, note = placed(sampled([*STEPS, LAST], GPU_CLOCK), EVERYTHING)
    assert got == DramSamples()
    assert "MiB of reads" in note


def test_a_scale_that_contradicts_the_interval_is_refused() -> None:
    got, note = placed(sampled(EVERYTHING, GPU_CLOCK, interval=INTERVAL * 1.05), EVERYTHING)
    assert got == DramSamples()
    assert "a sample takes 21000 ns; expected 20000 ns" in note


def test_a_clock_that_changes_its_rate_is_refused() -> None:
    got, note = placed(sampled(EVERYTHING, GPU_CLOCK, wobble=0.3), EVERYTHING)
    assert got == DramSamples()
    assert "aligned" in note


def test_a_burst_that_takes_another_time_than_the_profiler_saw_is_refused() -> None:
    known = bursts((FIRST[0] - 60_000, FIRST[1] + 60_000), LAST)
    got, note = placed(sampled(EVERYTHING, GPU_CLOCK), EVERYTHING, known=known)
    assert got == DramSamples()
    assert "from where the profiler saw it" in note


def test_traffic_that_is_not_this_process_s_is_refused() -> None:
    got, note = placed(sampled(EVERYTHING, GPU_CLOCK), [FIRST, LAST])
    assert got == DramSamples()
    assert "of this process" in note


def test_silent_counters_are_refused_and_no_samples_are_no_fault() -> None:
    assert "0 runs of traffic" in placed(sampled([], GPU_CLOCK), EVERYTHING)[1]
    assert placed(DramSamples(), EVERYTHING) == (DramSamples(), "")


def test_bursts_are_known_by_their_range_and_complete_ones_only() -> None:
    b = Builder()
    for at, seen in ((100, 2), (500, 2), (900, 1)):
        b.op(BURST, at, at + 30)
        for i in range(2):
            call = b.call("cudaMemcpyAsync", at + 5 + 10 * i, at + 10 + 10 * i)
            if i < seen:
                b.record("Memcpy DtoD (Device -> Device)", at + 8 + 60 * i, at + 68 + 60 * i, call=call)
    b.launch("gemm", 300, 310, 400)
    found = bursts_of(b.trace(), 2, 1000)
    assert [((burst.start_ns - BASE) / US, (burst.end_ns - BASE) / US) for burst in found] == [(108, 228), (508, 628)]
    assert {burst.read_bytes for burst in found} == {2000}


def test_bursts_are_no_part_of_a_step() -> None:
    b = Builder()
    for at in (100, 1500):
        b.op(BURST, at, at + 20)
        b.record("Memcpy DtoD (Device -> Device)", at + 8, at + 168, call=b.call("cudaMemcpyAsync", at + 5, at + 10))
    b.launch("gemm", 510, 520, 900)
    for start in range(0, 2000, 20):
        busy = 108 <= start < 268 or 520 <= start < 900 or 1508 <= start < 1668
        b.sample(start, start + 20, 100.0 * busy, 0.0)
    b.steps(500, 1000)
    found = aggregate(b.trace(), Environment(device="cuda"))
    assert [(row.name, row.dram_bytes) for row in found.kernels] == [("gemm", 1900.0)]
    assert found.copies == ()
    assert found.dram_bytes == 1900.0
    assert found.busy_us == pytest.approx(380)
    assert found.step_us == pytest.approx(500)


@pytest.mark.parametrize(("free_mib", "cache_mib"), [(100, 4), (300, 50), (1900, 240)])
def test_short_memory_leaves_the_window_without_bursts(
    monkeypatch: pytest.MonkeyPatch, free_mib: int, cache_mib: int
) -> None:
    properties = SimpleNamespace(L2_cache_size=cache_mib << 20)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_mib << 20, 1 << 36))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch, "zeros", lambda *_, **__: pytest.fail("allocated"))
    with pytest.raises(MemoryError, match=f"{free_mib} MiB of GPU memory are free"):
        BurstSource(0, INTERVAL)
