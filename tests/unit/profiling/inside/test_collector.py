"""Real traces of a small network on the CPU, in two styles; and raw events as a GPU gives them, planted by hand."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._C._autograd import DeviceType

from advisor.core.environment import Environment
from advisor.core.profile import KernelRow
from advisor.core.trace import DramSamples, OpTable, Trace
from advisor.loop.session import Session
from advisor.loop.training import RootModule, Training
from advisor.profiling.after.aggregate import Aggregate, aggregate
from advisor.profiling.inside import collector, dramwindow, kinetosession, rawevents
from advisor.profiling.inside.annotate import step_marker
from advisor.profiling.inside.collector import TraceCollector
from advisor.profiling.inside.rawevents import read_events

CPU = torch.device("cpu")


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))  # line 1 of forward
        x = F.max_pool2d(x, 2)
        return self.fc(x.mean((2, 3)))


def modular() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 10),
    )  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def traced(model: nn.Module, name: str, clock: Callable[[], int] | None = time.time_ns, steps: int = 2) -> Trace:
    """`steps` steps of training with a functional loss; with no clock the bounds come from marks in the trace."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    x, y = torch.randn(4, 3, 16, 16), torch.zeros(4, dtype=torch.long)
    training = Training(device=CPU, roots=[RootModule(module=model, name=name)])
    session = Session(mode="profile", run_dir="", script="train.py")
    trace_collector = TraceCollector(CPU, session, training)
    bounds: list[int] = []

    def boundary(index: int) -> None:
        if clock is None:
            step_marker(index)
        else:
            bounds.append(clock())

    def step() -> None:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    trace_collector.start()
    boundary(0)
    for index in range(steps):
        step()
        boundary(index + 1)
    return trace_collector.stop(bounds)


def rows(found: Aggregate, op: str, phase: str) -> list[KernelRow]:
    return [r for r in found.kernels if r.op == op and r.phase == phase]


@pytest.fixture(scope="module")
def functional() -> tuple[Trace, Aggregate]:
    trace = traced(Functional(), "Functional")
    return trace, aggregate(trace, Environment(copy_gbps=10.0, matrix_tflops={"fp32": 0.1}))


def test_functional_style_has_modules_and_lines(functional: tuple[Trace, Aggregate]) -> None:
    _, found = functional
    source, first = inspect.getsourcelines(Functional.forward)
    convs_line = first + next(i for i, text in enumerate(source) if "conv1" in text)
    pool_line = first + next(i for i, text in enumerate(source) if "max_pool2d" in text)
    for op, module, line in (
        ("aten::convolution", "Functional.conv1", convs_line),
        ("aten::native_batch_norm", "Functional.bn1", convs_line),
        ("aten::relu", "Functional", convs_line),
        ("aten::max_pool2d_with_indices", "Functional", pool_line),
    ):
        for row in rows(found, op, "forward"):
            assert row.module == module, op
            assert row.source.endswith(f"test_collector.py:{line}"), op
        assert rows(found, op, "forward"), op


def test_backward_has_the_module_and_line_of_its_forward(functional: tuple[Trace, Aggregate]) -> None:
    _, found = functional
    for op, module, forward_op in (
        ("aten::convolution_backward", "Functional.conv1", "aten::convolution"),
        ("aten::native_batch_norm_backward", "Functional.bn1", "aten::native_batch_norm"),
        ("aten::max_pool2d_with_indices_backward", "Functional", "aten::max_pool2d_with_indices"),
        ("aten::threshold_backward", "Functional", "aten::relu"),
    ):
        backward = rows(found, op, "backward")
        assert backward, op
        assert {r.module for r in backward} == {module}
        assert {r.source for r in backward} == {r.source for r in rows(found, forward_op, "forward")}


def test_phases_are_right_and_nothing_is_counted_twice(functional: tuple[Trace, Aggregate]) -> None:
    _, found = functional
    assert {r.phase for r in found.kernels if "foreach" in r.op} == {"optimizer"}
    assert any(r.phase == "optimizer" and r.kind == "optimizer" for r in found.kernels)
    assert {r.phase for r in found.kernels if r.op.endswith("_backward")} == {"backward"}
    assert {r.phase for r in found.kernels if r.op in ("aten::_log_softmax", "aten::nll_loss_forward")} == {"forward"}
    assert sum(r.time_us for r in found.kernels) <= found.step_us
    assert sum(r.time_us for r in found.kernels) == pytest.approx(found.busy_us, rel=0.01)
    assert found.busy_us + sum(i.time_us for i in found.idle) == pytest.approx(found.step_us)


def test_shapes_give_flops_bytes_and_limits(functional: tuple[Trace, Aggregate]) -> None:
    _, found = functional
    convs = rows(found, "aten::convolution", "forward")
    product = 2 * 4 * 8 * 14 * 14 * 27
    # What the operator started (conversions, allocation) has its share of the one product.
    forward = [r for r in found.kernels if r.module == "Functional.conv1" and r.phase == "forward"]
    assert sum(r.flops for r in forward) == pytest.approx(product)
    assert {r.dtype for r in convs if r.shapes} == {"fp32"}
    assert {r.layout for r in convs if r.layout} == {"nchw"}
    # The input needs no gradient: one product.
    backward = [r for r in found.kernels if r.module == "Functional.conv1" and r.phase == "backward"]
    assert sum(r.flops for r in backward) == pytest.approx(product)
    assert found.limit_us == pytest.approx(sum(r.limit_us for r in found.kernels))
    assert found.limit_us > 0


def test_module_style_has_module_paths() -> None:
    found = aggregate(traced(modular(), "Sequential"), Environment())
    assert {r.module for r in rows(found, "aten::convolution", "forward")} == {"Sequential.0"}
    assert {r.module for r in rows(found, "aten::native_batch_norm", "forward")} == {"Sequential.1"}
    relu = rows(found, "aten::relu", "forward")
    assert {(r.module, r.module_type) for r in relu} == {("Sequential.2", "ReLU")}
    assert {r.module for r in rows(found, "aten::convolution_backward", "backward")} == {"Sequential.0"}


def test_older_versions_of_torch_give_the_same_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rawevents, "offers", lambda kind, name: False)
    trace = traced(Functional(), "Functional")
    found = aggregate(trace, Environment())
    conv = next(r for r in found.kernels if r.op == "aten::convolution" and r.shapes)
    assert conv.shapes.startswith("[[4, 3, 16, 16], [8, 3, 3, 3], [")
    assert (conv.layout, conv.module, conv.phase) == ("nchw", "Functional.conv1", "forward")
    lists = [s for name, s in zip(trace.ops.name, trace.ops.shapes, strict=True) if name.startswith("aten::_foreach")]
    assert all("[[8, 3, 3, 3]" in text for text in lists)
    assert {"forward", "backward", "optimizer"} <= set(found.phase_us)


@pytest.mark.skipif(torch.__version__ < "2.9", reason="torch 2.8 records no range that is open where the window ends")
def test_a_window_that_ends_inside_the_optimizers_step_has_its_phase() -> None:
    model = modular()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trace_collector = TraceCollector(CPU, Session(mode="profile", run_dir="", script="train.py"))
    bounds: list[int] = []
    traces: list[Trace] = []

    def boundary(*_: Any) -> None:
        bounds.append(time.time_ns())
        if len(bounds) == 1:
            trace_collector.start()
        if len(bounds) == 4:
            traces.append(trace_collector.stop(bounds[1:]))

    optimizer.register_step_post_hook(boundary)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.randn(2, 3, 8, 8)).sum().backward()
        optimizer.step()
    found = aggregate(traces[0], Environment())
    assert found.steps == 2
    steps = [r for r in found.kernels if r.op.startswith("aten::_foreach") or r.op == "aten::add_"]
    assert {r.phase for r in steps if "test_collector" in r.source and r.module == ""} == {"optimizer"}
    assert found.phase_us["optimizer"] > 0
    outside = {r.op for r in found.kernels if r.phase == "other"}
    allocating = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::ones_like", "aten::fill_"}
    assert outside <= {"aten::randn", "aten::normal_", *allocating}


# Windows that follow one another inside the range of an optimizer's step, and one of the script's own around several: without care the profiler
# writes the ends of these ranges into memory that it has given back. The lists are there for it to hit.
WINDOWS = """
import torch
from torch._C._autograd import DeviceType
from torch.autograd.profiler import record_function
from advisor.profiling.inside.collector import TraceCollector
from advisor.loop.session import Session

net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
windows, held = [], []

def boundary(*_):
    if windows:
        windows.pop().stop()
        held.append([object() for _ in range(1000)])
        del held[:-3]
    windows.append(TraceCollector(torch.device("cpu"), Session(mode="profile", run_dir="", script="train.py")))
    windows[0].start()

optimizer.register_step_post_hook(boundary)
for _ in range(10):
    with record_function("epoch"):
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.randn(2, 8)).sum().backward()
            optimizer.step()
windows.pop().stop()
print("trained")
"""


def test_a_window_may_begin_where_another_has_ended() -> None:
    """What the memory is used for by then is chance: seven of eight processes died."""
    ended = subprocess.run([sys.executable, "-c", WINDOWS], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "trained\n"), ended.stderr[-2000:]


ANOTHER_THREAD = """
import threading, torch
from advisor.profiling.inside.collector import TraceCollector
from advisor.loop.session import Session

def window():
    return TraceCollector(torch.device("cpu"), Session(mode="profile", run_dir="", script="train.py"))

def run(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

first, second = window(), window()
run(first.start)
run(lambda: print(first.stop().notes))
run(lambda: (second.start(), torch.ones(4).relu(), print("aten::relu" in second.stop().ops.name)))
"""


def test_a_thread_that_ends_with_its_window_open_takes_no_later_one_along() -> None:
    ended = subprocess.run([sys.executable, "-c", ANOTHER_THREAD], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout == "['no trace: the script now trains in another thread']\nTrue\n"


def test_a_range_that_is_open_where_the_window_ends_has_its_end_there() -> None:
    trace_collector = TraceCollector(CPU, Session(mode="profile", run_dir="", script="train.py"))
    trace_collector.start()
    with torch.autograd.profiler.record_function("epoch"):
        torch.ones(4).relu()
        trace = trace_collector.stop()
    ops = trace.ops
    (epoch,) = [i for i, text in enumerate(ops.annotation) if text == "user:epoch"]
    (relu,) = [i for i, name in enumerate(ops.name) if name == "aten::relu"]
    assert ops.start_ns[epoch] < ops.start_ns[relu] < ops.end_ns[relu] < ops.end_ns[epoch]


def test_the_size_of_a_window_is_told_while_it_is_open() -> None:
    model = modular()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    trace_collector = TraceCollector(CPU, Session(mode="profile", run_dir="", script="train.py"))
    assert trace_collector.expected_events() == 0
    trace_collector.start()
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.randn(2, 3, 8, 8)), torch.zeros(2, dtype=torch.long)).backward()
        optimizer.step()
    expected = trace_collector.expected_events()
    events = len(trace_collector.stop().ops.name)
    assert 0.5 * expected <= events <= 1.5 * expected


@pytest.mark.parametrize("clock", [time.time_ns, time.perf_counter_ns, None])
def test_step_bounds_are_on_the_traces_clock_whatever_the_hosts(clock: Callable[[], int] | None) -> None:
    trace = traced(modular(), "Sequential", clock, steps=3)
    ops, bounds = trace.ops, trace.step_bounds_ns
    assert len(bounds) == 4
    steps = [s for s, t in zip(ops.start_ns, ops.annotation, strict=True) if t.startswith("user:Optimizer.step#")]
    assert len(steps) == 3
    for i, start in enumerate(steps):
        assert bounds[i] < start < bounds[i + 1]


def test_a_bound_from_before_tracing_is_moved_to_its_start() -> None:
    early = time.time_ns() - 10**9
    times = iter([early, 0, 0])
    trace = traced(modular(), "Sequential", lambda: next(times) or time.time_ns(), steps=2)
    assert trace.step_bounds_ns[0] > early + 10**9 - 10**6
    assert trace.step_bounds_ns[0] >= min(trace.ops.start_ns)


def test_a_running_profiler_of_the_script_is_left_alone() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as theirs:
        trace = traced(modular(), "Sequential")
    assert trace.ops.name == []
    assert any("own torch profiler" in note for note in trace.notes)
    assert len(theirs.events()) > 0
    found = aggregate(trace, Environment())
    assert (found.steps, found.step_us, found.idle) == (0, 0.0, ())
    assert "no step was traced" in found.notes


def test_a_profiler_that_the_script_has_prepared_is_left_alone() -> None:
    """A schedule prepares it steps ahead: started after ours it raised, in the script's own step."""
    wait, theirs_begin = 2, 4
    plan = torch.profiler.schedule(wait=wait, warmup=theirs_begin - wait, active=2, repeat=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=plan) as theirs:
        for step in range(8):
            if step == wait + 1:
                window = TraceCollector(CPU, Session(mode="profile", run_dir="", script="train.py"))
                window.start()
            torch.ones(4).relu()
            if step == theirs_begin + 1:
                trace = window.stop()
            theirs.step()
    assert any("own torch profiler" in note for note in trace.notes)
    assert [event.name for event in theirs.events()].count("aten::relu") == 2


@pytest.mark.parametrize("ended", [True, False])
def test_a_profiler_that_the_script_starts_meanwhile_keeps_its_events(ended: bool) -> None:
    window = TraceCollector(CPU, Session(mode="profile", run_dir="", script="train.py"))
    window.start()
    with torch.autograd.profiler.profile() as theirs:
        torch.ones(4).relu()
        trace = window.stop() if not ended else None
        torch.ones(4).relu()
    trace = trace or window.stop()
    assert trace.ops.name == []
    assert any("own torch profiler" in note for note in trace.notes)
    assert [event.name for event in theirs.function_events].count("aten::relu") == 2
    assert traced(modular(), "Sequential").ops.name  # what is over is in nobody's way


def test_a_profiler_that_does_not_start_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Any) -> None:
        raise RuntimeError("CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED")

    monkeypatch.setattr(collector.autograd_profiler.profile, "_prepare_trace", refuse)
    trace = traced(modular(), "Sequential")
    assert any("MULTIPLE_SUBSCRIBERS" in note for note in trace.notes)


class RawEvent:
    """Stands in for torch's `_KinetoEvent` as a GPU session gives it."""

    def __init__(self, name: str, activity: str, start: int, duration: int, **fields: Any) -> None:
        self._fields = {
            "name": name, "activity_type": activity, "start_ns": start, "end_ns": start + duration,
            "start_thread_id": 1, "device_resource_id": 4242, "correlation_id": 0, "linked_correlation_id": 0,
            "sequence_nr": -1, "fwd_thread_id": 0, "metadata_json": "", "structured_input_shapes": [],
            "structured_input_strides": [], "dtypes": [], "concrete_inputs": [], "device_index": 0, **fields,
        }  # fmt: skip


for _name in ["name", "activity_type", "start_ns", "end_ns", "start_thread_id", "device_resource_id", "correlation_id", "linked_correlation_id", "sequence_nr", "fwd_thread_id", "metadata_json", "structured_input_shapes", "structured_input_strides", "dtypes", "concrete_inputs", "device_index"]:  # fmt: skip
    setattr(RawEvent, _name, lambda self, _name=_name: self._fields[_name])


def raw(events: Sequence[RawEvent], exported: Any = None) -> Any:
    return types.SimpleNamespace(events=lambda: events, save=lambda path: Path(path).write_text(json.dumps(exported)))


def test_raw_gpu_events_become_tables() -> None:
    metadata = '"queued": 0, "device": 0, "stream": 7, "correlation": 9, "grid": [132, 2, 1], "block": [256, 1, 1]'
    trace = read_events(
        raw([
            RawEvent("aten::mul", "cpu_op", 100, 50, correlation_id=3, structured_input_shapes=[[2, 3], []],
                     structured_input_strides=[[3, 1], []], dtypes=["float", "Scalar"]),
            RawEvent("cudaLaunchKernel", "cuda_runtime", 110, 5, correlation_id=9, linked_correlation_id=3),
            RawEvent("cudaDeviceSynchronize", "cuda_runtime", 300, 5, correlation_id=10, start_thread_id=77),
            RawEvent("vectorized_elementwise_kernel", "kernel", 130, 20, correlation_id=9, linked_correlation_id=3,
                     device_resource_id=7, metadata_json=metadata),
            RawEvent("Memcpy HtoD (Pageable -> Device)", "gpu_memcpy", 160, 20, device_resource_id=7, device_index=1,
                     metadata_json='"bytes": 4096, "memory bandwidth (GB/s)": 1.0'),
            RawEvent("Optimizer.step#SGD.step", "gpu_user_annotation", 120, 90),
            RawEvent("Optimizer.step#SGD.step", "user_annotation", 90, 100),
            RawEvent("profiler::_record_function_enter_new", "cpu_op", 90, 1),
            RawEvent("[memory]", "cpu_instant_event", 95, 0),
        ]),
        "cuda",
    )  # fmt: skip
    assert trace.ops.name == ["aten::mul", "Optimizer.step#SGD.step"]
    assert trace.ops.annotation == ["", "user:Optimizer.step#SGD.step"]
    assert trace.kernels.device == [0, 1]
    assert (trace.ops.shapes[0], trace.ops.dtypes[0], trace.ops.strides[0]) == (
        "[[2, 3], []]",
        "float,Scalar",
        "[[3, 1], []]",
    )
    assert trace.kernels.name == ["vectorized_elementwise_kernel", "Memcpy HtoD (Pageable -> Device)"]
    assert trace.kernels.grid == ["132x2x1", ""]
    assert trace.kernels.block == ["256x1x1", ""]
    assert trace.kernels.nbytes == [0, 4096]
    assert trace.kernels.op == [3, 0]
    assert trace.runtime.thread == [1, 1]  # the second call's thread is known from the system's thread id
    assert (trace.launches, trace.launches_matched) == (1, 1)
    columns = {len(getattr(trace.ops, name)) for name in trace.ops.__dataclass_fields__}
    assert columns == {2}


def test_records_without_time_stamps_are_dropped_and_counted() -> None:
    good = RawEvent("k", "kernel", 100, 10, correlation_id=1)
    trace = read_events(raw([good, RawEvent("k", "kernel", 0, 10), RawEvent("k", "kernel", 100, 0)]), "cuda")
    assert trace.kernels.name == ["k"]
    assert any(note.startswith("2 trace records") for note in trace.notes)


def test_dropped_kernels_lower_the_coverage() -> None:
    events = [RawEvent("cudaLaunchKernel", "cuda_runtime", i, 1, correlation_id=i) for i in range(1, 11)]
    events += [RawEvent("k", "kernel", i, 1, correlation_id=i) for i in range(1, 10)]
    trace = read_events(raw(events), "cuda")
    assert (trace.launches, trace.launches_matched) == (10, 9)


def test_no_device_records_on_a_gpu_are_a_failure() -> None:
    trace = read_events(raw([RawEvent("aten::mul", "cpu_op", 100, 50)]), "cuda")
    assert any("no device records" in note for note in trace.notes)


def test_activities_are_told_apart_without_activity_type() -> None:
    class Old(RawEvent):
        activity_type = None

        def device_type(self) -> Any:
            cuda, cpu = DeviceType.CUDA, DeviceType.CPU
            return cuda if self._fields["activity_type"] in ("kernel", "gpu_memcpy", "gpu_user_annotation") else cpu

        def is_user_annotation(self) -> bool:
            return "annotation" in self._fields["activity_type"]

    events = [
        Old("aten::mul", "cpu_op", 100, 50, correlation_id=1),
        Old("mine", "user_annotation", 100, 50, correlation_id=2),
        Old("Command Buffer Full", "overhead", 100, 50),
        Old("[memory]", "cpu_instant_event", 100, 50, correlation_id=3),
        Old("mine", "gpu_user_annotation", 100, 50),
        Old("cudaLaunchKernel", "cuda_runtime", 110, 5, correlation_id=9),
        Old("k", "kernel", 130, 20, correlation_id=9),
        Old("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 150, 20),
    ]
    trace = read_events(raw(events), "cuda")
    assert trace.ops.annotation == ["", "user:mine"]
    assert trace.runtime.name == ["cudaLaunchKernel"]
    assert trace.kernels.name == ["k", "Memcpy DtoH (Device -> Pinned)"]


def test_geometry_comes_from_an_exported_trace_where_events_do_not_carry_it() -> None:
    fields = {"correlation": 9, "grid": [8, 1, 1], "block": [64, 1, 1]}
    exported = {"traceEvents": [{"cat": "kernel", "name": "k", "args": fields}, {"cat": "cpu_op", "name": "k"}]}
    trace = read_events(raw([RawEvent("k", "kernel", 100, 10, correlation_id=9)], exported), "cuda")
    assert (trace.kernels.grid, trace.kernels.block) == (["8x1x1"], ["64x1x1"])


class Counters:
    """Stands in for DramCounters, on the trace's own clock or, with `ahead_ns`, on another."""

    note = "3 samples lost"
    interval_ns = 20_000
    closed = False
    window_s, ahead_ns = 0.0, 0

    def __init__(self, device_index: int, *, window_s: float) -> None:
        Counters.window_s = window_s

    def start(self) -> None: ...

    def stop(self) -> DramSamples:
        now = time.time_ns() + self.ahead_ns
        return DramSamples(start_ns=[now], end_ns=[now + 20_000], read_bytes=[3.0], write_bytes=[4.0])

    def close(self) -> None:
        Counters.closed = True


def with_counters(monkeypatch: pytest.MonkeyPatch, made: Any) -> TraceCollector:
    monkeypatch.setattr(dramwindow, "DramCounters", made)
    monkeypatch.setattr(collector, "cuda_usable", lambda device: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return TraceCollector(torch.device("cuda", 0), Session(mode="profile", run_dir="", script="train.py"), step_s=0.5)


def test_dram_samples_are_in_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    trace_collector = with_counters(monkeypatch, Counters)
    trace_collector.start()
    trace = trace_collector.stop()
    assert trace.dram.read_bytes == [3.0]
    assert any("3 samples lost" in note for note in trace.notes)
    assert Counters.closed
    assert Counters.window_s == pytest.approx(2 * 4 * 0.5)  # three steps and the one that the start disturbs


def test_a_window_of_unknown_bounds_ends_before_the_last_burst() -> None:
    names = ["advisor:burst", collector.CLOCK, "aten::conv2d", "advisor:burst"]
    ops = OpTable(
        name=names, start_ns=[10, 20, 30, 80], end_ns=[18, 22, 60, 90], annotation=["burst", "clock", "", "burst"]
    )
    trace = Trace(device="cuda", step_bounds_ns=[], ops=ops)
    collector.set_bounds(trace, [], [])
    assert trace.step_bounds_ns == [22, 80]


def test_dram_samples_on_a_clock_in_doubt_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Counters, "ahead_ns", 10**10)
    trace_collector = with_counters(monkeypatch, Counters)
    trace_collector.start()
    trace = trace_collector.stop()
    assert trace.dram == DramSamples()
    assert any("counter clock could not be aligned" in note for note in trace.notes)


def test_counters_that_are_refused_are_a_note_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(index: int, *, window_s: float) -> None:
        raise PermissionError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    trace_collector = with_counters(monkeypatch, refused)
    trace_collector.start()
    trace = trace_collector.stop()
    assert any("INSUFFICIENT_PRIVILEGES" in note for note in trace.notes)
    assert trace.dram.start_ns == []


@pytest.mark.parametrize(("wanted", "alive", "expected"), [(True, False, "1"), (True, True, "0"), (False, False, "0")])
def test_cupti_goes_down_after_a_trace_but_not_beside_graphs_or_counters(monkeypatch, wanted, alive, expected) -> None:
    monkeypatch.setenv("TEARDOWN_CUPTI", "")  # put back afterwards
    monkeypatch.delenv("TEARDOWN_CUPTI")
    monkeypatch.setattr(kinetosession.graphs, "alive", lambda: alive)
    assert kinetosession.choose_teardown("", wanted=wanted) == os.environ["TEARDOWN_CUPTI"] == expected
    # Each trace decides anew, as long as nobody else does.
    monkeypatch.setattr(kinetosession.graphs, "alive", lambda: True)
    assert kinetosession.choose_teardown(expected, wanted=True) == os.environ["TEARDOWN_CUPTI"] == "0"
    os.environ["TEARDOWN_CUPTI"] = "1"
    assert kinetosession.choose_teardown("0", wanted=True) == ""
    assert os.environ["TEARDOWN_CUPTI"] == "1"


def test_what_the_user_says_about_cupti_stays(monkeypatch) -> None:
    monkeypatch.setenv("TEARDOWN_CUPTI", "0")
    monkeypatch.setattr(kinetosession.graphs, "alive", lambda: False)
    assert kinetosession.choose_teardown("", wanted=True) == ""
    assert os.environ["TEARDOWN_CUPTI"] == "0"


def test_cupti_stays_where_the_process_ends_after_the_trace(monkeypatch) -> None:
    """Taken down in the last moments of a process it keeps that from ending."""
    wanted: list[bool] = []
    monkeypatch.setattr(kinetosession, "choose_teardown", lambda ours, *, wanted: seen(wanted))
    monkeypatch.setattr(collector, "cuda_usable", lambda device: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(collector.TraceCollector, "open_counters", lambda *_: None)

    def seen(value: bool) -> str:
        wanted.append(value)
        raise RuntimeError("enough")

    for lasting in (True, False):
        session = Session(mode="profile", run_dir="", script="train.py", counters=False)
        collector.TraceCollector(torch.device("cuda", 0), session, lasting=lasting).start()
    assert wanted == [True, False]


def test_the_end_of_a_trace_waits_until_cupti_is_down(monkeypatch) -> None:
    queries: list[int] = []
    threads = iter([8, 8, 8, 7])

    class Stream:
        def query(self) -> bool:
            queries.append(1)
            return True

    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(kinetosession, "thread_count", lambda: next(threads))
    monkeypatch.setattr(kinetosession, "TEARDOWN_LEAST_S", 0.0)
    kinetosession.see_cupti_down(7)
    assert len(queries) == 4
    # A thread of somebody else's that stays keeps nobody waiting for long.
    monkeypatch.setattr(kinetosession, "thread_count", lambda: 8)
    monkeypatch.setattr(kinetosession, "TEARDOWN_MOST_S", 0.05)
    kinetosession.see_cupti_down(7)


@pytest.mark.parametrize(
    ("call", "passes"),
    [
        (lambda x: F.pad(x, (1, 1, 1, 1)), 3 + (66 * 66) / (64 * 64) - 1),  # filled, then x copied into it
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), 2),
        (lambda x: F.adaptive_avg_pool2d(x, 1), 1),
        (lambda x: F.cross_entropy(x, torch.zeros(1, 64, 64, dtype=torch.long)), 2 + 1 / 8 + 2 / 8),
        (lambda x: F.linear(x, torch.zeros(64, 64)), 2),
        (lambda x: x.to("cpu"), 0),
        (lambda x: F.instance_norm(x), 2),
    ],
)
def test_bytes_of_an_operator_that_leaves_its_work_to_others_count_once(
    call: Callable[[torch.Tensor], Any], passes: float
) -> None:
    held_to(call, passes)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: (
            x.mean((2, 3), keepdim=True).expand_as(x).div(4096.0)
        ),  # as backward of a mean, and so of global pooling
        lambda x: x.sum((2, 3), keepdim=True).expand_as(x).contiguous(),
        lambda x: x.sum((2, 3), keepdim=True).expand_as(x).clone(),
        lambda x: torch.empty_like(x).copy_(x.sum((2, 3), keepdim=True).expand_as(x)),
    ],
)
def test_a_tensor_that_was_expanded_is_read_as_what_is_in_memory(call: Callable[[torch.Tensor], Any]) -> None:
    held_to(call, 2)  # one pass over x and one over the result


def held_to(call: Callable[[torch.Tensor], Any], passes: float) -> None:
    """The call's least bytes are so many passes over its argument."""
    x = torch.ones(1, 8, 64, 64)
    window = TraceCollector(CPU, Session(mode="profile", run_dir="", script="train.py"))
    window.start()
    bounds = [time.time_ns()]
    call(x)
    trace = window.stop([*bounds, time.time_ns()])
    found = aggregate(trace, Environment(copy_gbps=1.0, matrix_tflops={"fp32": 1000.0}))
    nbytes = sum(row.modelled_bytes for row in found.kernels)
    assert nbytes / (4 * x.numel()) == pytest.approx(passes, rel=0.15)
    assert found.limit_us == pytest.approx(nbytes / 1e3)
