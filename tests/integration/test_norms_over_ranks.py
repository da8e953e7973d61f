"""Batch norms over all ranks' samples by the kernels, emulated: two processes over gloo."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data_parallel
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from advisor.distributed import norms
from advisor.loop.patches import Patches
from advisor.ops import dispatch
from advisor.ops.batchnorm_act import api
from advisor.ops.batchnorm_act.over_ranks import of_one_rank

ACTIVATIONS = ("none", "relu", "silu")


def inputs(rank: int, *, residual: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Of 3 samples on rank 0 and 2 on rank 1, with other means."""
    drawn = torch.Generator().manual_seed(rank)
    like = torch.empty(3 - rank, 16, 5, 4).contiguous(memory_format=torch.channels_last)
    x, r, dy = (
        torch.randn(like.shape, generator=drawn).contiguous(memory_format=torch.channels_last) for _ in range(3)
    )
    return (x * (1 + rank) + rank).requires_grad_(), r.requires_grad_() if residual else None, dy


def results(way: Any, rank: int, activation: str, *, residual: bool) -> dict[str, torch.Tensor]:
    """What the norm gives out, its gradients and its running statistics."""
    x, r, dy = inputs(rank, residual=residual)
    norm = nn.BatchNorm2d(16, momentum=0.3)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, 16))
        norm.bias.copy_(torch.linspace(-0.3, 0.3, 16))
    y = way(x, r, norm, activation)
    y.backward(dy)
    found = {"y": y, "dx": x.grad, "dweight": norm.weight.grad, "dbias": norm.bias.grad}
    found |= {"mean": norm.running_mean, "variance": norm.running_var}
    return {name: value.detach().clone() for name, value in (found | ({"dr": r.grad} if r is not None else {})).items()}


def by_kernels(x: Any, r: Any, norm: Any, activation: str) -> torch.Tensor:
    running = norm.running_mean, norm.running_var
    return api.batchnorm_act(x, r, *running, norm.weight, norm.bias, norm.momentum, norm.eps, activation)


def by_pytorch(x: Any, r: Any, norm: Any, activation: str) -> torch.Tensor:
    z = norm(x) if r is None else norm(x) + r
    return {"none": lambda z: z, "relu": F.relu, "silu": F.silu}[activation](z)


def train(rank: int, folder: Path) -> Iterator[tuple[str, Any]]:
    from emulation import device

    patch = pytest.MonkeyPatch()
    running = device.emulated.__wrapped__(patch)
    next(running)
    norms.install(Patches())
    apart = {}
    for residual in (False, True):
        for activation in ACTIVATIONS[: 2 if residual else 3]:
            ours, theirs = (results(way, rank, activation, residual=residual) for way in (by_kernels, by_pytorch))
            apart |= {f"{activation} {residual} {n}": float((ours[n] - theirs[n]).abs().max()) for n in ours}
    with of_one_rank():
        alone = results(by_kernels, rank, "relu", residual=False)
    plain = results(by_kernels, rank, "relu", residual=False)
    yield (
        "found",
        {
            "apart": apart,
            "of one rank": float((alone["y"] - plain["y"]).abs().max()),
            "ran": sorted(dispatch.counters("batchnorm_act")[0]),
        },
    )


def test_kernels_take_all_ranks_samples_as_pytorchs_synchronised_norm_does(tmp_path: Path) -> None:
    found, why = data_parallel.in_two_processes(train, tmp_path, backend="gloo")
    assert "found" in found, why
    for rank in found["found"]:
        assert max(rank["apart"].values()) < 2e-5, rank["apart"]
        assert rank["ran"] == ["add+none", "add+relu", "none", "relu", "silu"], "PyTorch's own ran"
        assert rank["of one rank"] > 0.1, "statistics of a part are others"
