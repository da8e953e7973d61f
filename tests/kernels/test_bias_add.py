"""Biases that no activation follows: found behind the other families, moved behind their convolutions, the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, dynamo, match
from advisor.ops.bias_add import api, reference

FAMILIES = ("bias_act", "bias_add")


class Net(nn.Module):
    """A bias alone, one before an activation, one before a sum, one over a single pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.skip = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.none, self.gate = nn.Conv2d(8, 8, 1, bias=False), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        y = F.relu(self.relu(x)) * 2
        x = x * 2 + self.none(y)
        x = self.skip(x) + x
        return x * self.gate(x.mean((2, 3), keepdim=True))


def captured(model: nn.Module) -> tuple[Any, dict[str, match.MatchReport]]:
    reports = {family: match.MatchReport() for family in FAMILIES}

    def put_in(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return dynamo.backend(reports, mode=None)(dynamo.twin(graph), inputs)

    torch._dynamo.reset()
    return torch.compile(model, backend=put_in, dynamic=False), reports


@pytest.mark.usefixtures("readable_graphs")
def test_biases_are_found_and_a_net_trains_as_before(emulated) -> None:
    torch.manual_seed(0)
    model = Net().to(memory_format=torch.channels_last).train()
    plain, x = copy.deepcopy(model), torch.randn(2, 3, 7, 7).to(memory_format=torch.channels_last)
    with dispatch.everything():
        run, reports = captured(model)
        dispatch.clear()
        run(x).square().sum().backward()
    assert reports["bias_act"].matched == {"relu": "bias+relu"}
    assert reports["bias_add"].matched == {"first": "bias", "skip": "bias+add"}
    assert sum(catalog.get("bias_add").engaged.values()) == 2
    assert emulated.launches["bias_add_forward"] == emulated.launches["bias_add_backward"] == 2
    plain(x).square().sum().backward()
    for mine, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, want.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.usefixtures("readable_graphs")
def test_biases_of_volumes_are_those_of_their_images(emulated) -> None:
    class Solid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv3d(1, 8, 3, padding=1), nn.GroupNorm(2, 8)
            self.up, self.last = nn.ConvTranspose3d(8, 8, 2, 2), nn.Conv3d(8, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.cat([self.up(self.norm(self.conv(x)))], 1))

    torch.manual_seed(0)
    model = Solid().to(memory_format=torch.channels_last_3d).train()
    plain = copy.deepcopy(model)
    x = torch.randn(2, 1, 3, 4, 5).contiguous(memory_format=torch.channels_last_3d)
    with dispatch.everything():
        run, reports = captured(model)
        run(x).square().sum().backward()
    assert reports["bias_add"].matched == {"conv": "bias", "up": "bias"}
    assert list(reports["bias_add"].unmatched) == ["last"]  # one channel
    assert emulated.launches["bias_add_backward"] == 2
    plain(x).square().sum().backward()
    for mine, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, want.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("residual", [False, True])
def test_second_derivatives_and_a_bias_in_half_precision(emulated, residual: bool) -> None:
    def gradients(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(1)
        x, other = (torch.randn(2, 3, 4, 8).permute(0, 3, 1, 2).requires_grad_() for _ in range(2))
        bias = torch.randn(8, dtype=torch.bfloat16).float().requires_grad_()
        given = (x, bias, other) if residual else (x, bias)
        first = torch.autograd.grad(
            function(*given, *([None] * (3 - len(given)))).pow(3).sum(), given, create_graph=True
        )
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), given)]

    with dispatch.everything():
        for mine, want in zip(gradients(api.bias_add), gradients(reference.bias_add), strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-4)


def test_what_is_not_measured_runs_pytorch_and_is_counted() -> None:
    x, bias = torch.randn(2, 8, 3, 3), torch.randn(8)
    dispatch.clear()
    torch.testing.assert_close(api.bias_add(x, bias), x + bias.view(1, -1, 1, 1))
    assert sum(catalog.get("bias_add").fell_back.values()) == 1
    dispatch.clear()
