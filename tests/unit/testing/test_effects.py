"""A plan's items in effect: each transform's own check, on the live step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import advisor
from advisor.core.errors import AdvisorError
from advisor.core.plan import Plan, PlanItem
from advisor.loop.attach import Attached
from advisor.testing.measuring import measure
from advisor.trials import planfile

SHORT = {"warmup": 4, "steps": 2, "detail_steps": 1}


@pytest.fixture(autouse=True)
def detached() -> Iterator[None]:
    """What `advisor.enable` has attached to would keep this test's optimizer alive for the tests after it."""
    yield
    Attached.training = Attached.watcher = Attached.discovery = None


def plan_of(folder: Path, *transforms: str, status: str = "kept") -> Path:
    path = folder / "plan.yaml"
    items = tuple(PlanItem(transform=name, status=status) for name in transforms)
    planfile.write(path, Plan(script="train.py", argv=(), created="2026-01-01T00:00:00Z", items=items))
    return path


def convolutions() -> Callable[[], None]:
    model = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16 * 144, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(2, 8, 16, 16)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(images).square().mean().backward()
        optimizer.step()

    return step


def test_the_items_of_a_plan_are_in_effect_while_it_is_enabled(tmp_path: Path) -> None:
    plan, step = plan_of(tmp_path, "set_to_none", "fused_optimizer"), convolutions()
    before = measure(step, **SHORT)
    with pytest.raises(AssertionError, match="effect of set_to_none"):
        before.assert_in_effect(plan)
    plain = torch.nn.Module.zero_grad, torch.optim.Optimizer.zero_grad, torch.nn.Module.__call__
    advisor.enable(plan)
    try:
        found = measure(step, **SHORT)
        found.assert_in_effect(plan)
        assert [budget.title for budget in found.budgets] == ["effect of set_to_none", "effect of fused_optimizer"]
    finally:
        advisor.disable()
    assert plain == (torch.nn.Module.zero_grad, torch.optim.Optimizer.zero_grad, torch.nn.Module.__call__)
    with pytest.raises(AssertionError, match="no convolution weight is NHWC"):
        measure(step, **SHORT).assert_in_effect("channels_last")


def test_a_plan_takes_effect_beside_an_optimizer_that_is_never_stepped(tmp_path: Path) -> None:
    other = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    step = convolutions()
    advisor.enable(plan_of(tmp_path, "set_to_none"))
    try:
        measure(step, **SHORT).assert_in_effect("set_to_none")
    finally:
        advisor.disable()
    assert other.param_groups


def test_a_plan_that_a_step_gives_no_sign_to_is_said_to_be_pending(tmp_path: Path) -> None:
    advisor.enable(plan_of(tmp_path, "set_to_none"))
    try:
        with pytest.raises(AdvisorError, match="plan that was enabled is not in effect"):
            measure(lambda: torch.ones(4).sum(), **SHORT)
    finally:
        advisor.disable()


def test_what_names_nothing_is_refused(tmp_path: Path) -> None:
    found = measure(convolutions(), **SHORT)
    with pytest.raises(AdvisorError, match="nothing was named"):
        found.assert_in_effect()
    with pytest.raises(AdvisorError, match="warp_drive"):
        found.assert_in_effect("warp_drive")
    with pytest.raises(AdvisorError, match="keeps nothing"):
        found.assert_in_effect(plan_of(tmp_path, "set_to_none", status="reverted"))
