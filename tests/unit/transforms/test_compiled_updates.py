"""Beside an optimizer's step that the script compiles: what it was compiled for stays as it is."""

from __future__ import annotations

import math
import shutil

import pytest
import torch
from loops import assert_close, make_loop, twins, values

from advisor.transforms import registry
from advisor.transforms.channels_last import ChannelsLast, nhwc_inputs_seen


def _strides(tensor: torch.Tensor) -> list[int]:
    """Those that say where a value lies: of a dimension of one, any will do."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def test_the_weights_keep_their_layout_and_convolutions_get_nhwc_inputs() -> None:
    loop, plain = twins(optimizer=torch.optim.SGD)
    loop.training.updates_compiled = True
    strides = [_strides(p) for p in loop.model.parameters()]
    transform = ChannelsLast()
    assert transform.match(loop.training, {}).applies
    undo = transform.apply(loop.training, {})
    losses, expected = loop.run(3), plain.run(3)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)
    assert_close(values(loop), values(plain), 1e-3)
    assert [_strides(p) for p in loop.model.parameters()] == strides
    assert [_strides(p.grad) for p in loop.model.parameters()] == strides
    assert transform.effect(loop.training, None, None).passed
    assert any(nhwc_inputs_seen(loop.training.roots[0]))
    undo.run()
    assert not any(nhwc_inputs_seen(loop.training.roots[0]))


@pytest.mark.parametrize("identifier", ["fused_optimizer", "set_to_none", "conv_bias"])
def test_what_changes_the_optimizer_or_hangs_hooks_on_it_refuses_and_says_why(identifier: str) -> None:
    loop = make_loop(optimizer=torch.optim.SGD)
    loop.training.updates_compiled = True
    for parameter in loop.model.parameters():  # as if zeroed in place, again and again
        parameter.grad = torch.zeros_like(parameter)
        for _ in range(10):
            parameter.grad.zero_()
    found = registry.get(identifier).match(loop.training, {})
    assert not found.applies
    assert "compiles its optimizer's step" in found.reason


@pytest.mark.parametrize("how", ["wrapped", "in place", "its forward", "nothing"])
def test_a_model_that_the_script_compiles_is_left_to_it_however_it_does(how: str) -> None:
    loop = make_loop(optimizer=torch.optim.SGD)
    root = loop.training.roots[0]
    if how == "wrapped":
        root.module = torch.compile(loop.model, backend="eager")
    elif how == "in place":
        loop.model.compile(backend="eager")
    elif how == "its forward":
        loop.model.forward = torch.compile(loop.model.forward, backend="eager")
    reason = registry.get("compile").match(loop.training, {}).reason
    assert ("compiles the model itself" in reason) is (how != "nothing")


@pytest.mark.long
@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="Inductor needs a C++ compiler")
def test_a_step_that_inductor_compiled_goes_on_through_every_switch() -> None:
    """torch 2.13 asserts on strides in the code that it generated, and its hint behind that blames a custom operator."""
    loop = make_loop(optimizer=torch.optim.SGD, steps=1)
    plain = loop.optimizer.step
    loop.optimizer.step = torch.compile(lambda: plain())
    loop.run(2)
    loop.training.updates_compiled = True
    transform = ChannelsLast()
    for _ in range(2):
        undo = transform.apply(loop.training, {})
        assert all(map(math.isfinite, loop.run(2)))
        undo.run()
        assert all(map(math.isfinite, loop.run(2)))
