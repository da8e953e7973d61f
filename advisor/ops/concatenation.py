"""Concatenations of images in both layouts, which torch makes in NCHW: here NHWC stays where most of the values lie so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from advisor.ops import consumers


def keep_nhwc(graph: fx.Graph) -> None:
    """Have the graph's concatenations of channels look at their images' layouts, which only running tells."""
    for node in graph.nodes:
        together = consumers.concatenated(node)
        if together is not None and together[1] in (1, -3):
            node.target, node.args, node.kwargs = cat, (list(together[0]), together[1]), {}


def cat(tensors: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """torch.cat of images [N, C, H, W] along their channels; those in NCHW are turned before where they are the fewer values."""
    if any(map(_nhwc, tensors)):
        turned = [t for t in tensors if t.dim() == 4 and not t.is_contiguous(memory_format=torch.channels_last)]
        if turned and 2 * sum(t.numel() for t in turned) <= sum(t.numel() for t in tensors):
            tensors = [t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t for t in tensors]
    return torch.cat(tensors, dim)  # type: ignore[arg-type]  # as torch.fx hands them over


def _nhwc(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
