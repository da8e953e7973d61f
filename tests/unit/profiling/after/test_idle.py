"""Each cause of idleness, planted alone, and how the causes divide one gap."""

from __future__ import annotations

import pytest
from synthetic_trace import Builder

from advisor.core.environment import Environment
from advisor.profiling.after.aggregate import Aggregate, aggregate

LOADER = "user:enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def causes(builder: Builder) -> dict[str, float]:
    return {i.cause: i.time_us for i in found(builder).idle}


def found(builder: Builder) -> Aggregate:
    result = aggregate(builder.trace(), Environment(device="cuda"))
    assert result.busy_us + sum(i.time_us for i in result.idle) == pytest.approx(result.step_us)
    return result


def busy_start(end: float) -> Builder:
    """A step of `end` µs whose device is busy from the start to 100 µs."""
    b = Builder()
    b.steps(0, end)
    b.op("aten::add", 0, 5)
    call = b.call("cudaLaunchKernel", 0, 2)
    b.record("first", 0, 100, call=call)
    return b


def test_waiting_for_data() -> None:
    b = busy_start(1000)
    b.op("next", 50, 800, annotation=LOADER)
    b.op("aten::add", 800, 860)
    b.launch("second", 850, 860, 1000)
    assert causes(b) == {"data": 700.0, "launch": 60.0, "copy": 0.0, "sync": 0.0, "other": 0.0}


def test_loading_on_another_thread_is_not_waiting() -> None:
    b = busy_start(300)
    b.op("Optimizer.step#SGD.step", 0, 1, annotation="user:Optimizer.step#SGD.step")
    b.op("next", 50, 280, thread=9, annotation=LOADER)
    b.op("aten::add", 90, 290)
    b.launch("second", 280, 290, 300)
    assert causes(b)["data"] == 0.0
    assert causes(b)["launch"] == 190.0


def test_host_too_slow_to_launch() -> None:
    b = busy_start(400)
    b.note("line:net.py:3", 95, 300)
    b.op("aten::mul", 110, 295)
    b.launch("second", 290, 300, 400)
    result = found(b)
    launch = next(i for i in result.idle if i.cause == "launch")
    assert launch.time_us == 200.0
    assert launch.sites[0].source == "net.py:3"


def test_drained_queue_after_a_wait() -> None:
    b = busy_start(400)
    b.note("line:train.py:9", 20, 110)
    b.op("aten::item", 22, 108)
    b.call("cudaStreamSynchronize", 30, 103)
    b.op("aten::mul", 150, 290)
    b.launch("second", 280, 290, 400)
    result = found(b)
    sync = next(i for i in result.idle if i.cause == "sync")
    assert sync.time_us == 190.0
    assert sync.sites[0].source == "train.py:9"
    assert "aten::item" in sync.sites[0].what


def test_after_a_wait_time_in_the_loader_is_still_data() -> None:
    b = busy_start(400)
    b.call("cudaStreamSynchronize", 30, 103)
    b.op("next", 150, 250, annotation=LOADER)
    b.launch("second", 280, 290, 400)
    assert causes(b) == {"data": 100.0, "launch": 0.0, "copy": 0.0, "sync": 90.0, "other": 0.0}


def test_copy_beside_no_kernel() -> None:
    b = busy_start(300)
    call = b.call("cudaMemcpyAsync", 50, 52)
    b.record("Memcpy HtoD (Pinned -> Device)", 80, 180, call=call, nbytes=1)
    call = b.call("cudaLaunchKernel", 60, 62)
    b.record("second", 200, 300, call=call)
    assert causes(b) == {"data": 0.0, "launch": 0.0, "copy": 80.0, "sync": 0.0, "other": 20.0}


def test_gaps_between_queued_kernels_are_other() -> None:
    b = busy_start(202)
    call = b.call("cudaLaunchKernel", 10, 12)
    b.record("second", 102, 202, call=call)
    assert causes(b)["other"] == 2.0


def test_long_silence_of_the_host_is_other() -> None:
    b = busy_start(2000)
    b.op("aten::mul", 1880, 1900)
    b.launch("second", 1890, 1900, 2000)
    result = causes(b)
    assert result["launch"] == 20.0  # from the operator's start to the kernel's
    assert result["other"] == 1780.0


@pytest.mark.parametrize(
    ("operator", "again", "sync"),
    [("aten::to", 0, 1455.0), ("aten::copy_", 0, 1455.0), ("aten::item", 0, 0.0), ("aten::to", 1, 175.0)],
    ids=["a metric", "copied into", "a scalar", "something else between"],
)
def test_silence_behind_a_tensor_that_was_copied_is_spent_on_it(operator: str, again: int, sync: float) -> None:
    """The device is idle from 100 µs on, the copy comes at 300, and from 425 to 1880 Python counts what it has brought."""
    b = busy_start(2000)
    b.note("line:train.py:9", 290, 425)
    b.op(operator, 300, 420)
    b.call("cudaStreamSynchronize", 310, 415)
    if again:
        b.op("aten::add", 600, 900)
    b.op("aten::mul", 1880, 1900)
    b.launch("second", 1890, 1900, 2000)
    found_ = next(i for i in found(b).idle if i.cause == "sync")
    assert found_.time_us == sync
    assert not found_.sites or found_.sites[0].source == "train.py:9"


def test_a_range_around_the_whole_step_proves_nothing() -> None:
    b = busy_start(2000)
    b.op("train_step", 0, 2000, annotation="user:train_step")
    b.op("aten::mul", 1880, 1900)
    b.launch("second", 1890, 1900, 2000)
    assert causes(b)["other"] == 1780.0
