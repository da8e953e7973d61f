"""A step that is skipped from inside."""

from __future__ import annotations

import pytest
import torch

from advisor.transforms.base import Undo
from advisor.transforms.skip import skip_step_hooks


def test_a_skipped_step_changes_nothing_and_gives_the_gradients_back() -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer, undo = torch.optim.SGD([weight], lr=1.0), Undo()
    skip_step_hooks(undo, optimizer, lambda _: True)
    weight.sum().backward()
    gradient = weight.grad
    optimizer.step()
    assert torch.equal(weight, torch.ones(3))
    assert weight.grad is gradient
    undo.run()
    optimizer.step()
    assert torch.equal(weight, torch.zeros(3))


@pytest.mark.parametrize("used", [True, False])
def test_gradients_of_a_skipped_step_that_raised_do_not_come_back(used: bool) -> None:
    weight = torch.ones(3, requires_grad=True)
    optimizer, skipped = torch.optim.SGD([weight], lr=1.0), iter([True, False])
    skip_step_hooks(Undo(), optimizer, lambda _: next(skipped))

    def fail(*_: object) -> None:
        raise ValueError("the script's own hook")

    weight.sum().backward()
    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ValueError, match="own hook"):
        optimizer.step()
    handle.remove()
    optimizer.zero_grad()
    if used:
        (2 * weight).sum().backward()
    optimizer.step()
    assert torch.equal(weight, torch.full((3,), -1.0 if used else 1.0))
    assert (weight.grad is not None) is used
    assert not used or torch.equal(weight.grad, torch.full((3,), 2.0))
