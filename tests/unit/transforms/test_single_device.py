"""A DataParallel over one device, passed by."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from loops import BATCH, CHANNELS, SIZE, ConvNet, Loop, make_loop
from torch import nn

from advisor.transforms.single_device import SingleDevice


class Wrapper(nn.DataParallel):
    """Over one device, which is this machine's CPU; counts its scatters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.device_ids, self.src_device_obj, self.dim, self.scatters = [0], torch.device("cpu"), 0, 0

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        self.scatters += 1
        return (inputs,), (kwargs,)


Wrapper.__name__ = "DataParallel"


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    monkeypatch.setattr(torch.nn, "DataParallel", Wrapper)
    return make_loop(model=lambda: Wrapper(ConvNet()))


def images() -> torch.Tensor:
    return torch.randn(BATCH, CHANNELS, SIZE, SIZE)


def test_a_training_is_bit_equal_and_makes_no_detour(loop: Loop) -> None:
    plain = make_loop(model=lambda: Wrapper(ConvNet()))
    before = loop.model.scatters
    undo = SingleDevice().apply(loop.training, {})
    assert not SingleDevice().effect(loop.training, None, None).passed
    assert loop.run(3) == plain.run(3)
    assert loop.model.scatters == before
    effect = SingleDevice().effect(loop.training, None, None)
    assert effect.passed
    assert effect.numbers == {"calls": 3.0}
    assert list(loop.model.state_dict()) == list(plain.model.state_dict())
    undo.run()
    assert loop.run(2) == plain.run(2)
    assert loop.model.scatters == before + 2
    assert "forward" not in vars(loop.model)


def test_hooks_of_both_are_called(loop: Loop) -> None:
    seen: list[str] = []
    for module in (loop.model, loop.model.module):
        module.register_forward_hook(lambda m, args, output: seen.append(type(m).__name__))
    SingleDevice().apply(loop.training, {})
    loop.step()
    assert seen == ["ConvNet", "DataParallel"]


class Anything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: Any, *rest: Any, **more: Any) -> torch.Tensor:
        return self.weight * 2


@pytest.mark.parametrize(
    ("call", "detours"),
    [
        (lambda net: net(images(), 2, None, scale=0.5, name="a"), 0),
        (lambda net: net([images()]), 1),
        (lambda net: net(images(), mask={"a": images()}), 1),
        (lambda net: net(images().requires_grad_()), 1),
        (lambda net: net(torch.empty(2, device="meta")), 1),
    ],
)
def test_what_the_wrapper_would_bring_over_or_copy_goes_its_way(
    loop: Loop, call: Callable[[nn.Module], Any], detours: int
) -> None:
    loop.model = loop.training.roots[0].module = Wrapper(Anything())
    SingleDevice().apply(loop.training, {})
    call(loop.model)
    assert loop.model.scatters == detours


def test_a_module_that_was_moved_is_refused_as_by_the_wrapper(loop: Loop) -> None:
    SingleDevice().apply(loop.training, {})
    loop.model.module.to("meta")
    with pytest.raises(RuntimeError, match="must have its parameters and buffers"):
        loop.model(images())


def test_copies_and_other_wrappers_are_plain(loop: Loop) -> None:
    SingleDevice().apply(loop.training, {})
    twin = copy.deepcopy(loop.model)
    twin(images())
    assert twin.scatters == loop.model.scatters + 1
    loop.model.device_ids = [0, 1]
    assert not SingleDevice().match(loop.training, {}).applies
    assert not SingleDevice().match(make_loop().training, {}).applies
