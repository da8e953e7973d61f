"""What is changed from a script's start, on NumPy's arrays: it does what it says, and is taken back."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stub_cupy
from test_profile import train

import advisor
from advisor.core import storage
from advisor.core.plan import Plan, PlanItem
from advisor.cupy_loops import attach, facts
from advisor.cupy_loops.changes.base import Unfit
from advisor.cupy_loops.changes.cub import Cub
from advisor.cupy_loops.changes.kernels import KernelsOnce
from advisor.cupy_loops.changes.single import Single
from advisor.loop import stop
from advisor.loop.patches import Patches
from advisor.loop.session import Session
from advisor.trials import planfile
from advisor.trials.records import MEASURE_FILE, Measurement


def on(change: Any) -> tuple[Any, Any, Patches]:
    cp, patches = stub_cupy.module(), Patches()
    change.apply(cp, patches)
    return cp, change, patches


def test_fp64_that_nobody_asked_for_becomes_fp32() -> None:
    cp, change, patches = on(Single())
    weights = cp.array(0.02 * np.ones((3, 2)))
    assert weights.dtype == np.float32
    assert cp.zeros(3).dtype == np.float32
    assert cp.random.randn(2).dtype == np.float32
    assert (cp.arange(3) * cp.ones(3)).dtype == np.float32
    assert (weights * np.float64(2.0)).dtype == np.float32
    assert cp.arange(4).mean().dtype == np.float32
    assert change.made > 0
    patches.restore_all()
    assert cp.zeros(3).dtype == np.float64


def test_fp64_by_name_stays() -> None:
    cp, change, _ = on(Single())
    asked = cp.zeros(3, dtype=np.float64)
    assert asked.dtype == np.float64
    assert cp.array([1.0], np.float64).dtype == np.float64
    assert cp.zeros(3, "int32").dtype == np.int32
    assert cp.empty((2, 3), order="F").flags.f_contiguous
    assert cp.ones(3).astype(np.float64).dtype == np.float64
    assert (asked * cp.ones(3)).dtype == np.float64
    assert cp.arange(3).dtype == np.int64
    assert change.made == 3  # the ones, and what is empty


def test_a_kernel_of_equal_arguments_is_made_once() -> None:
    cp, change, patches = on(KernelsOnce())

    def body(x: Any) -> Any:
        return x

    first = cp.ElementwiseKernel("T x", "T y", body, "a")
    assert cp.ElementwiseKernel("T x", "T y", body, name="a") is not first
    assert cp.ElementwiseKernel("T x", "T y", body, "a") is first
    assert cp.ElementwiseKernel("T x", "T y", body, "b") is not first
    assert isinstance(first, cp.ElementwiseKernel)
    assert not isinstance(3, cp.ElementwiseKernel)
    assert cp.ElementwiseKernel("T x", [], body, "c") is not cp.ElementwiseKernel("T x", [], body, "c")
    patches.restore_all()
    assert isinstance(first, cp.ElementwiseKernel)
    assert change.again == 1


@pytest.mark.parametrize("kept", [(), ("cupy_single", "cupy_tf32")], ids=["plain", "changed"])
def test_an_arm_has_times_and_losses(tmp_path: Path, kept: tuple[str, ...]) -> None:
    cp = stub_cupy.module()
    items = tuple(PlanItem(transform=name, status="kept") for name in kept)
    session = Session(mode="measure", run_dir=str(tmp_path), script="train.py", warmup=3, steps=12, kept=items, seed=3)
    attach.attach(session, cp)
    try:
        with pytest.raises(stop.StopTraining):
            train(cp, 300)
    finally:
        stop.forget()
        attach.let_go()
    found = storage.load(tmp_path / MEASURE_FILE, Measurement)
    assert found.complete
    assert len(found.every_us) >= 12
    assert len(found.losses) == 3 + 12
    assert all(0.0 < loss < 10.0 for loss in found.losses)
    assert found.applied == tuple(name for name in kept if name == "cupy_single")
    assert found.left_out == ({"cupy_tf32": "this CuPy has no set_compute_type"} if kept else {})
    assert cp.zeros(1).dtype == np.float64


def test_losses_are_copied_past_the_recorded_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from advisor.cupy_loops.changes import graphs
    from advisor.cupy_loops.replay.arena import Plain

    plain = graphs.Graphs.__init__
    monkeypatch.setattr(graphs.Graphs, "__init__", lambda self: plain(self, Plain))
    found: list[tuple[float, ...]] = []
    for kept in ((), ("cupy_graphs",)):
        cp = stub_cupy.module()
        items = tuple(PlanItem(transform=name, status="kept") for name in kept)
        session = Session(
            mode="measure", run_dir=str(tmp_path), script="train.py", warmup=8, steps=40, kept=items, seed=3
        )
        attach.attach(session, cp)
        standing = attach.Attached.driver.standing
        try:
            with pytest.raises(stop.StopTraining):
                train(cp, 600)
            replayed = [change.recorder.replayed for change, _ in standing.on]
        finally:
            stop.forget()
            attach.let_go()
        found.append(storage.load(tmp_path / MEASURE_FILE, Measurement).losses)
    assert replayed[0] > 20
    assert found[0] == found[1]


def test_a_plan_is_enabled_and_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cp = stub_cupy.module()
    monkeypatch.setitem(sys.modules, "cupy", cp)
    monkeypatch.delenv("ADVISOR_SESSION", raising=False)
    items = tuple(
        PlanItem(transform=name, status=status) for name, status in (("cupy_single", "kept"), ("cupy_tf32", "reverted"))
    )
    plan = Plan(script="train.py", argv=(), created="2026-01-01T00:00:00+00:00", items=items)
    planfile.write(tmp_path / "plan.yaml", plan)
    advisor.enable(tmp_path / "plan.yaml")
    try:
        assert cp.zeros(1).dtype == np.float32
    finally:
        advisor.disable()
    assert cp.zeros(1).dtype == np.float64


def test_a_run_takes_what_is_for_cupy_and_leaves_the_rest_to_torch(tmp_path: Path) -> None:
    cp = stub_cupy.module()
    for names, dtype in ((("amp_bf16",), np.float64), (("cupy_single",), np.float32)):
        items = tuple(PlanItem(transform=name, status="kept") for name in names)
        attach.attach(Session(mode="run", run_dir=str(tmp_path), script="train.py", kept=items), cp)
        assert cp.zeros(1).dtype == dtype
    attach.take_off()
    assert cp.zeros(1).dtype == np.float64


def test_cub_is_put_back_as_it_was() -> None:
    cp, now = stub_cupy.module(), {"reduction": [2], "routine": [2]}
    cp._core = types.SimpleNamespace()
    for kind in now:
        setattr(cp._core, f"get_{kind}_accelerators", lambda kind=kind: now[kind])
        setattr(cp._core, f"set_{kind}_accelerators", lambda new, kind=kind: now.__setitem__(kind, list(new)))
    patches = Patches()
    assert not facts.reductions_by_cub(cp)
    Cub().apply(cp, patches)
    assert now == {"reduction": [facts.CUB, 2], "routine": [facts.CUB, 2]}
    with pytest.raises(Unfit, match="in use already"):
        Cub().apply(cp, Patches())
    patches.restore_all()
    assert now == {"reduction": [2], "routine": [2]}


def test_requests_of_the_memory_pool_are_counted() -> None:
    cp, hooks = stub_cupy.module(), []

    class MemoryHook:
        def __enter__(self) -> None:
            hooks.append(self)

        def __exit__(self, *ended: object) -> None:
            hooks.remove(self)

    cp.cuda = types.SimpleNamespace(MemoryHook=MemoryHook)
    counted = facts.requests(cp)
    with counted:
        for _ in range(3):
            hooks[0].malloc_postprocess(size=8)
        hooks[0].alloc_postprocess(mem_size=512)
    assert (counted.asked, counted.from_driver, hooks) == (3, 1, [])
    assert facts.requests(stub_cupy.module()) is None
