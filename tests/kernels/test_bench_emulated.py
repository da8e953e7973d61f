"""Benchmark and tuning run whole on emulated kernels: everything but the clock and the memory counters is as on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from advisor.bench import hosts, ops, timing, tune, units
from advisor.core.errors import AdvisorError
from advisor.loop.training import RootModule, Training
from advisor.ops import catalog, dispatch, nvrtc
from advisor.ops.family import Case, Family
from advisor.ops.moments_cases import APART
from advisor.transforms import registry


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each contender runs once a round; the times are made up."""

    def interleaved(contenders: Mapping[str, Callable[[Any], object]], sets: Sequence[Any], **_: Any) -> dict[str, Any]:
        for run in contenders.values():
            for inputs in sets:
                run(inputs)
        return {name: timing.spread([float(i + 1)] * 5) for i, name in enumerate(contenders)}

    monkeypatch.setattr(ops, "DEVICE", "cpu")
    monkeypatch.setattr(timing, "interleaved", interleaved)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(ops, "HOST_CALLS", 2)
    monkeypatch.setattr(timing.host, "__kwdefaults__", {**timing.host.__kwdefaults__, "rounds": 2})
    monkeypatch.setattr(timing, "rotation", lambda nbytes: 2)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda: 0)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)


# What a family's cases are made of differs; how they are measured does not.
SHORT = {"batchnorm_act", "pooling", "bias_act", "input"}
FAMILIES = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, id=family.id, marks=[] if family.id in SHORT else [pytest.mark.long])
        for family in catalog.FAMILIES
    ],
)


def small(family: Family) -> Case:
    return min(family.verification, key=lambda case: torch.Size(case.shape).numel())


@FAMILIES
def test_a_case_is_measured(emulated, on_cpu, family: Family) -> None:
    case = small(family)
    rows = ops.measure(
        family, case, ops.Ceilings(copy_gbps=1.0, tflops={"float32": 1.0, case.dtype: 1.0}), compiled=False
    )
    assert [row.pass_ for row in rows] == list(case.passes)
    for row in rows:
        assert (row.advisor_ms, row.eager_ms, row.compile_ms) == (1.0, 2.0, None)
        assert row.limit_ms > 0
        assert row.advisor_host_us > 0
        assert row.eager_host_us > 0
        assert row.error == row.error < 0.1
        assert "eager/ours  2.00" in row.line()
    assert sum(emulated.launches.values()) > 0


def test_what_cannot_be_compiled_keeps_its_other_times(on_cpu, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    case = small(catalog.get("bias_act"))
    ours = replace(case, ours=case.eager)
    times = ops.timed(ours, compiled=True, budget_s=1.0)
    assert all(list(found) == ["advisor", "eager", "compile"] for found in times.values())

    def fails(*_: object) -> None:
        raise RuntimeError("no backend\nand more")

    monkeypatch.setattr(torch, "compile", lambda function, **_: fails)
    times = ops.timed(ours, compiled=True, budget_s=1.0)
    assert all(list(found) == ["advisor", "eager"] for found in times.values())
    assert capsys.readouterr().out == f"{case.label}: torch.compile: RuntimeError: no backend\n"


def test_the_host_s_times_are_of_calls_in_a_row_and_of_one_run_of_autograd(on_cpu, monkeypatch) -> None:
    case = next(case for case in catalog.get("bias_act").verification if case.name == "bias+relu")
    made: dict[str, list[Any]] = {"advisor": [], "eager": []}

    def host(contenders: Mapping[str, Callable[[], Any]], *, calls: int, warmup: int) -> dict[str, Any]:
        assert calls == 2
        assert warmup
        for name, run in contenders.items():
            made[name].append(run())
        return dict.fromkeys(contenders, timing.spread([3.0] * 2))

    monkeypatch.setattr(timing, "host", host)
    found = ops.host_us(replace(case, ours=case.eager))
    assert found == {way: {"advisor": 3.0, "eager": 3.0} for way in ("forward", "backward")}
    for forwards, gradients in made.values():
        assert len(forwards) == 2
        assert len(gradients) == 4
        for dx, dbias in (gradients[:2], gradients[2:]):  # each call's own
            torch.testing.assert_close(dx.float().sum((0, 2, 3)), dbias, rtol=1e-2, atol=1e-2)
        assert not torch.equal(gradients[0], gradients[2])


class Calls:
    """In the place of the counters: each pass is run over its inputs."""

    def __enter__(self) -> Calls:
        return self

    def __exit__(self, *_: object) -> None: ...

    def shares(self, run: Callable[[Any], object], sets: Sequence[Any]) -> dict[str, float]:
        return {"sms": float(sum(run(inputs) is not None for inputs in sets))}


def test_what_is_counted_are_our_kernels_alone(emulated, on_cpu, monkeypatch: pytest.MonkeyPatch) -> None:
    family = catalog.get("batchnorm_act")
    case = small(family)
    rows = ops.measure(
        family, case, ops.Ceilings(copy_gbps=1.0, tflops={"float32": 1.0, case.dtype: 1.0}), compiled=False
    )
    emulated.launches.clear()
    eager = replace(case, eager=lambda *_: pytest.fail("eager was called"))
    monkeypatch.setattr(units, "UnitCounters", Calls)
    (counted,) = ops.count([(eager, rows)])
    assert counted == [replace(row, units={"sms": 2.0}) for row in rows]
    assert sum(emulated.launches.values()) > 0


def test_a_family_that_falls_back_gives_no_row(on_cpu) -> None:
    family = catalog.get("batchnorm_act")
    with pytest.raises(AdvisorError, match=r"did not run.*not on a CUDA device"):
        ops.measure(family, small(family), ops.Ceilings(copy_gbps=1.0), compiled=False)


def test_a_case_of_other_families_kernels_alone_is_measured_where_those_ran(
    emulated, on_cpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    family = catalog.get("pointwise")
    apart = next(case for case in family.benchmark if case.name.endswith(APART))
    case = replace(apart, shape=(2, *apart.shape[1:2], 3, 3))
    rows = ops.measure(family, case, ops.Ceilings(copy_gbps=1.0, tflops={case.dtype: 1.0}), compiled=False)
    assert [row.pass_ for row in rows] == list(case.passes)
    monkeypatch.setattr(nvrtc, "on_device", lambda tensor: "nowhere")
    with pytest.raises(AdvisorError, match="did not run"):
        ops.measure(family, case, ops.Ceilings(copy_gbps=1.0, tflops={case.dtype: 1.0}), compiled=False)


def test_combinations_are_run_with_their_constants(emulated, on_cpu, monkeypatch) -> None:
    family = catalog.get("batchnorm_act")
    seen = []
    run = family.module("cuda").forward
    monkeypatch.setattr(
        family.module("cuda"), "forward", lambda *a, **k: seen.append(family.spec.THREADS) or run(*a, **k)
    )
    monkeypatch.setattr(family.spec, "TUNABLE", {"THREADS": (256, 512)})
    case = replace(small(family), shape=(2, 16, 3, 3))
    trials = tune.tune(family, case)
    assert {trial.constants["THREADS"]: (trial.present, trial.wrong) for trial in trials} == {
        256: (False, ""),
        512: (True, ""),
    }
    assert set(seen) == {256, 512}
    assert family.spec.THREADS == 512
    dispatch.clear()


def test_a_small_network_s_step_is_timed_with_the_kernels_in_it(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    def place(model: nn.Module, name: str) -> None:  # the transforms themselves look for a CUDA GPU
        training = Training(device=torch.device("cpu"), roots=[RootModule(module=model, name=name)])
        registry.get("fused_bn_act").apply(training, {})

    monkeypatch.setattr(hosts, "place", place)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(hosts, "ROUNDS", 4)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=8), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(8), nn.Flatten(), nn.Linear(8, 1000)
    )
    row = hosts.measure("small", net, device="cpu")
    assert row.ran == {"batchnorm_act": 1}
    assert sum(emulated.launches.values()) >= 2 * (hosts.WARMUP + hosts.ROUNDS)
    assert min(row.plain_ms, row.advisor_ms) > 0
    assert row.shape == (hosts.BATCH, 3, hosts.SIZE, hosts.SIZE)
    assert row.n == 4
