"""CUDA graphs that send gradients to other ranks, emulated: two processes over gloo."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data_parallel
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from advisor.core.gpus import SENDS
from advisor.distributed.gradients import Replicated
from advisor.distributed.shards import Loaders
from advisor.loop.training import RootModule, Training
from advisor.transforms.cuda_graphs import CudaGraphs
from advisor.transforms.forward import REPLICATED, ForwardStack
from advisor.transforms.graphs.layer import layers

STEPS, ODD, ACCUMULATES = 16, 11, 13  # in step ODD rank 1's batch has another shape: it runs eagerly beside a replay


class Net(nn.Module):
    """Several buckets, of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 7, 3, padding=1), nn.BatchNorm2d(7)
        self.fc, self.last = nn.Linear(7, 301), nn.Linear(301, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.fc(F.relu(self.norm(self.conv(x))).mean((2, 3)))))


def batch(rank: int, step: int) -> torch.Tensor:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3 if (rank, step) == (1, ODD) else 4, 3, 8, 8, generator=drawn)


def nothing_can_be_captured() -> Any:
    raise RuntimeError("no graph here")


def train(rank: int, folder: Path) -> Iterator[tuple[str, Any]]:
    """As `--gpus 2` wraps it, or in a DistributedDataParallel of the script's own ("own"), with graphs, beside PyTorch's."""
    from emulation import graphs as emulation

    patch = pytest.MonkeyPatch()
    made = emulation.graphs.__wrapped__(patch)
    torch.manual_seed(0)
    ours = Net()
    theirs = DistributedDataParallel(copy.deepcopy(ours), bucket_cap_mb=0.005)
    root: nn.Module = ours
    if folder.name == "own":
        root = DistributedDataParallel(ours, bucket_cap_mb=0.005)
    else:
        replicated = Replicated(ours, Loaders(rank, 2), {"bucket_cap_mb": 0.005}, synchronised=True)
        ForwardStack.of(ours).set(REPLICATED, replicated)
    optimizers = [torch.optim.SGD(net.parameters(), 0.05, momentum=0.9) for net in (ours, theirs)]
    if folder.name != "own":
        optimizers[0].register_step_pre_hook(lambda *_: replicated.stepped())
    training = Training(
        device=torch.device("cuda"), roots=[RootModule(module=root, name="Net")], optimizers=[optimizers[0]]
    )
    transform = CudaGraphs()
    if folder.name == "alone" and rank == 1:  # no capture succeeds: it runs all steps eagerly
        patch.setattr(torch.cuda, "graph", lambda *_, **__: nothing_can_be_captured())
    if folder.name == "own":
        assert "does work of its own" in transform.match(training, {}).reason, "only where a proof follows"
    assert transform.match(training, SENDS).applies
    transform.apply(training, SENDS)
    losses = []
    for step in range(STEPS):
        for net, optimizer in zip((root, theirs), optimizers, strict=True):
            optimizer.zero_grad()
            if step == ACCUMULATES:  # one backward before it that does not send
                with net.no_sync() if folder.name == "own" else contextlib.nullcontext():
                    net(batch(rank, 99)).square().mean().backward()
            loss = net(batch(rank, step)).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
    own = torch.cat([p.detach().flatten() for p in ours.parameters()])
    other = torch.cat([p.detach().flatten() for p in theirs.parameters()])
    sender: Any = ForwardStack.of(root).get(REPLICATED)
    sending = sender._sending
    yield (
        folder.name,
        {
            "apart": float((own - other).abs().max()),
            "losses": [losses[0::2], losses[1::2]],
            "weights": own.tolist()[:50],
            "replays": [graph.replays for graph in made],
            "buckets": len(sending.buckets) if sending is not None else 0,
            "buffers": float(ours.norm.running_mean.sum()) - float(theirs.module.norm.running_mean.sum()),
            "why": layers.of(root, False).failures,
        },
    )


@pytest.mark.parametrize("who", ["all", "alone", "own"])
def test_a_backward_that_sends_inside_its_graph_trains_as_ddp_does(tmp_path: Path, who: str) -> None:
    """Also where one rank replays and the other does not: they meet in the same collectives."""
    folder = tmp_path / who
    folder.mkdir()
    found, why = data_parallel.in_two_processes(train, folder, backend="gloo")
    assert who in found, why
    first, second = found[who]
    assert first["buckets"] > 1
    assert first["weights"] == second["weights"], "the ranks have trained apart"
    for rank in (first, second):
        assert rank["apart"] < 1e-5
        assert rank["losses"][0] == pytest.approx(rank["losses"][1], rel=1e-5)
    assert first["replays"][0] > 5, first["why"]
    assert first["replays"][0] == first["replays"][1]
    assert bool(sum(second["replays"])) == (who != "alone")
    if who == "own":
        assert abs(first["buffers"]) + abs(second["buffers"]) < 1e-6, "rank 0's statistics are everybody's in each step"
    if who == "all":
        assert second["replays"][0] == first["replays"][0] - 1, "the odd batch has no graph"
