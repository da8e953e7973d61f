"""Batch norms over the whole batch: PyTorch's SyncBatchNorm in the place of `F.batch_norm` while it normalises by the batch.

The modules stay what they are, and so do their `state_dict`s and pickles. On a GPU torch's own function runs. It has none for a CPU, where
the same sums go through the ranks' group here.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import torch
from torch import distributed
from torch.nn import functional as F
from torch.nn.modules._functions import SyncBatchNorm

from advisor.loop.patches import Patches
from advisor.ops.batchnorm_act.over_ranks import Ranks


def install(patches: Patches) -> None:
    """From now on all ranks' batches are one to a batch norm that trains."""
    replacement = _over_all_ranks(F.batch_norm)
    replacement.synchronised = True  # to kernels that know one rank's samples (ops/batchnorm_act/rewrite.py)
    patches.replace(F, "batch_norm", replacement)
    patches.replace(Ranks, "group", distributed.group.WORLD)


def _over_all_ranks(plain: Any) -> Any:
    @functools.wraps(plain)
    def batch_norm(
        input: Any,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Any:
        if Ranks.group is None or not training or not isinstance(input, torch.Tensor):
            return plain(input, running_mean, running_var, weight, bias, training, momentum, eps)
        function: Any = WithoutWaits if input.is_cuda else _OnCpu
        return function.apply(
            input,
            weight,
            bias,
            running_mean,
            running_var,
            eps,
            0.1 if momentum is None else momentum,
            Ranks.group,
            distributed.get_world_size(Ranks.group),
        )

    return batch_norm


class WithoutWaits(SyncBatchNorm):
    """PyTorch's, without its look for ranks that have no samples: a mask that the host waits for, in each norm's forward.

    Each rank of `--gpus` has samples (shards.py). PyTorch leaves the mask out while a CUDA graph is captured; so it is told that here.
    """

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Any:
        plain, me = torch.cuda.is_current_stream_capturing, threading.get_ident()
        torch.cuda.is_current_stream_capturing = lambda: threading.get_ident() == me or plain()
        try:
            return SyncBatchNorm.forward(ctx, *args)
        finally:
            torch.cuda.is_current_stream_capturing = plain


class _OnCpu(torch.autograd.Function):
    """`y = (x - mean) / sqrt(var + eps) * weight + bias` by the statistics of all ranks' `x` [N, C, ...]; sums in fp64."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, eps: float, momentum: float,
        group: Any, ranks: int,
    ) -> Any:  # fmt: skip
        channels, axes = x.shape[1], [d for d in range(x.dim()) if d != 1]
        wide = x.double()
        sums = torch.cat([wide.sum(axes), torch.tensor([x.numel() / channels], dtype=torch.float64)])
        distributed.all_reduce(sums, group=group)
        count = sums[-1]
        shape = [1, channels] + [1] * (x.dim() - 2)
        centred = wide - (sums[:-1] / count).view(shape)
        squares = centred.square().sum(axes)
        distributed.all_reduce(squares, group=group)
        inverse = (squares / count + eps).rsqrt()
        normal = (centred * inverse.view(shape)).to(x.dtype)
        if running_mean is not None:
            running_mean.lerp_((sums[:-1] / count).to(running_mean.dtype), momentum)
            running_var.lerp_((squares / (count - 1)).to(running_var.dtype), momentum)
        ctx.save_for_backward(normal, weight, inverse, count)
        ctx.group, ctx.has_bias = group, bias is not None
        y = normal if weight is None else normal * weight.view(shape)
        return y if bias is None else y + bias.view(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (dy,) = gradients
        normal, weight, inverse, count = ctx.saved_tensors
        axes, shape = [d for d in range(dy.dim()) if d != 1], [1, dy.shape[1]] + [1] * (dy.dim() - 2)
        wide, normal = dy.double(), normal.double()
        own = torch.stack([wide.sum(axes), (wide * normal).sum(axes)])
        whole = own.clone()
        distributed.all_reduce(whole, group=ctx.group)
        mean, along = (whole / count)[0].view(shape), (whole / count)[1].view(shape)
        scale = inverse if weight is None else inverse * weight
        dx = ((wide - mean - normal * along) * scale.view(shape)).to(dy.dtype)
        d_weight = own[1].to(dy.dtype) if weight is not None else None
        return dx, d_weight, own[0].to(dy.dtype) if ctx.has_bias else None, *[None] * 6
