"""Traces inside a training that goes on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from advisor.core.trace import Trace
from advisor.loop.session import Session
from advisor.loop.training import StepEvent, Training
from advisor.trials.kept import KeptChanges
from advisor.trials.live import trace
from advisor.trials.live.loop import Loop


def test_no_profiler_begins_at_the_boundary_where_another_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges that enclose a boundary (compiled code's, say) have their ends written by whichever profiler is on then."""
    seen: list[tuple[str, int]] = []
    boundary = 0

    class Empty:
        def __init__(self, *_: Any) -> None:
            pass

        def start(self) -> None:
            seen.append(("start", boundary))

        def stop(self, bounds: list[int]) -> Trace:
            seen.append(("stop", boundary))
            return Trace(device="cpu", step_bounds_ns=bounds, notes=[])

    monkeypatch.setattr(trace, "TraceCollector", Empty)
    training, session = Training(device=torch.device("cpu")), Session(mode="search", run_dir="", script="train.py")
    loop = Loop(training, session, None, lambda _: pytest.fail("none"), KeptChanges(training, ()))
    course, found = trace.traced_step(loop), []
    next(course)
    while not found:
        boundary += 1
        try:
            course.send(StepEvent(index=boundary, host_ns=0, event=None, clean=True))
        except StopIteration as done:
            found.append(done.value)
    assert found == [None]
    ends = [at for what, at in seen if what == "stop"]
    assert len(ends) > 1
    assert not set(ends) & {at for what, at in seen if what == "start"}
    assert boundary > ends[-1]  # nor does one of whatever comes next
