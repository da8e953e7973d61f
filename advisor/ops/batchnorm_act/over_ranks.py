"""A batch norm's statistics over the samples of all ranks: what goes between the two launches of a pass.

As PyTorch's SyncBatchNorm: ranks gather mean, inverse deviation and how many values these are of, and the backward adds up its two sums.
The launches stay those of one rank, whose results are exchanged for all ranks' between them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed

from advisor.ops.batchnorm_act.norm import Norm

ROWS = 3  # of statistics over all ranks: mean, inverse deviation, and how many values a channel has in all


class Ranks:
    """Whose samples a norm that trains goes by: those of all in `group`; None for this process's own (distributed/norms.py sets it)."""

    group: Any = None


@contextlib.contextmanager
def of_one_rank() -> Iterator[None]:
    """Inside, batch norms go by this rank's batch."""
    before, Ranks.group = Ranks.group, None
    try:
        yield
    finally:
        Ranks.group = before


def gathered(own: torch.Tensor, x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Statistics [ROWS, C] fp32 over all ranks' samples of x, from this rank's `own` (its mean and inverse deviation are the first two rows).

    Running statistics are updated in place.
    """
    channels = x.shape[1]
    # Gathered as a sum of rows that are zero on all ranks but one: each version of torch has that, under one name.
    everybodys = own.new_zeros(distributed.get_world_size(Ranks.group), 2 * channels + 1)
    mine = everybodys[distributed.get_rank(Ranks.group)]
    mine[:-1].copy_(own[:2].flatten())
    mine[-1:].fill_(x.numel() // channels)
    distributed.all_reduce(everybodys, group=Ranks.group)
    means, inverses, counts = everybodys.split([channels, channels, 1], dim=1)
    if x.device.type == "cuda":
        mean, inverse = torch.batch_norm_gather_stats_with_counts(
            x, means, inverses, norm.running_mean, norm.running_var, norm.momentum, norm.eps, counts.flatten()
        )
        return torch.stack([mean, inverse, counts.sum().expand(channels)])
    total = counts.sum()
    share = counts / total
    mean = (share * means).sum(0)
    variance = (share * (inverses.square().reciprocal() - norm.eps + (means - mean).square())).sum(0)
    for running, new in zip(norm.running or (), (mean, variance * (total / (total - 1))), strict=False):
        running.lerp_(new, norm.momentum)
    return torch.stack([mean, (variance + norm.eps).rsqrt(), total.expand(channels)])


def over_all(statistics: torch.Tensor) -> bool:
    """Whether a forward's statistics are of all ranks."""
    return statistics.shape[0] == ROWS


def add_up(coefficients: torch.Tensor, statistics: torch.Tensor, x: torch.Tensor) -> None:
    """The backward's two means [2, C], of this rank's values of x, become those of all ranks' values."""
    coefficients.mul_(x.numel() // x.shape[1])
    distributed.all_reduce(coefficients, group=Ranks.group)
    coefficients.div_(statistics[2])
