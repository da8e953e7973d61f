"""One traced step as rows: idle time by cause, streams, copies, host threads."""

from __future__ import annotations

from synthetic_trace import Builder, resnet_like

from advisor.core.environment import Environment
from advisor.core.timeline import CALLS, COPIES, HOST, IDLE, STREAM
from advisor.profiling.after.aggregate import aggregate
from advisor.profiling.after.timeline import of_run, timeline

CUDA = Environment(device="cuda")


def two_steps() -> Builder:
    """Two steps of 100 and 60 µs: a copy, a kernel in a module, a wait."""
    b = Builder()
    b.bounds += [b_ns(0), b_ns(100), b_ns(160)]
    for at in (0, 100):
        copy = b.call("cudaMemcpyAsync", at + 2, at + 4)
        b.record("Memcpy HtoD (Pinned -> Device)", at + 4, at + 9, call=copy, nbytes=640)
        b.note("module:conv1|Conv2d", at + 10, at + 30)
        b.note("line:train.py:7", at + 11, at + 29)
        b.op("aten::conv2d", at + 12, at + 28)
        b.launch("sm90_fprop", at + 14, at + 20, at + 40)
    return b


def b_ns(us: float) -> int:
    from synthetic_trace import BASE, US

    return BASE + int(us * US)


def rows(found, kind):
    return [row for row in found.rows if row.kind == kind]


def test_a_step_has_rows_for_streams_copies_idle_time_and_the_host():
    found = timeline(two_steps().trace(), CUDA)
    assert (found.number, found.steps, found.length_ns) == (2, 2, 60_000)
    (stream,) = rows(found, STREAM)
    assert [(e.name, e.key, e.start_ns, e.end_ns) for e in stream.events] == [("sm90_fprop", "conv", 20_000, 40_000)]
    assert stream.events[0].detail.split("\n")[:2] == ["conv1", "train.py:7"]
    (copies,) = rows(found, COPIES)
    assert [(e.name, e.detail) for e in copies.events] == [("copy to the GPU", "640 B")]
    (host,) = rows(found, HOST)
    assert [(e.name, e.key, e.depth) for e in host.events] == [
        ("conv1 (Conv2d)", "module", 0), ("train.py:7", "line", 1), ("aten::conv2d", "op", 2),
    ]  # fmt: skip
    assert len(rows(found, CALLS)[0].events) == 2


def test_idle_time_on_it_is_that_of_the_report():
    trace = resnet_like(2_000).trace()
    found = timeline(trace, CUDA, whole=True)
    (idle,) = rows(found, IDLE)
    told = {cause.cause: cause.time_us for cause in aggregate(trace, CUDA).idle if cause.time_us > 0}
    shown: dict[str, float] = {}
    for event in idle.events:
        shown[event.key] = shown.get(event.key, 0.0) + (event.end_ns - event.start_ns) / 1e3 / found.steps
    assert {cause: round(time, 3) for cause, time in told.items()} == {c: round(t, 3) for c, t in shown.items()}
    assert shown


def test_of_too_many_events_the_shortest_of_the_host_are_left_out_and_counted():
    whole = timeline(two_steps().trace(), CUDA)
    found = timeline(two_steps().trace(), CUDA, most=whole.events - 1)
    assert found.left_out >= 1
    assert found.events == whole.events - found.left_out
    assert {e.key for row in rows(found, HOST) for e in row.events} >= {"module", "line"}


def test_without_a_traced_step_there_is_none(tmp_path):
    assert timeline(Builder().trace(), CUDA) is None
    assert of_run(tmp_path, CUDA) is None
