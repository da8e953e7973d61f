"""The profile mode in a loop of CuPy's arrays, on NumPy's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stub_cupy

from advisor.core import storage
from advisor.cupy_loops import attach
from advisor.cupy_loops.period import REPEATS
from advisor.cupy_loops.watch import Watcher
from advisor.loop import stop
from advisor.loop.patches import Patches
from advisor.loop.records import FACTS_FILE, STEPS_FILE, TRACE_FILE, FactsRecord, StepsRecord, load_trace
from advisor.loop.session import Session
from advisor.profiling.inside.cupy_surface import Surface


def train(cp: Any, steps: int, after: Any = None) -> None:
    """A regression by hand, with a print now and then."""
    rng = np.random.default_rng(0)
    w = cp.zeros((4, 1))
    for i in range(steps):
        x = cp.array(rng.normal(size=(8, 4)))
        error = x.dot(w) - 1.0
        loss = (error * error).mean()
        w -= 0.1 * x.transpose().dot(error) / 8
        if i % 7 == 6:
            float(loss)
        if after is not None:
            after()


def test_every_call_is_told_once_and_everything_is_taken_back() -> None:
    cp, seen = stub_cupy.module(), []
    before, methods = dict(vars(cp)), dict(vars(cp.ndarray))

    def handler(name: str, plain: Any, args: Any, kwargs: Any) -> Any:
        seen.append(name)
        return plain(*args, **kwargs)

    patches = Patches()
    Surface(cp, handler, patches).patch()
    kernel = cp.ElementwiseKernel("T x", "T y", lambda x: x + 1, "mine")
    kernel(cp.ones(3))
    -(cp.ones(3) + 1.0).mean()
    assert seen == ["ElementwiseKernel.made", "ones", "ElementwiseKernel:mine", "ones", "__add__", "mean", "__neg__"]
    assert isinstance(kernel, before["ElementwiseKernel"])
    patches.restore_all()
    assert vars(cp) == before
    assert dict(vars(cp.ndarray)) == methods
    kernel(np.ones(3))
    assert len(seen) == 7


def test_steps_are_found_and_one_kind_of_call_stays_wrapped() -> None:
    cp = stub_cupy.module()
    watcher = Watcher(cp)
    bounds: list[int] = []
    watcher.on_step.append(lambda step: bounds.append(step.index))
    train(cp, 40)
    assert watcher.kind == "period"
    assert watcher.anchor is not None
    assert watcher.anchor.key[0] == "array"
    assert 40 - 4 * REPEATS <= len(bounds) <= 40 - REPEATS
    assert cp.zeros.__name__ == "zeros"
    assert "__sub__" not in vars(cp.ndarray)
    watcher.detach()


def test_marks_take_the_place_of_the_period() -> None:
    cp = stub_cupy.module()
    watcher = Watcher(cp)
    train(cp, 5, after=watcher.mark)
    assert (watcher.kind, watcher.steps) == ("marker", 5)
    watcher.detach()


def test_a_profile_has_steps_lines_and_dtypes(tmp_path: Path) -> None:
    cp = stub_cupy.module()
    session = Session(mode="profile", run_dir=str(tmp_path), script="train.py", warmup=3, steps=5, detail_steps=2)
    attach.attach(session, cp)
    try:
        with pytest.raises(stop.StopTraining):
            train(cp, 60)
    finally:
        stop.forget()
        attach.let_go()
    steps = storage.load(tmp_path / STEPS_FILE, StepsRecord)
    assert (steps.kind, steps.complete, steps.phase) == ("period", True, "done")
    assert steps.wall_us is not None
    assert steps.wall_us.n == 5
    assert storage.load(tmp_path / FACTS_FILE, FactsRecord).model.parameter_dtype == "fp64"
    trace = load_trace(tmp_path / TRACE_FILE)
    assert len(trace.step_bounds_ns) == 3
    dots = [i for i, name in enumerate(trace.ops.name) if name == "cupy::dot"]
    assert trace.ops.dtypes[dots[0]] == "double,double"
    assert trace.ops.shapes[dots[0]] == "[[8, 4], [4, 1]]"
    assert {trace.ops.annotation[i - 1].rpartition("/")[2].partition(":")[0] for i in dots} == {"test_profile.py"}


def test_a_fault_in_a_listener_leaves_the_loop_alone() -> None:
    cp = stub_cupy.module()
    watcher = Watcher(cp)

    def broken(step: object) -> None:
        raise KeyError("mine")

    watcher.on_step.append(broken)
    train(cp, 40)
    assert isinstance(watcher.patches.fault, KeyError)
    assert "__sub__" not in vars(cp.ndarray)
