"""A plan goes with what a script trains: another optimizer, another fold; and stays where it is while something else is trained."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from weakref import ref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import advisor
from advisor.core.plan import Plan, PlanHashes, PlanItem
from advisor.transforms.forward import AUTOCAST, ForwardStack
from advisor.trials import kept, planfile

pytestmark = pytest.mark.usefixtures("bf16_everywhere")


@pytest.fixture
def enabled(request: pytest.FixtureRequest) -> Iterator[None]:
    gc.collect()  # optimizers of other tests: a step is to hold all that there are
    names = getattr(request, "param", ("amp_bf16",))
    items = tuple(PlanItem(transform=name, status="kept") for name in names)
    kept.enable(Plan(script="train.py", argv=(), created="now", items=items, hashes=PlanHashes()))
    yield
    advisor.disable()
    assert not _global_optimizer_post_hooks
    assert not ForwardStack.installed


class Net(nn.Sequential):
    def __init__(self, width: int = 8) -> None:
        super().__init__(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, 4, 3))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def is_on(model: nn.Module) -> bool:
    return ForwardStack.of(model).get(AUTOCAST) is not None


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 8) -> list[bool]:
    """Whether its forward was in half precision, step by step."""
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        seen.append(is_on(model))
        model(torch.rand(2, 3, 8, 8)).square().mean().backward()
        optimizer.step()
    return seen


@pytest.mark.usefixtures("enabled")
def test_the_next_fold_trains_with_the_plan_and_the_one_before_can_go() -> None:
    first, second = Net(), Net()
    optimizer = sgd(first)
    assert train(first, optimizer)[-1]
    optimizers = sgd(second)  # before the first is done with, as where all folds are made beforehand
    gone = ref(first)
    del first, optimizer
    on = train(second, optimizers)
    assert not on[0]
    assert all(on[-3:])
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("enabled")
@pytest.mark.parametrize("enabled", [("fused_optimizer", "amp_bf16")], indirect=True)
def test_another_optimizer_of_the_same_model_gets_what_the_first_had() -> None:
    model = Net()
    first = sgd(model)
    train(model, first)
    second = torch.optim.AdamW(model.parameters())
    assert train(model, second)[-1]
    assert second.param_groups[0]["fused"]
    train(model, first)
    assert first.param_groups[0]["fused"]  # which had not gone


@pytest.mark.usefixtures("enabled")
def test_a_phase_that_trains_one_of_two_models_leaves_the_other_as_it_was() -> None:
    both = Net(), Net()
    optimizers = [sgd(model) for model in both]
    for _ in range(8):
        for model, optimizer in zip(both, optimizers, strict=True):
            train(model, optimizer, steps=1)
    assert all(map(is_on, both))
    train(both[1], sgd(both[1]))
    assert all(map(is_on, both))


@pytest.mark.usefixtures("enabled")
def test_a_probe_now_and_then_takes_the_plan_from_nobody() -> None:
    model = Net()
    optimizer = sgd(model)
    train(model, optimizer)
    for _ in range(2):
        probe = Net(width=6)
        train(probe, sgd(probe))
        assert not is_on(probe)
        assert is_on(model)
        train(model, optimizer, steps=1)


@pytest.mark.usefixtures("enabled")
def test_what_another_thread_trains_takes_the_plan_from_nobody() -> None:
    model, other = Net(), Net()
    optimizer = sgd(model)
    train(model, optimizer)
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.extend(train(other, sgd(other), steps=30)))
    thread.start()
    thread.join()
    assert seen == [False] * 30
    assert all(train(model, optimizer))


@pytest.mark.usefixtures("enabled")
def test_optimizers_that_come_and_go_are_not_followed_for_long(capfd: pytest.CaptureFixture[str]) -> None:
    model = Net()
    for _ in range(12):
        train(model, sgd(model))
    assert is_on(model)
    assert capfd.readouterr().err.count("the script makes new optimizers") == 1


@pytest.mark.usefixtures("enabled")
def test_disabled_while_it_looks_again_nothing_stays() -> None:
    plain = vars(nn.Module)["__call__"]
    model, other = Net(), Net()
    train(model, sgd(model))
    optimizer = sgd(other)
    train(other, optimizer, steps=2)
    assert vars(nn.Module)["__call__"] is not plain
    advisor.disable()
    assert vars(nn.Module)["__call__"] is plain
    assert not is_on(model)
    assert not any(train(other, optimizer))


@pytest.mark.usefixtures("enabled")
def test_disabled_it_holds_no_model() -> None:
    model = Net()
    train(model, sgd(model))
    assert is_on(model)
    advisor.disable()
    gone = ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_plan_of_another_model_gives_up_once(capfd: pytest.CaptureFixture[str]) -> None:
    gc.collect()
    items = (PlanItem(transform="amp_bf16", status="kept"),)
    kept.enable(
        Plan(script="t", argv=(), created="now", items=items, hashes=PlanHashes(model=planfile.model_hash([Net(3)])))
    )
    try:
        model = Net()
        assert not any(train(model, sgd(model)))
        assert capfd.readouterr().err.count("proved on another model") == 1
        gone = ref(model)
        del model
        gc.collect()
        assert gone() is None  # with nothing of the plan on there is nothing to hold it for
    finally:
        advisor.disable()
