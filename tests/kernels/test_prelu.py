"""PReLU with a slope a channel: found in graphs, and the same numbers, second derivatives included."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulation.planted import passes_with
from torch import nn

from advisor.ops import catalog, dispatch, dynamo, match

FAMILY = catalog.get("prelu")


class Face(nn.Module):
    """A part of a face network's block; the last has one slope for all channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.prelu, self.one = nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.PReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(self.prelu(self.conv(x)))


@pytest.mark.usefixtures("readable_graphs")
def test_it_is_found_and_trains_as_before(emulated) -> None:
    torch.manual_seed(0)
    model = Face().to(memory_format=torch.channels_last).train()
    plain, x = copy.deepcopy(model), torch.randn(2, 3, 7, 6).to(memory_format=torch.channels_last)
    reports = {"prelu": match.MatchReport()}

    def put_in(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return dynamo.backend(reports, mode=None)(dynamo.twin(graph), inputs)

    torch._dynamo.reset()
    with dispatch.everything():
        dispatch.clear()
        torch.compile(model, backend=put_in, dynamic=False)(x).square().sum().backward()
    assert reports["prelu"].matched == {"prelu": "prelu"}
    assert reports["prelu"].unmatched == {"one": "one slope for all channels"}
    assert emulated.launches["prelu_forward"] == emulated.launches["prelu_backward"] == 1
    plain(x).square().sum().backward()
    for mine, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, want.grad, rtol=1e-4, atol=1e-4)


PLANTED = {
    "the weight's gradient": ("sum[j] += f[j] * g[j];", "sum[j] += g[j];"),
    "the slope": ("g[j] *= slope[j];", "g[j] *= slope[0];"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_planted_in_a_kernel_is_found(emulated, monkeypatch, fault: str) -> None:
    assert not passes_with(monkeypatch, FAMILY, FAMILY.verification[-1], *PLANTED[fault])
