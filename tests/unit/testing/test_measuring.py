"""Measuring in this process: the profiler's own numbers, and a process that is afterwards as it was before."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from advisor.core.errors import AdvisorError
from advisor.loop import attach, loaders
from advisor.profiling.inside import driver
from advisor.testing import allocations, host_reads, measuring
from advisor.testing.measured import Measured
from advisor.testing.measuring import measure, training_step

SHORT = {"warmup": 4, "steps": 3, "detail_steps": 1}


def convolution_step(optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 3))
    batch = (torch.randn(4, 2, 6, 6), torch.tensor([0, 1, 2, 0]))
    return training_step(model, batch, nn.functional.cross_entropy, optimizer(model.parameters(), lr=0.01))


def state_of_the_process() -> dict[str, Any]:
    """Everything that advisor hooks in this process."""
    optimizer = sys.modules[torch.optim.Optimizer.__module__]
    owners = {
        nn.Module: ("__call__", "zero_grad"),
        torch.optim.Optimizer: ("__init__", "zero_grad"),
        torch.amp.grad_scaler.GradScaler: ("step", "scale"),
        torch.cuda.CUDAGraph: ("replay",),
        torch.autograd: ("backward", "grad"),
        torch.nn.utils: ("clip_grad_norm_", "clip_grad_value_"),
        torch.cuda: ("synchronize", "empty_cache"),
        torch.Tensor: ("to", "cuda"),
        torch.utils.data.DataLoader: ("__iter__",),
        torch.utils.data.dataloader._BaseDataLoaderIter: ("__next__",),
    }
    found = {f"{owner}.{name}": vars(owner).get(name) for owner, names in owners.items() for name in names}
    found["optimizer hooks"] = (
        len(optimizer._global_optimizer_pre_hooks),
        len(optimizer._global_optimizer_post_hooks),
    )
    found["function modes"] = list(_get_current_function_mode_stack())
    found["dispatch modes"] = list(_get_current_dispatch_mode_stack())
    found["profiler"] = torch._C._autograd._profiler_enabled()
    found["frozen"] = gc.get_freeze_count()
    found["gc"] = gc.isenabled()
    found["environment"] = {k: v for k, v in os.environ.items() if k.startswith(("ADVISOR", "KINETO"))}
    found["threads"] = threading.active_count()
    found["attached"] = attach.Attached.watcher
    return found


@pytest.fixture
def untouched() -> Any:
    """The process has to be at the test's end what it was at its beginning."""
    import torch._dynamo

    torch.optim.SGD([nn.Parameter(torch.zeros(1))]).step()  # what torch hooks itself at first use is not ours
    before = state_of_the_process()
    yield
    after = state_of_the_process()
    assert {key: (before[key], after[key]) for key in before if before[key] != after[key]} == {}


def test_a_step_is_measured_as_a_script_would_be(untouched: None) -> None:
    calls = 0
    inner = convolution_step()

    def step() -> None:
        nonlocal calls
        calls += 1
        inner()

    found = measure(step, warmup=5, steps=6, detail_steps=2, label="train")
    profile = found.profile
    assert isinstance(found, Measured)
    assert (profile.step_kind, found.label) == ("marker", "train")
    assert profile.step_us is not None
    assert profile.step_us.n >= 1
    assert profile.model.roots == ("Sequential",)
    assert profile.model.optimizers == ("SGD",)
    assert profile.complete
    conv = next(row for row in profile.kernels if row.kind == "conv" and row.phase == "forward")
    assert conv.module == "Sequential.0"
    assert conv.source.rpartition(":")[0].endswith("measuring.py") or "test_measuring.py" in conv.source
    assert {row.phase for row in profile.kernels} >= {"forward", "backward", "optimizer"}
    assert calls >= 5 + 6 + 2
    assert profile.memory.peak_allocated_bytes > 0


@pytest.fixture
def window(monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """In which of the measurement's windows a call of the step is."""
    drivers: list[driver.ProfileDriver] = []
    inside: list[str] = []

    class Seen(driver.ProfileDriver):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            drivers.append(self)

    def told(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*args: Any, **keywords: Any) -> Any:
            inside.append(name)
            try:
                return plain(*args, **keywords)
            finally:
                inside.pop()

        return watch

    monkeypatch.setattr(measuring, "ProfileDriver", Seen)
    monkeypatch.setattr(allocations, "watch", told("memory", allocations.watch))
    monkeypatch.setattr(host_reads, "watch", told("host reads", host_reads.watch))

    def now() -> str:
        return inside[-1] if inside else drivers[-1].phase if drivers else "first call"

    return now


PLACES = ("first call", "warm-up", "timed", "traced", "memory", "host reads")


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        *((ValueError, where) for where in PLACES),
        (KeyboardInterrupt, "timed"),
        *(pytest.param(KeyboardInterrupt, where, marks=pytest.mark.long) for where in PLACES if where != "timed"),
    ],
)
def test_a_step_that_raises_leaves_nothing_behind(
    untouched: None, window: Callable[[], str], where: str, kind: type[BaseException]
) -> None:
    inner = convolution_step()

    def step() -> None:
        inner()
        if window() == where:
            raise kind("from the step")

    with pytest.raises(kind, match="from the step"):
        measure(step, **SHORT)
    assert measure(inner, **SHORT).profile.complete  # and the next one is measured


def test_a_fault_of_advisors_own_is_an_error_and_leaves_nothing_behind(
    untouched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, step: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(driver.ProfileDriver, "on_step", broken)
    with pytest.raises(AdvisorError, match="fault in advisor ended the measurement: RuntimeError: planted"):
        measure(convolution_step(), **SHORT)
    monkeypatch.undo()
    monkeypatch.setattr(loaders.LoaderHooks, "hook", broken)
    with pytest.raises(TypeError):
        measure(convolution_step(), **SHORT)


def test_measuring_inside_a_measured_step_is_refused(untouched: None) -> None:
    with pytest.raises(AdvisorError, match="one at a time"):
        measure(lambda: measure(convolution_step(), **SHORT), **SHORT)
    assert measure(convolution_step(), **SHORT).profile.complete


def test_measuring_in_two_threads_is_refused() -> None:
    errors: list[BaseException] = []
    inner = convolution_step()

    def other() -> None:
        try:
            measure(convolution_step(), **SHORT)
        except AdvisorError as error:
            errors.append(error)

    def step() -> None:
        inner()
        if not errors:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    measure(step, **SHORT)
    assert len(errors) == 1


def test_a_process_that_advisor_observes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watcher:
        class patches:
            active = True

    monkeypatch.setattr(attach.Attached, "watcher", Watcher())
    with pytest.raises(AdvisorError, match="observes this process already"):
        measure(convolution_step(), **SHORT)


async def _coroutine() -> None:
    return None


@pytest.mark.parametrize(
    ("step", "told"),
    [(_coroutine, "coroutine"), (lambda: _coroutine(), "coroutine"), (3, "int"), (None, "NoneType")],
)
def test_what_is_no_step_is_refused(untouched: None, step: Any, told: str) -> None:
    with pytest.raises(AdvisorError, match=told):
        measure(step, **SHORT)


@pytest.mark.parametrize("counts", [{"steps": 0}, {"warmup": -1}, {"detail_steps": 0}, {"steps": True}, {"steps": 2.0}])
def test_counts_are_whole_numbers(counts: dict[str, Any]) -> None:
    with pytest.raises(AdvisorError, match=next(iter(counts))):
        measure(convolution_step(), **counts)


def test_a_compiled_step_is_compiled_once(untouched: None) -> None:
    """Its modules are out of sight, so the look for them goes on until the traced window, which annotates the same call."""
    torch.compiler.reset()
    layer = nn.Linear(3, 3)
    run = torch.compile(lambda x: layer(x).square().mean(), backend="eager")
    found = measure(lambda: run(torch.ones(2, 3)).backward(), **SHORT)
    found.assert_no_graph_break()
    counters = sys.modules["torch._dynamo.utils"].counters["stats"]
    assert counters["unique_graphs"] == 1
    torch.compiler.reset()


def test_a_step_without_a_model_is_measured_too(untouched: None) -> None:
    values = torch.arange(1000.0)
    found = measure(lambda: values.mul(2).sum(), **SHORT)
    assert found.profile.model.roots == ()
    found.assert_kernel("aten::mul")


def test_a_model_a_batch_and_a_loss_make_a_step() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    training_step(model, torch.ones(4, 3), lambda y: y.square().mean())()
    assert model.weight.grad is not None
    assert torch.equal(model.weight, before)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training_step(model, (torch.ones(4, 3), torch.zeros(4, 2)), nn.functional.mse_loss, optimizer)()
    assert not torch.equal(model.weight, before)


def test_random_numbers_are_the_steps_own() -> None:
    """As many steps without advisor leave the generator where the measured ones do."""

    def draws(run: Callable[[Callable[[], None]], Any]) -> tuple[int, float]:
        count = 0

        def step() -> None:
            nonlocal count
            count += 1
            torch.rand(3)

        torch.manual_seed(11)
        run(step)
        return count, float(torch.rand(1))

    count, after = draws(lambda step: measure(step, **SHORT))
    assert draws(lambda step: [step() for _ in range(count)]) == (count, after)
