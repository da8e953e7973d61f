"""A second look at a forward pass leaves no trace, hooks of the script included."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from advisor.loop.training import RootModule
from advisor.transforms.replay import hooked, replay


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.calls, self.scale, self.warm = 0, 1.0, False
        self.register_buffer("expanded", torch.ones(1).expand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.scale *= 0.5
        self.warm = True
        random.random()
        numpy.random.rand()
        return torch.dropout(self.bn(self.conv(x)), 0.5, True)


def root(net: nn.Module) -> RootModule:
    return RootModule(module=net, name="net", args=(torch.randn(2, 3, 8, 8),))


def test_buffers_numbers_and_random_states_are_as_before() -> None:
    found = root(Net())
    net = found.module
    buffers = [buffer.clone() for buffer in net.buffers()]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    assert replay(found).shape == (2, 4, 6, 6)
    assert (net.calls, net.scale, net.warm) == (0, 1.0, False)
    assert all(torch.equal(a, b) for a, b in zip(buffers, net.buffers(), strict=True))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), numpy.random.get_state()[1].tolist())


class Stateful(nn.Module):
    """Losses for the script to add up, a state that goes on from call to call, and a buffer that is another tensor after each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.losses: dict[str, list[torch.Tensor]] = {"aux": []}
        self.state: torch.Tensor | None = None
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        self.losses["aux"].append(y.square().mean())
        self.state = y.mean((0, 2, 3)) if self.state is None else self.state * 0.5
        self.mean = self.mean * 0.9 + self.state.detach()
        self.last = y
        return y


def test_what_a_forward_leaves_for_the_script_is_as_before() -> None:
    found = root(Stateful())
    net = found.module
    replay(found)
    assert net.losses == {"aux": []}
    assert net.state is None
    assert not hasattr(net, "last")
    assert torch.equal(net.mean, torch.zeros(4))
    net(*found.args)
    (loss,), state, mean, last = net.losses["aux"], net.state, net.mean, net.last
    value = mean.clone()
    replay(found)
    assert len(net.losses["aux"]) == 1
    assert net.losses["aux"][0] is loss
    assert (net.state is state, net.mean is mean, net.last is last) == (True, True, True)
    assert torch.equal(mean, value)


def test_a_forward_that_fails_leaves_no_trace_either() -> None:
    found = root(Net())
    found.module.bn = nn.BatchNorm2d(5)
    with pytest.raises(RuntimeError):
        replay(found)
    assert found.module.calls == 0


def test_the_scripts_hooks_can_be_passed_over_and_torchs_own_still_run() -> None:
    net = Net()
    seen: list[str] = []
    net.bn.register_forward_hook(lambda *_: seen.append("after"))
    net.bn.register_forward_pre_hook(lambda *_: seen.append("before"))
    with pytest.warns(FutureWarning, match="weight_norm"):
        nn.utils.weight_norm(net.conv)  # the old one, by a hook of torch's own
    net.conv.weight = None  # what it convolves with is that hook's
    hooks = dict(net.bn._forward_hooks)
    replay(root(net), hooks=False)
    assert seen == []
    assert net.conv.weight is None
    assert dict(net.bn._forward_hooks) == hooks
    replay(root(net))
    assert seen == ["before", "after"]


def test_whose_hooks_are_the_scripts() -> None:
    net = Net()
    weight_norm(net.conv)
    assert hooked(net) == []
    net.register_forward_hook(lambda *_: None)  # on the root: a replay passes it over as it is
    assert hooked(net) == []
    net.bn.register_forward_pre_hook(lambda *_: None)
    assert hooked(net) == ["bn"]
