"""Closeness to a reference step, by the gate of `apply`: what is the same passes, what is wrong does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional

from advisor.core.errors import AdvisorError
from advisor.testing.measured import Measured
from advisor.testing.measuring import measure

SHORT = {"warmup": 4, "steps": 2, "detail_steps": 1}


class Net(nn.Module):
    def __init__(self, fault: str = "", width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 4)
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        x = functional.gelu(x) if self.fault == "activation" else functional.relu(self.norm(x))
        if self.fault == "scale":
            x = x * 1.05
        x = x.detach() if self.fault == "detached" else x
        return self.head(x.mean((2, 3)))


def step_of(model: nn.Module, *, autocast: bool = False, last: bool = False) -> Callable[[], None]:
    torch.manual_seed(5)
    images = torch.randn(8, 3, 12, 12)
    if last:
        images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 4, (8,))

    def step() -> None:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()

    return step


def measured(step: Callable[[], None]) -> Measured:
    return measure(step, **SHORT)


def test_another_layout_is_close_to_the_reference() -> None:
    candidate = Net().to(memory_format=torch.channels_last)
    measured(step_of(candidate, last=True)).assert_close_to(step_of(Net()))


def test_the_same_model_under_autocast_is_close_as_a_change_of_precision_only() -> None:
    model = Net()
    found = measured(step_of(model, autocast=True))
    found.assert_close_to(step_of(model), semantics="precision")
    with pytest.raises(AssertionError, match="times the bound"):
        found.assert_close_to(step_of(model), semantics="reassociated")


@pytest.mark.parametrize("fault", ["activation", "scale", "detached"])
def test_another_computation_is_not_close(fault: str) -> None:
    with pytest.raises(AssertionError, match="closeness to the reference"):
        measured(step_of(Net(fault))).assert_close_to(step_of(Net()), semantics="precision")


def test_exact_means_bit_equal() -> None:
    measured(step_of(Net())).assert_close_to(step_of(Net()), semantics="exact")
    with pytest.raises(AssertionError, match="bit-equal"):
        measured(step_of(Net("scale"))).assert_close_to(step_of(Net()), semantics="exact")


def test_both_models_are_as_they_were() -> None:
    candidate, reference = Net(), Net()
    step = step_of(reference)
    found = measured(step_of(candidate))
    held = {name: value.clone() for name, value in candidate.state_dict().items() if "num_batches" not in name}
    forward = reference.forward
    found.assert_close_to(step)
    assert reference.forward == forward
    assert "forward" not in vars(reference)
    assert "forward" not in vars(candidate)
    weights = {name: value for name, value in candidate.state_dict().items() if name in held and "running" not in name}
    assert all(torch.equal(value, held[name]) for name, value in weights.items())
    assert not candidate._forward_pre_hooks


def test_what_cannot_be_compared_is_refused() -> None:
    found = measured(step_of(Net()))
    with pytest.raises(AdvisorError, match="differ in parameter"):
        found.assert_close_to(step_of(Net(width=6)))
    with pytest.raises(AdvisorError, match="semantics 'close'"):
        found.assert_close_to(step_of(Net()), semantics="close")
    with pytest.raises(AdvisorError, match="half or tf32"):
        found.assert_close_to(step_of(Net()), precision="fp8")
    with pytest.raises(AdvisorError, match="reference 0"):
        found.assert_close_to(lambda: None)
