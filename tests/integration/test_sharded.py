"""Ranks that keep a share of the optimizer's state, or of the weights too: processes over gloo against one, by the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data_parallel
import pytest
import torch
from torch import nn

from advisor.distributed import place
from advisor.distributed.gradients import Gradients
from advisor.distributed.shards import Loaders
from advisor.loop.patches import Patches

STEPS = 4
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 5)]
    return nn.Sequential(*parts).to(memory_format=torch.channels_last)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(4, 3, 8, 8, generator=drawn), torch.randint(0, 5, (4,), generator=drawn)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, part: slice, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x[part]), y[part])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def plain(state: Any) -> Any:
    """Numbers, to be compared."""
    if isinstance(state, torch.Tensor):
        assert type(state) is torch.Tensor, "a share in a checkpoint"
        return state.double().tolist()
    if isinstance(state, dict):
        return {str(name): plain(value) for name, value in state.items()}
    return [plain(value) for value in state] if isinstance(state, (list, tuple)) else state


def kept(optimizer: torch.optim.Optimizer) -> int:
    """Values of state in this rank."""
    values = (
        v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor) and v.dim()
    )
    return sum(getattr(v, "_local_tensor", v).numel() for v in values)


def shards(ranks: int) -> tuple[str, ...]:
    """Stages of a pipeline have a test of their own: each rank computes on all samples."""
    shared = (shard for shard in place.SHARDS if shard != place.PIPELINE)
    return tuple(shard for shard in shared if (shard == place.HYBRID) == (ranks > 2))


def shares(rank: int, folder: Path) -> Iterator[tuple[str, Any]]:
    ranks = torch.distributed.get_world_size()
    part = slice(4 // ranks * rank, 4 // ranks * (rank + 1))
    for shard in shards(ranks):
        for name, make in OPTIMIZERS.items():
            patches, loaders = Patches(), Loaders(rank, ranks)
            loaders.divided, loaders.share = True, 1 / ranks
            gradients = Gradients(loaders, shard=shard)
            gradients.install(patches)
            model = net()
            optimizer = make(model.parameters())
            losses = trained(model, optimizer, part, range(STEPS))
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            yield f"{shard} {name}", [losses, plain(saved), kept(optimizer)]
            # What a checkpoint brings is dealt out, in a model that trains already and before its first step.
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(copy.deepcopy(saved[1]))
            on = trained(model, optimizer, part, range(STEPS, 2 * STEPS))
            yield f"{shard} {name} on", [on, plain(model.state_dict()), kept(optimizer)]
            patches.restore_all()
            patches = Patches()
            Gradients(loaders, shard=shard).install(patches)
            again = net()
            resumed = make(again.parameters())
            again.load_state_dict(saved[0])
            resumed.load_state_dict(copy.deepcopy(saved[1]))
            yield f"{shard} {name} resumed", trained(again, resumed, part, range(STEPS, 2 * STEPS))
            patches.restore_all()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_with_shares_train_save_and_resume_as_one_process_does(tmp_path: Path, ranks: int) -> None:
    found, why = data_parallel.in_processes(shares, tmp_path, ranks, backend="gloo")
    assert not why
    for shard in shards(ranks):
        for name, make in OPTIMIZERS.items():
            model = net()
            optimizer = make(model.parameters())
            whole = slice(0, 4)
            losses = trained(model, optimizer, whole, range(STEPS))
            state, values = plain((model.state_dict(), optimizer.state_dict())), kept(optimizer)
            on = trained(model, optimizer, whole, range(STEPS, 2 * STEPS))
            each = found[f"{shard} {name}"]
            close = {"rel": 1e-4, "abs": 1e-6}
            assert [sum(at) / ranks for at in zip(*(rank[0] for rank in each), strict=True)] == pytest.approx(
                losses, **close
            )
            for rank in each:
                assert _flat(rank[1]) == pytest.approx(_flat(state), **close)
                assert rank[2] <= 0.75 * values, "each rank keeps the whole state"
            further = found[f"{shard} {name} on"]
            assert [sum(pair) / ranks for pair in zip(*(rank[0] for rank in further), strict=True)] == pytest.approx(
                on, **close
            )
            assert all(rank[2] <= 0.75 * values for rank in further)
            resumed = found[f"{shard} {name} resumed"]
            assert [sum(pair) / ranks for pair in zip(*resumed, strict=True)] == pytest.approx(on, **close)


def _flat(state: Any) -> list[float]:
    if isinstance(state, dict):
        return [v for name in sorted(state) for v in _flat(state[name])]
    if isinstance(state, list):
        return [v for value in state for v in _flat(value)]
    return [float(state)] if isinstance(state, (int, float)) else []
