"""Activations computed again: the same training, with less kept for the backward."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from advisor.core.held import ACTIVATION
from advisor.loop.training import RootModule, Training
from advisor.profiling.inside.held import Look
from advisor.transforms import registry

PARAMETERS = {"modules": "Net.1,Net.2"}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5)),
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Sigmoid()),
    )


def training_of(module: nn.Module) -> Training:
    return Training(device=torch.device("cpu"), roots=[RootModule(module=module, name="Net")])


def stepped(module: nn.Module) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    module.zero_grad()
    module(torch.randn(2, 3, 6, 6)).square().mean().backward()
    gradients = {f"grad {name}": p.grad.clone() for name, p in module.named_parameters()}
    return {**gradients, **{name: buffer.clone() for name, buffer in module.named_buffers()}}


def watched(module: nn.Module) -> Look:
    look = Look(training_of(module))
    look.begin_times()
    stepped(module)
    look.end_times()
    look.begin()
    stepped(module)
    look.end()
    return look


def test_gradients_and_running_statistics_are_bit_equal() -> None:
    plain, module = net(), net()
    transform, training = registry.get("checkpoint_activations"), training_of(module)
    assert transform.match(training, PARAMETERS).sites == ("Net.1", "Net.2")
    undo = transform.apply(training, PARAMETERS)
    for _ in range(2):
        expected, found = stepped(plain), stepped(module)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert transform.effect(training, None, None).numbers["again"] == 4
    undo.run()
    assert "forward" not in module[1].__dict__
    assert all(torch.equal(a, b) for a, b in zip(stepped(plain).values(), stepped(module).values(), strict=True))


def test_less_is_held_and_an_evaluation_is_left_alone() -> None:
    plain, module = net(), net()
    transform = registry.get("checkpoint_activations")
    transform.apply(training_of(module), PARAMETERS)
    before, after = (watched(each).result(step_us=1.0, steps=3, applied=()) for each in (plain, module))
    assert after.of(ACTIVATION) < 0.7 * before.of(ACTIVATION)
    module.eval()
    module(torch.randn(2, 3, 6, 6))
    assert copy.deepcopy(module).state_dict().keys() == plain.state_dict().keys()


def test_what_is_not_there_is_told() -> None:
    match = registry.get("checkpoint_activations").match(training_of(net()), {"modules": "Net.1,Net.9"})
    assert match.applies
    assert match.unmatched == ("Net.9: no such module",)


def test_a_look_tells_kinds_modules_and_lines() -> None:
    module = net()
    look = watched(module).result(step_us=1.0, steps=3, applied=())
    kept = {row.module: row for row in look.rows if row.kind == ACTIVATION}
    assert look.of("parameter") == look.of("gradient") == 4 * sum(p.numel() for p in module.parameters())
    # The first convolution keeps the batch; a ReLU its output, which the dropout behind it shares.
    assert kept["Net.0"].nbytes == 4 * 2 * 3 * 6 * 6
    assert kept["Net.1.2"].nbytes == pytest.approx(4 * 2 * 4 * 4 * 4)
    assert all("test_checkpoint.py:" in row.source for row in kept.values())
    costs = {cost.module: cost for cost in look.modules}
    assert costs["Net.1"].held_bytes > costs["Net.1.1"].held_bytes
    assert costs["Net.1"].input_bytes == 4 * 2 * 4 * 4 * 4
    assert costs["Net.1"].forward_us > 0
