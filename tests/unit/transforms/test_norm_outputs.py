"""Outputs of norms made again in the backward: the same bits, and less kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from advisor.analysis import activations
from advisor.core.held import ACTIVATION
from advisor.loop.training import RootModule, Training
from advisor.profiling.inside.held import Look
from advisor.transforms import registry


class Dense(nn.Module):
    """As DenseNet has it: the norm before the convolution, in the forward's own words."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.relu, self.conv = nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.conv(self.relu(self.norm(x)))], 1)


def of_unet() -> nn.Module:
    parts = [
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
    ]
    return nn.Sequential(nn.Sequential(*parts), nn.Conv2d(4, 2, 1))


def of_densenet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), Dense(), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))


def of_others() -> nn.Module:
    parts = [
        nn.Conv2d(3, 4, 3),
        nn.GroupNorm(2, 4),
        nn.SiLU(),
        nn.Conv2d(4, 4, 1),
        nn.BatchNorm2d(4),
        nn.GELU(),
        nn.Conv2d(4, 4, 1),
    ]
    return nn.Sequential(*parts, nn.BatchNorm2d(4), nn.Sigmoid())


NETS = {"unet": of_unet, "densenet": of_densenet, "others": of_others}


def training_of(net: nn.Module) -> Training:
    return Training(device=torch.device("cpu"), roots=[RootModule(module=net, name="Net")])


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().to(memory_format=torch.channels_last)


def norms(net: nn.Module) -> dict[str, str]:
    kinds = (nn.BatchNorm2d, nn.GroupNorm)
    return {"modules": ",".join(f"Net.{name}" for name, module in net.named_modules() if isinstance(module, kinds))}


def stepped(net: nn.Module, *, twice: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    net.zero_grad()
    loss = net(torch.randn(2, 3, 8, 8)).square().mean()
    loss.backward(retain_graph=twice)
    if twice:
        loss.backward()
    gradients = {f"grad {name}": p.grad.clone() for name, p in net.named_parameters()}
    return {**gradients, **{name: buffer.clone() for name, buffer in net.named_buffers()}}


def held(net: nn.Module) -> int:
    look = Look(training_of(net))
    look.begin_times()
    stepped(net)
    look.end_times()
    look.begin()
    stepped(net)
    look.end()
    return look.result(step_us=1.0, steps=3, applied=()).of(ACTIVATION)


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("twice", [False, True], ids=["one backward", "two"])
def test_gradients_and_statistics_are_bit_equal(kind: str, twice: bool) -> None:
    plain, net = made(NETS[kind]), made(NETS[kind])
    transform, training = registry.get("recompute_norms"), training_of(net)
    assert transform.match(training, norms(net)).applies
    undo = transform.apply(training, norms(net))
    for _ in range(2):
        expected, found = stepped(plain, twice=twice), stepped(net, twice=twice)
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    assert transform.effect(training, None, None).passed
    undo.run()
    assert "forward" not in vars(net)
    assert all(torch.equal(a, b) for a, b in zip(stepped(plain).values(), stepped(net).values(), strict=True))


@pytest.mark.parametrize("kind", NETS)
def test_less_is_held_as_predicted(kind: str) -> None:
    plain, net = made(NETS[kind]), made(NETS[kind])
    look = Look(training_of(plain))
    look.begin()
    stepped(plain)
    look.end()
    seen = look.result(step_us=1.0, steps=3, applied=())
    chosen = activations.renewed(seen, seen.of(ACTIVATION))
    assert set(chosen.modules) <= set(norms(net)["modules"].split(","))
    registry.get("recompute_norms").apply(training_of(net), {"modules": ",".join(chosen.modules)})
    saved = sum(cost.renewed_bytes for cost in seen.modules)
    assert held(plain) - held(net) == pytest.approx(saved, rel=0.02)
    assert saved > 0.2 * seen.of(ACTIVATION)


def test_what_is_written_into_since_is_kept_as_it_is() -> None:
    """A norm's output that somebody scales in place is no norm's output any more."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.conv = nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(self.norm(x).mul_(2.0))

    plain, net = made(Scaled), made(Scaled)
    registry.get("recompute_norms").apply(training_of(net), norms(net))
    assert all(torch.equal(a, b) for a, b in zip(stepped(plain).values(), stepped(net).values(), strict=True))


def test_weights_that_change_before_the_backward_raise_as_autograd_does() -> None:
    net = made(of_unet)
    registry.get("recompute_norms").apply(training_of(net), norms(net))
    loss = net(torch.randn(2, 3, 8, 8)).sum()
    with torch.no_grad():
        net[0][4].weight.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_no_norm_that_several_ranks_share_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    net = made(of_unet)
    assert "several ranks" in registry.get("recompute_norms").match(training_of(net), norms(net)).reason
