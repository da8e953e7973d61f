"""Determinism: the same step from the same state, and the state as it was afterwards."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from advisor.core.errors import AdvisorError
from advisor.testing.measured import Measured
from advisor.testing.measuring import measure

SHORT = {"warmup": 4, "steps": 2, "detail_steps": 1}


class Training:
    """A model with dropout and momentum, whose step may do something that differs from run to run."""

    def __init__(self, fault: str = "") -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.fault, self.count, self.batch = fault, 0, torch.randn(16, 8)

    def step(self) -> None:
        self.count += 1
        self.optimizer.zero_grad()
        loss = self.model(self.batch).square().mean()
        if self.fault == "loss":
            loss = loss * (1 + self.count % 2)
        loss.backward()
        self.optimizer.step()
        if self.fault == "buffer":
            self.model[2].running_mean += self.count

    def state(self) -> list[torch.Tensor]:
        tensors = [*self.model.parameters(), *self.model.buffers()]
        tensors += [p.grad for p in self.model.parameters() if p.grad is not None]
        tensors += [v for entry in self.optimizer.state.values() for v in entry.values() if v is not None]
        return [tensor.detach().clone() for tensor in tensors]


def measured(training: Training) -> Measured:
    return measure(training.step, **SHORT)


def test_a_step_with_random_layers_is_deterministic_and_is_put_back() -> None:
    training = Training()
    found = measured(training)
    before, random_state, python_state = training.state(), torch.get_rng_state(), random.getstate()
    held = [id(parameter) for parameter in training.model.parameters()]
    found.assert_deterministic(runs=3)
    assert all(torch.equal(a, b) for a, b in zip(before, training.state(), strict=True))
    assert torch.equal(random_state, torch.get_rng_state())
    assert python_state == random.getstate()
    assert held == [id(parameter) for parameter in training.model.parameters()]
    training.step()  # and goes on


@pytest.mark.parametrize(
    ("fault", "named"), [("loss", "Sequential.0.weight.grad"), ("buffer", "Sequential.2.running_mean")]
)
def test_what_differs_is_named(fault: str, named: str) -> None:
    training = Training(fault)
    found = measured(training)
    with pytest.raises(AssertionError, match="run 2 of the step left other bits") as raised:
        found.assert_deterministic()
    assert named in str(raised.value)
    assert found.budgets[-1].passed is False
    assert not torch.are_deterministic_algorithms_enabled()


def test_what_cannot_be_compared_is_refused() -> None:
    found = measured(Training())
    with pytest.raises(AdvisorError, match="two or more"):
        found.assert_deterministic(runs=1)
    with pytest.raises(AdvisorError, match="no module"):
        measure(lambda: torch.ones(3).sum(), **SHORT).assert_deterministic()


def test_a_rate_that_the_step_lowers_in_place_is_put_back() -> None:
    training = Training()
    rate = torch.tensor(0.1)
    training.optimizer.param_groups[0]["lr"] = rate

    def step() -> None:
        training.step()
        rate.mul_(0.5)

    found = measure(step, **SHORT)
    before = rate.clone()
    found.assert_deterministic(runs=3)
    assert training.optimizer.param_groups[0]["lr"] is rate
    assert torch.equal(rate, before)
