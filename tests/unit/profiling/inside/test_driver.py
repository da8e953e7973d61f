"""The profile mode's phases, and what is on disk when it ends early. The loop is real; the collector is a fake."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from advisor.core import storage
from advisor.core.held import HELD_FILE, MemoryLook
from advisor.core.precision import PRECISION_FILE
from advisor.core.trace import Trace
from advisor.loop import stop, timing
from advisor.loop.attach import Attached, attach_training
from advisor.loop.records import (
    FACTS_FILE,
    STEPS_FILE,
    TRACE_FILE,
    FactsRecord,
    StepsRecord,
    load_trace,
)
from advisor.loop.session import Session
from advisor.loop.training import Draw, StepEvent
from advisor.profiling.inside import driver as module
from advisor.profiling.inside import timed, traced
from advisor.profiling.inside.driver import ProfileDriver


class FakeCollector:
    """Notes what it is asked; `fail` names the call that raises."""

    fail = ""
    bounds: list[int]
    started = 0
    events_a_step = 0

    def expected_events(self) -> int:
        return self.events_a_step

    def settle(self) -> None:
        """No line is looked for."""

    def __init__(self, *args: object, **options: object) -> None:
        if self.fail == "init":
            raise OSError("planted")

    def start(self) -> None:
        type(self).started += 1
        if self.fail == "start":
            raise OSError("planted")

    def stop(self, bounds: list[int]) -> Trace:
        if self.fail == "stop":
            raise OSError("planted")
        type(self).bounds = bounds
        return Trace(device="cpu", step_bounds_ns=bounds)


Start = Callable[..., ProfileDriver]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    torch.set_num_threads(1)
    gc.collect()
    fake = types.ModuleType("advisor.profiling.inside.collector")
    fake.TRACED_SLOWDOWN = 2.0
    monkeypatch.setattr("advisor.profiling.inside.rawevents.DETAIL_LIMIT", 1000)
    fake.TraceCollector = type("Collector", (FakeCollector,), {"bounds": []})
    monkeypatch.setitem(sys.modules, "advisor.profiling.inside.collector", fake)
    # Writing takes longer than these tiny steps: what it disturbs is another test's matter.
    monkeypatch.setattr("advisor.loop.interval.LISTENER_NS", 10**12)
    made = []

    def begin(**options: object) -> ProfileDriver:
        values: dict[str, object] = {
            "mode": "profile",
            "run_dir": str(tmp_path),
            "script": "x",
            "warmup": 5,
            "steps": 6,
        }
        session = Session(**{**values, **options})
        training, watcher = attach_training(session)
        assert Attached.discovery is not None
        driver = ProfileDriver(training, session, watcher, Attached.discovery)
        training.on_step.append(driver.on_step)
        watcher.patches.on_fault.append(driver._on_fault)
        made.append(driver)
        return driver

    yield begin
    for driver in reversed(made):  # the later one has wrapped what the earlier one put in place
        driver.watcher.detach()
        driver._let_go()
    Attached.training = Attached.watcher = Attached.discovery = None
    stop.forget()


def train(steps: int) -> int:
    """Steps done before the script was stopped."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for done in range(steps):
        try:
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()
        except SystemExit:
            return done
    return steps


def collector() -> type[FakeCollector]:
    found: type[FakeCollector] = sys.modules["advisor.profiling.inside.collector"].TraceCollector
    return found


def steps_record(folder: Path) -> StepsRecord:
    return storage.load(folder / STEPS_FILE, StepsRecord)


def test_the_phases_follow_each_other_and_the_script_is_stopped(start: Start, tmp_path: Path) -> None:
    driver = start(detail_steps=2)
    # 5 boundaries of warm-up, 6 timed, 1 that the profiler's start disturbs, 2 traced: the 14th stops the script.
    assert train(100) == 13
    assert driver.phase == "done"
    record = steps_record(tmp_path)
    assert (record.complete, record.provisional, record.kind) == (True, False, "optimizer")
    assert (record.steps_seen, record.warmup) == (14, 5)
    assert record.step_us is not None
    assert record.step_us.n == len(record.losses) == len(record.loader_us) == len(record.backwards) == 6
    assert record.first_step_us is not None
    assert record.first_step_us > 0
    assert len(record.traced_wall_us) == 2
    assert record.timed is not None
    assert record.traced is not None
    assert record.timed.end_unix_ns <= record.traced.start_unix_ns
    assert record.timed.start_monotonic_ns < record.timed.end_monotonic_ns
    assert len(load_trace(tmp_path / TRACE_FILE).step_bounds_ns) == 3
    assert storage.load(tmp_path / FACTS_FILE, FactsRecord).model.roots == ("Linear",)
    told = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    phases = [event["phase"] for event in told if event["event"] == "phase"]
    assert list(dict.fromkeys(phases)) == ["warm-up", "timed", "traced", "reading the trace"]
    assert [event["event"] for event in told][-2:] == ["measured", "stopped"]


@pytest.mark.parametrize(
    ("ordered", "more", "files"),
    [(("course",), 1, {HELD_FILE}), (("course", "precision"), 2, {HELD_FILE, PRECISION_FILE})],
)
def test_looks_behind_the_trace_take_a_step_each(
    start: Start, tmp_path: Path, ordered: tuple[str, ...], more: int, files: set[str]
) -> None:
    driver = start(detail_steps=2, **dict.fromkeys(ordered, True))
    assert train(100) == 13 + more
    assert driver.phase == "done"
    assert {name for name in (HELD_FILE, PRECISION_FILE) if (tmp_path / name).exists()} == files
    found = storage.load(tmp_path / HELD_FILE, MemoryLook)
    assert found.course is not None
    assert found.of("parameter") == 4 * (3 * 2 + 2)


def test_a_script_that_ends_before_the_looks_are_over_is_measured_all_the_same(start: Start, tmp_path: Path) -> None:
    driver = start(detail_steps=2, course=True)
    assert train(14) == 14
    assert driver.phase == "watched"
    assert steps_record(tmp_path).complete
    driver.at_exit()
    assert steps_record(tmp_path).complete
    assert not (tmp_path / HELD_FILE).exists()


def test_a_look_that_fails_is_a_note(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("advisor.profiling.inside.held.Look.begin", lambda look: 1 / 0)
    start(detail_steps=2, course=True)
    assert train(100) == 13
    assert "a look behind the trace failed: ZeroDivisionError: division by zero" in steps_record(tmp_path).notes


def test_several_ranks_take_no_step_more(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    start(course=True, precision=True)
    assert train(100) == 5 + 6 + 1 + 3 - 1
    assert not (tmp_path / HELD_FILE).exists()


def test_with_keep_running_all_hooks_are_taken_back(start: Start, tmp_path: Path) -> None:
    before = nn.Module.__call__
    driver = start(keep_running=True)
    assert train(40) == 40
    assert nn.Module.__call__ is before
    assert steps_record(tmp_path).complete
    assert driver.training.roots == []


@pytest.mark.parametrize("call", ["init", "start", "stop"])
def test_a_collector_that_fails_costs_the_trace_only(start: Start, tmp_path: Path, call: str) -> None:
    start()
    collector().fail = call
    assert train(100) < 100
    record = steps_record(tmp_path)
    assert record.complete
    assert record.step_us is not None
    assert any("no trace: OSError: planted" in note for note in record.notes)
    assert not (tmp_path / TRACE_FILE).exists()


def test_no_trace_when_none_is_wanted(start: Start, tmp_path: Path) -> None:
    start(detail_steps=0)
    assert train(100) == 10
    assert collector().started == 0
    assert steps_record(tmp_path).complete


@pytest.mark.parametrize(
    ("steps", "phase", "provisional"), [(3, "warm-up", True), (8, "timed", False), (12, "traced", False)]
)
def test_an_early_end_leaves_what_there_is(
    start: Start, tmp_path: Path, steps: int, phase: str, provisional: bool
) -> None:
    driver = start()
    assert train(steps) == steps
    driver.at_exit()
    record = steps_record(tmp_path)
    assert (record.phase, record.provisional, record.complete, record.steps_seen) == (phase, provisional, False, steps)
    assert record.wall_us is not None
    assert (tmp_path / FACTS_FILE).exists()


@pytest.mark.parametrize(("steps", "kept"), [(12, False), (13, True)])
def test_what_was_traced_of_no_whole_step_is_not_told_as_one(
    start: Start, tmp_path: Path, steps: int, kept: bool
) -> None:
    """As of a script that dies in an evaluation, behind the step that the profiler's start has disturbed."""
    driver = start()
    assert train(steps) == steps
    driver.at_exit()
    assert collector().started == 1
    assert (tmp_path / TRACE_FILE).exists() == kept
    assert steps_record(tmp_path).step_us is not None


def test_a_process_without_steps_leaves_anothers_record_alone(start: Start, tmp_path: Path) -> None:
    (tmp_path / STEPS_FILE).write_text("another's")
    start().at_exit()
    assert (tmp_path / STEPS_FILE).read_text() == "another's"


@pytest.mark.parametrize("keep_running", [True, False])
def test_a_fault_leaves_what_there_is(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep_running: bool
) -> None:
    """The training goes on where it is the user's own; one that was to be measured only ends."""
    driver = start(keep_running=keep_running)

    def fail(*args: object) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(driver, "_time", fail)
    assert (train(30) == 30) == keep_running
    assert stop.requested() != keep_running
    record = steps_record(tmp_path)
    assert not record.complete
    assert record.wall_us is not None
    assert any("ZeroDivisionError: planted" in note for note in record.notes)


def test_a_loss_that_is_not_a_number_is_written_as_none(start: Start, tmp_path: Path) -> None:
    start()
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        while True:
            (model(torch.randn(4, 3)).sum() * float("nan")).backward()
            optimizer.step()

    with pytest.raises(SystemExit):
        loop()
    assert json.loads((tmp_path / STEPS_FILE).read_text())["losses"] == [None] * 6


def test_ranks_stop_by_counting_alone(start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    driver = start(deadline_unix_s=1.0)  # a clock of its own must not stop one rank before the others
    assert not driver.records
    assert train(100) == 5 + 6 + 1 + 3 - 1
    assert not (tmp_path / STEPS_FILE).exists()
    assert collector().started == 0


class Ahead:
    """A CUDA event that the device has not come to; torch raises for it."""

    def elapsed_time(self, other: object) -> float:
        raise RuntimeError("Both events must be completed before calculating elapsed time.")

    def synchronize(self) -> None:
        raise AssertionError("waited for the device")


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_written_in_between_asks_no_event_that_the_device_has_not_come_to(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ranks: int
) -> None:
    """On two H200s each rank had a loader whose batches came faster than the device trained: advisor switched itself off."""
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    driver = start()
    plain = driver.on_step

    def seen(step: StepEvent) -> None:
        event: Any = Ahead()
        plain(replace(step, draws=(Draw(before=(event, 0), after=(event, 1)),)))

    driver.training.on_step[driver.training.on_step.index(plain)] = seen
    monkeypatch.setattr(driver, "_measure", lambda: None)  # it waits for the device first
    train(100)
    assert driver.watcher.patches.fault is None
    assert driver.phase == "done"
    assert (tmp_path / STEPS_FILE).exists()


def test_no_rank_waits_by_its_own_clock_until_loader_workers_have_settled(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProfileDriver, "is_settled", lambda self, step: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    start()
    assert train(100) == 5 + 6 + 1 + 3 - 1


def test_a_group_that_is_made_late_counts_like_a_launchers(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning starts the other ranks from the first, after this one's hooks are there."""
    driver = start(deadline_unix_s=1.0)
    assert driver.records
    assert not driver.in_step
    for name, value in {"is_initialized": True, "get_rank": 1, "get_world_size": 2}.items():
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    assert driver.in_step  # boundaries are counted, so that all ranks stop at the same one
    assert not start().records


def test_an_evaluations_memory_and_graphs_are_not_the_steps(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    graphs = [4]
    monkeypatch.setattr(timed.MemoryProbe, "begin_anew", lambda self, steps: begun.append(steps))
    monkeypatch.setattr(timed, "compiled_graphs", lambda: graphs[0])
    start()
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loop() -> None:
        for done in range(100):
            if done == 8:  # the third of the timed steps
                model.eval()
                with torch.no_grad():
                    model(torch.randn(4, 3))
                model.train()
                graphs[0] += 2
            graphs[0] += done == 9
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()

    with pytest.raises(SystemExit):
        loop()
    assert len(begun) == 1
    assert storage.load(tmp_path / FACTS_FILE, FactsRecord).model.recompiles == 1


def test_slow_steps_need_fewer(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WARMUP_S", 0.0)
    monkeypatch.setattr(module, "TIMED_S", 0.0)
    start(warmup=50, steps=50)
    assert train(200) < 20
    record = steps_record(tmp_path)
    assert record.complete
    assert record.step_us is not None
    assert record.step_us.n >= module.MIN_TIMED


def test_in_a_short_search_slow_steps_get_less_time(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, name in ((module, "WARMUP_S"), (module, "TIMED_S"), (traced, "TRACED_S")):
        monkeypatch.setattr(where, name, 1e3)  # which no step here takes
    start(warmup=20, steps=20)
    whole = train(200)
    start(warmup=20, steps=20, pace=1e-9)
    assert train(200) < whole - 2 * (20 - module.LOOK_STEPS - 1 - module.MIN_TIMED)


def test_a_deadline_ends_the_measurement(start: Start, tmp_path: Path) -> None:
    start(deadline_unix_s=1.0)
    assert train(100) < 8
    assert steps_record(tmp_path).wall_us is not None


def test_a_handful_of_steps_is_timed_and_its_last_traced(start: Start, tmp_path: Path) -> None:
    driver = start(brief=True, warmup=1, steps=2, detail_steps=1)
    # 1 boundary of warm-up, 2 timed, 1 that the profiler's start disturbs, 1 traced.
    assert train(100) == 4
    assert driver.phase == "done"
    record = steps_record(tmp_path)
    assert (record.complete, record.steps_seen, record.warmup) == (True, 5, 1)
    assert len(load_trace(tmp_path / TRACE_FILE).step_bounds_ns) == 2
    assert any("so few steps" in note for note in record.notes)


def test_a_brief_script_is_not_searched_for_steps_fit_to_be_timed(start: Start, tmp_path: Path) -> None:
    driver = start(brief=True, warmup=5, steps=3, detail_steps=1)
    driver.training.on_step.insert(0, lambda step: setattr(step, "clean", False))
    assert train(100) == 9 + traced.MAX_RESTARTS  # of the traced window alone
    assert driver.phase == "done"
    assert not any("so few steps" in note for note in steps_record(tmp_path).notes)


@pytest.mark.parametrize(
    ("events", "traced"),
    [
        (100, 4),
        pytest.param(200, 4, marks=pytest.mark.long),
        (250, 3),
        pytest.param(400, 1, marks=pytest.mark.long),
        (5000, 1),
    ],
)
def test_a_window_of_too_many_events_is_shortened(start: Start, tmp_path: Path, events: int, traced: int) -> None:
    collector().events_a_step = events
    start(detail_steps=4)
    # 5 boundaries of warm-up, 6 timed, 1 that the profiler's start disturbs, then the traced ones.
    assert train(100) == 5 + 6 + traced
    assert len(collector().bounds) == traced + 1
    record = steps_record(tmp_path)
    assert record.complete
    assert any("events of the profiler" in note for note in record.notes) == (traced < 4)


def test_a_window_ends_at_its_boundary_on_both_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def now(ns: int) -> None:
        for name, start in (("perf_counter_ns", 0), ("time_ns", 10**18), ("monotonic_ns", 10**12)):
            monkeypatch.setattr(timing.time, name, lambda start=start: start + ns)

    def boundary(ns: int) -> StepEvent:
        return StepEvent(index=0, host_ns=ns, event=None, clean=True)

    now(1500)  # the listener comes 500 ns after the boundary
    begun = timing.window(boundary(1000))
    now(9700)
    window = timing.window(boundary(9000), begun)
    assert (window.start_unix_ns - 10**18, window.end_unix_ns - 10**18) == (1000, 9000)
    assert (window.start_monotonic_ns - 10**12, window.end_monotonic_ns - 10**12) == (1000, 9000)


def smooth_dice(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((prediction - target) ** 2).mean()


@pytest.mark.parametrize("what", ["loss", "update", "model"])
def test_what_compiles_anew_is_told_whatever_part_of_the_script_it_is(start: Start, tmp_path: Path, what: str) -> None:
    """Only a loss was compiled, with three recompilations in the timed steps, and the rule asked for a compiled model."""
    torch._dynamo.reset()
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rates = iter(range(1, 1000))
    loss = torch.compile(smooth_dice, backend="eager", dynamic=False) if what == "loss" else smooth_dice
    scale = torch.compile(lambda p, by: p * by, backend="eager", dynamic=False)
    net = torch.compile(model, backend="eager", dynamic=False) if what == "model" else model
    start(warmup=5, steps=6)

    def loop() -> None:
        for step in range(60):
            grown = 4 + step // 3  # as in training on images that grow
            rows = grown if what == "model" else 4
            value = loss(net(torch.randn(rows, 3)), torch.zeros(rows, 2))
            if what == "loss":
                value = value + loss(torch.zeros(grown, 2), torch.zeros(grown, 2))
            optimizer.zero_grad()
            value.backward()
            if what == "update":
                scale(model.weight.grad, next(rates) // 3)  # a Python number that changes
            optimizer.step()

    with pytest.raises(SystemExit):
        loop()
    facts = storage.load(tmp_path / FACTS_FILE, FactsRecord).model
    assert facts.recompiles
    assert facts.compiled is (what == "model")
    name = {"loss": "smooth_dice", "update": "<lambda>", "model": "a module"}[what]
    told = [site for site in facts.compilations if name in site.what]
    assert told
    assert all(site.time_us > 0 for site in told)
    assert told[0].source.startswith("tests/unit/profiling/inside/test_driver.py:") is (what != "model")


@pytest.mark.parametrize("window", [1, 3, 5, 8, 20, 200])
def test_readings_of_memory_leave_two_of_three_steps_alone(window: int) -> None:
    """A reading may hold up the step behind it: of a test's few steps none was left that counted."""
    due = [step for step in range(1, window + 1) if timed.reading_is_due(step, window)]
    assert len(due) <= max(window // 3, 0)
    assert all(b - a >= 3 for a, b in itertools.pairwise(due))
    if window >= 20:
        assert len(due) >= 5
