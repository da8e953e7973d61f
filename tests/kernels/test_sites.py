"""Sites: calls that are recorded in Python and replayed from C++, on emulated kernels."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, match
from advisor.ops.sites import install, native

pytestmark = pytest.mark.skipif(bool(native.unavailable()), reason=native.unavailable())


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    install.recorded.clear()
    install.refused.clear()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm2d(16) for _ in range(3))
        self.conv = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.bn1(self.first(x))))
        y = self.bn2(self.conv(x))
        x = F.relu(y + x)
        x = F.silu(self.bn3(x))
        return F.adaptive_avg_pool2d(x, 1).flatten(1)


def captured(model: nn.Module):
    reports = {family.id: match.MatchReport() for family in catalog.FAMILIES if family.captured}
    return torch.compile(model.forward, backend=match.backend(reports, mode=None), dynamic=False)


def step(run, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    y = run(x)
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]


def test_steps_are_replayed_and_are_as_python_makes_them(emulated) -> None:
    torch.manual_seed(0)
    model = Net().to(memory_format=torch.channels_last).train()
    other = copy.deepcopy(model)
    run = captured(model)
    counts = []
    for seed in range(4):
        torch.manual_seed(seed)
        x = torch.randn(2, 3, 12, 12).contiguous(memory_format=torch.channels_last)
        emulated.launches.clear()
        dispatch.clear()
        mine = step(run, model, x.clone().requires_grad_())
        counts.append((dict(emulated.launches), {k: dict(v) for k, v in dispatch.engaged.items() if v}))
        theirs = step(other, other, x.clone().requires_grad_())
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert counts[0][0]
    assert all(found == counts[0] for found in counts[1:])
    print(install.recorded, install.refused)
