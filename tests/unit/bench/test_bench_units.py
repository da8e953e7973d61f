"""Units' shares of a row of calls, on a device and with counters that are made up: what is a row's own, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import pytest
from emulation.cupti import FakeCupti
from fake_device import Device

from advisor.bench import units
from advisor.profiling.machine import cupti
from advisor.profiling.machine.cupti import CountersUnavailable
from advisor.profiling.machine.pmsampling import Samples

INTERVAL_NS = 20_000
MEMORY = f"dram__throughput{units.SUFFIX}"
# Per cent while the device does it. What else runs has other values everywhere, so that one of its samples would be seen.
PERCENT = {"pad": 97.0, "call": 40.0, "tail": 0.5}


def timeline(
    work: list[tuple[float, float, str]], begin_ns: float, end_ns: float, *, unit: float = 1.0, zero: int = 10**18
) -> list[tuple[int, int, float]]:
    """Samples (start, end, per cent) of what was done from when to when (ns); `unit` units of CUPTI's clock make a nanosecond."""
    found = []
    for i in range(int((end_ns - begin_ns) // INTERVAL_NS)):
        a, b = begin_ns + i * INTERVAL_NS, begin_ns + (i + 1) * INTERVAL_NS
        percent = sum(max(0.0, min(b, y) - max(a, x)) * PERCENT[what] for x, y, what in work) / INTERVAL_NS
        found.append((zero + round(a * unit), zero + round(b * unit), percent))
    return found


def samples(
    row_ns: float, *, pad_ns: float = 1e6, idle_ns: float = 1e6, phase: float = 0.3, unit: float = 1.0
) -> Samples:
    """Of a pad, a row and idle time."""
    begin = phase * INTERVAL_NS
    work = [(begin, begin + pad_ns, "pad"), (begin + pad_ns, begin + pad_ns + row_ns, "call")]
    found = timeline(work, 0.0, begin + pad_ns + row_ns + idle_ns, unit=unit)
    percent = [sample[2] for sample in found]
    return Samples(
        start=[s[0] for s in found], end=[s[1] for s in found], values={units.BUSY: percent, MEMORY: list(percent)}
    )


def mean(found: Samples, row_ns: float) -> float:
    return fmean(found.values[MEMORY][i] for i in units.inside(found, row_ns, INTERVAL_NS))


@pytest.mark.parametrize("unit", [1.0, 2.1, 0.032])
@pytest.mark.parametrize("phase", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("row_ns", [3e6, 6e5, 3.013e6])
def test_the_rows_samples_are_taken_and_no_others(row_ns: float, phase: float, unit: float) -> None:
    found = samples(row_ns, phase=phase, unit=unit)
    assert mean(found, row_ns) == pytest.approx(PERCENT["call"])
    taken = len(units.inside(found, row_ns, INTERVAL_NS))
    assert taken >= row_ns / INTERVAL_NS * (1 - units.SCALE_TOLERANCE) - 4
    busy = [value for value in found.values[MEMORY] if value]
    assert fmean(busy) > PERCENT["call"] + 5  # what a pad among them would make of it


def test_a_clock_that_is_off_by_two_per_cent_brings_no_pad_in() -> None:
    found = samples(3e6)
    assert mean(found, 3e6 * 1.02) == pytest.approx(PERCENT["call"])
    with pytest.raises(AssertionError):  # one that is off by more would be seen here
        assert mean(found, 3e6 * 1.06) == pytest.approx(PERCENT["call"])


def test_a_tail_on_few_sms_is_taken_for_idle_and_brings_no_pad_in() -> None:
    end, row_ns, tail_ns = 75 * INTERVAL_NS, 25.6 * INTERVAL_NS, INTERVAL_NS
    begin = end - row_ns
    work = [(0.0, begin, "pad"), (begin, end - tail_ns, "call"), (end - tail_ns, end, "tail")]
    found = timeline(work, 0.0, end + 1e6)
    percent = [sample[2] for sample in found]
    shown = Samples([s[0] for s in found], [s[1] for s in found], {units.BUSY: percent, MEMORY: percent})
    assert mean(shown, row_ns) == pytest.approx(PERCENT["call"])


def test_a_clock_that_was_faster_before_the_row_brings_no_pad_in() -> None:
    found = samples(3e6, pad_ns=1e7)
    zero = found.start[0]
    row = zero + round(1e7) - 10 * INTERVAL_NS  # from somewhat before it
    for column in (found.start, found.end):
        column[:] = [t + min(t, row) - zero for t in column]
    assert mean(found, 3e6) == pytest.approx(PERCENT["call"])


def test_lost_samples_do_not_stretch_the_row() -> None:
    found = samples(3e6)
    for column in (found.start, found.end, *found.values.values()):
        del column[120:150]
    assert mean(found, 3e6) == pytest.approx(PERCENT["call"])


@pytest.mark.parametrize(
    ("made", "row_ns", "words"),
    [
        (lambda: samples(3e6, idle_ns=0.0), 3e6, "end before the row does"),
        (lambda: samples(4e5), 4e5, "samples lie inside a row of 400"),
        (lambda: Samples(start=[1, 2], end=[2, 3], values={units.BUSY: [0.0, 0.5]}), 3e6, "none of . samples shows"),
        (lambda: Samples(values={units.BUSY: []}), 3e6, "none of . samples shows"),
    ],
)
def test_a_row_that_is_not_whole_gives_no_number(made: Callable[[], Samples], row_ns: float, words: str) -> None:
    with pytest.raises(units.NotCounted, match=words):
        units.inside(made(), row_ns, INTERVAL_NS)


class Counted(FakeCupti):
    """Counts what the device does between start and stop."""

    def __init__(self, device: Device) -> None:
        names = [metric + units.SUFFIX for unit in units.UNITS.values() for metric in unit.metrics]
        super().__init__(names, [])
        self.device = device
        self.begun_ms = 0.0
        self.shown = dict.fromkeys(names, 1.0)  # factor of PERCENT
        self.missing_idle_ms = 0.0
        self.deaf_ms = 0.0  # after a start

    def cuptiPmSamplingStart(self, p) -> None:
        super().cuptiPmSamplingStart(p)
        self.begun_ms = self.device.host

    def cuptiPmSamplingStop(self, p) -> None:
        work = [(a * 1e6, b * 1e6, what) for a, b, what in self.device.work]
        until = self.device.host - self.missing_idle_ms
        self.pending = [
            (a, b, *(percent * self.shown[name] for name in self.metrics))
            for a, b, percent in timeline(work, (self.begun_ms + self.deaf_ms) * 1e6, until * 1e6)
        ]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Counted:
    fake = Counted(Device(monkeypatch))
    monkeypatch.setattr(cupti, "load", lambda: fake)
    monkeypatch.setattr(units.time, "sleep", fake.device.sleep)
    fake.chunk = 10**6
    return fake


@pytest.mark.parametrize(("host_ms", "device_ms"), [(0.01, 0.05), (0.1, 0.02), (0.02, 7.0), (0.2, 0.03)])
def test_each_unit_has_its_share_of_a_row(gpu: Counted, host_ms: float, device_ms: float) -> None:
    gpu.shown |= {MEMORY: 2.0, f"sm__pipe_tensor_cycles_active_realtime{units.SUFFIX}": 0.123456}
    counting = units.UnitCounters()
    found = counting.shares(gpu.device.contender(host_ms, device_ms), [0, 1])
    # The events around the row take a little of it.
    assert found == pytest.approx({**dict.fromkeys(units.UNITS, 0.4), "memory": 0.8, "tensor": 0.049}, abs=0.005)
    assert list(found) == list(units.UNITS)
    counting.close()
    assert (gpu.enabled, gpu.hosts) == (False, {})


def test_what_does_not_fit_into_one_pass_is_missing(gpu: Counted) -> None:
    realtime, plain = (f"sm__pipe_tensor_cycles_active{end}{units.SUFFIX}" for end in ("_realtime", ""))
    issue = f"sm__inst_executed_realtime{units.SUFFIX}"
    gpu.passes = lambda names: 1 + ({MEMORY, realtime} <= set(names) or {MEMORY, issue} <= set(names))
    gpu.metrics = [MEMORY, units.BUSY, realtime, plain, issue]
    with units.UnitCounters() as counting:
        found = counting.shares(gpu.device.contender(0.01, 0.05), [0])
    assert found == pytest.approx({"memory": 0.4, "tensor": 0.4, "sms": 0.4}, abs=0.005)
    assert (gpu.set_up, gpu.enabled) == (1, False)


def test_sampling_is_up_before_the_row_begins(gpu: Counted) -> None:
    gpu.deaf_ms = 4.0
    with units.UnitCounters() as counting:
        assert counting.shares(gpu.device.contender(0.01, 0.05), [0])["memory"] == pytest.approx(0.4, abs=0.005)


def test_what_a_fault_in_the_choice_of_samples_would_make_of_it(gpu: Counted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "inside", lambda samples, *_: range(len(samples.start)))
    counting = units.UnitCounters()
    assert abs(counting.shares(gpu.device.contender(0.01, 0.05), [0])["memory"] - 0.4) > 0.05


def test_a_call_that_waits_for_the_device_is_not_counted(gpu: Counted) -> None:
    counting = units.UnitCounters()
    with pytest.raises(units.NotCounted, match="waited for the host"):
        counting.shares(gpu.device.contender(0.01, 0.05, waits=True), [0])


def test_samples_that_come_too_late_are_not_made_up(gpu: Counted) -> None:
    counting = units.UnitCounters()
    gpu.missing_idle_ms = 6.0
    with pytest.raises(units.NotCounted, match="end before the row does"):
        counting.shares(gpu.device.contender(0.01, 0.05), [0])


@pytest.mark.parametrize("lost", ["overflow", "chunk"])
def test_lost_samples_are_not_counted(gpu: Counted, lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counting = units.UnitCounters()
    gpu.overflow = int(lost == "overflow")
    if lost == "chunk":
        counting._sampler.capacity = 50
    with pytest.raises(units.NotCounted, match="samples were lost"):
        counting.shares(gpu.device.contender(0.01, 0.05), [0])


def test_a_call_that_fails_leaves_the_sampler_stopped(gpu: Counted) -> None:
    calls = []

    def run(_: object) -> None:
        calls.append(0)
        if len(calls) > 30:
            raise MemoryError
        gpu.device.launch(0.01, 0.05)

    with pytest.raises(MemoryError), units.UnitCounters() as counting:
        counting.shares(run, [0])
    assert (gpu.enabled, gpu.hosts) == (False, {})
    assert gpu.calls.count("cuptiPmSamplingStart") == gpu.calls.count("cuptiPmSamplingStop") > 0


@pytest.mark.parametrize(("function", "result"), [("cuptiPmSamplingEnable", 7), ("cuptiPmSamplingSetConfig", 27)])
def test_a_refusal_is_said_at_once(gpu: Counted, function: str, result: int) -> None:
    gpu.refuse[function] = result
    with pytest.raises(CountersUnavailable):
        units.UnitCounters()
    assert (gpu.enabled, gpu.hosts) == (False, {})


def test_a_gpu_without_the_metric_that_finds_the_row_is_refused(gpu: Counted) -> None:
    gpu.metrics.remove(units.BUSY)
    with pytest.raises(CountersUnavailable, match="no sm__cycles_active"):
        units.UnitCounters()


def test_text_is_of_the_busiest_and_of_what_they_work_on() -> None:
    shares = {"memory": 0.713, "l2": 0.2, "l1": 0.88, "issue": 0.74, "sms": 0.971, "warps": 0.048}
    assert units.text(shares) == "L1 88 %, issue 74 %, memory 71 %; SMs 97 %, warps 4.8 %"
    assert units.text({"memory": 0.5}) == "memory 50 %"


@pytest.mark.gpu
def test_a_copy_is_bound_by_memory_and_a_product_by_the_tensor_cores() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    try:
        counting = units.UnitCounters()
    except CountersUnavailable as error:
        pytest.skip(str(error))
    source = torch.ones(1 << 27, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with counting:
        # torch's copy_ would be done by a copy engine or by SMs, as it likes; an addition is SMs' work.
        copied = counting.shares(lambda pair: torch.add(pair[0], 1, out=pair[1]), [(source, target)])
        product = counting.shares(lambda pair: pair[0] @ pair[1], [(a, b)])
    assert copied["memory"] >= 0.7, copied
    assert copied["tensor"] < 0.05, copied
    assert product["tensor"] > 0.5, product
    assert min(copied["sms"], product["sms"]) > 0.9, (copied, product)
