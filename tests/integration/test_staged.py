"""A pipeline over ranks: processes over gloo against one, by the same numbers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import data_parallel
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from advisor.distributed import place, stages
from advisor.distributed.gradients import Gradients
from advisor.distributed.shards import Loaders
from advisor.loop.patches import Patches

STEPS = 4
KEPT = "kept for the backward"


class Across(nn.Module):
    """What one layer gives out, two others take, of which one may lie two stages on."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second, self.third = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(16) if norm == "batch" else nn.GroupNorm(2, 16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = self.first(x).relu()
        b = self.third(self.second(a).relu())
        y = self.norm(torch.cat([a, b], 1)).relu()
        return self.head(y.mean((2, 3))), y.square().mean((1, 2, 3))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of twelve samples; of ten, the last one. The loss is over the whole batch, which no rank's part would have."""
    drawn = torch.Generator().manual_seed(step)
    size = 12 if step < STEPS - 1 else 10
    return torch.randn(size, 3, 6, 6, generator=drawn), torch.randint(0, 5, (size,), generator=drawn)


def trained(net: nn.Module) -> list[Any]:
    """Losses, gradients' norms before they are clipped, and what stands in the model at the end; two backward passes a step."""
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    found: list[Any] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for turn in range(2):
            x, y = batch(step + turn)
            logits, power = net(x)
            loss = F.cross_entropy(logits, y) + (logits @ logits.t()).square().mean() * 0.01 + power.max()
            loss.backward()
        found += [loss.item(), float(nn.utils.clip_grad_norm_(net.parameters(), 1.0))]
        optimizer.step()
    net.eval()
    with torch.no_grad():
        found.append(net(batch(0)[0])[0].sum().item())
    net.train()
    return found + [value.double().norm().item() for value in net.state_dict().values()]


def kept(net: nn.Module) -> int:
    """Values that a forward keeps for the backward."""
    saved: list[int] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net(batch(0)[0])
    return sum(saved)


def of_groups(rank: int, folder: Path) -> Iterator[tuple[str, Any]]:
    yield from piped(rank, folder, "group")


def of_batches(rank: int, folder: Path) -> Iterator[tuple[str, Any]]:
    yield from piped(rank, folder, "batch")


def piped(rank: int, folder: Path, norm: str) -> Iterator[tuple[str, Any]]:
    patches = Patches()
    # Each module takes as long as any other, whatever else the machine does: stages are cut by their times.
    ticks = itertools.count()
    pytest.MonkeyPatch().setattr(stages, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    wrapped = Gradients(Loaders(rank, torch.distributed.get_world_size(), order=list), shard=place.PIPELINE)
    wrapped.install(patches)
    net = Across(norm)
    yield "trained", trained(net)
    marked = [
        name for name, module in net.named_modules() if name and {"forward", "_orig_forward"} & vars(module).keys()
    ]
    yield "left in the model", len(marked)
    yield KEPT, kept(net)
    patches.restore_all()


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "train"),
    [
        (2, of_groups),
        (2, of_batches),
        (3, of_groups),
    ],
    ids=["2 group norm", "2 batch norm", "3 group norm"],
)
def test_stages_train_as_one_process_does_and_each_keeps_its_share(tmp_path: Path, ranks: int, train: Any) -> None:
    found, why = data_parallel.in_processes(train, tmp_path, ranks, backend="gloo")
    assert not why
    net = Across("group" if train is of_groups else "batch")
    alone = trained(net)
    for each in found["trained"]:
        assert each == pytest.approx(alone, rel=1e-4, abs=1e-6)
    assert found["left in the model"] == [0] * ranks
    assert max(found[KEPT]) < 0.9 * kept(net), "a rank keeps what all stages need"
