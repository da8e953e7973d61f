"""Does the model still get the batches that the loader made: values compared bit for bit, in the running loop.

A change of the input path (prefetch, workers, pinned copies) is outside what a replay of the model can see. Where the
plain loop hands the loader's tensors on unchanged, apart from where they lie, the loop with the change must do so too;
a copy that is used before it has arrived, or a buffer that is refilled too early, shows here.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data.dataloader import _BaseDataLoaderIter

from advisor.loop.training import Training
from advisor.transforms.images import NormalisedImages

# A script, or a change, may draw ahead: the batch in use is one of the last few drawn.
_DRAWN_AHEAD = 4
# Above this size a batch is compared in part: the beginning and the end, where a torn copy shows.
_MOST_VALUES = 16_000_000


class BatchWatch:
    """Between `start` and `stop` keeps copies of the loader's latest batches; `fed` compares at a step boundary."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self._drawn: deque[list[torch.Tensor]] = deque(maxlen=_DRAWN_AHEAD)
        self._plain: Any = None

    def start(self) -> None:
        """Copies are kept from the next batch on."""
        if self._plain is not None or not self.training.loaders:
            return
        plain = self._plain = _BaseDataLoaderIter.__next__
        drawn = self._drawn

        def recorded(iterator: Any) -> Any:
            batch = plain(iterator)
            if not torch.is_grad_enabled():
                return batch  # evaluation
            leaves = [t for t in pytree.tree_leaves(batch) if isinstance(t, torch.Tensor) and t.dim()]
            drawn.append([_part(_plain(t)).clone() for t in leaves])
            return batch

        self._now = recorded
        _BaseDataLoaderIter.__next__ = recorded  # type: ignore[method-assign,assignment]  # replaced until `stop`

    @property
    def active(self) -> bool:
        """Between `start` and `stop`, where there was a loader to watch."""
        return self._plain is not None

    def fed(self) -> bool | None:
        """Whether every root input with a counterpart in a drawn batch equals it; None when none has a counterpart."""
        inputs = [
            leaf
            for root in self.training.roots
            for leaf in pytree.tree_leaves((root.args, root.kwargs))
            if isinstance(leaf, torch.Tensor) and leaf.dim()
        ]
        seen = None
        for tensor in inputs:
            part = _part(tensor.detach())
            twins = [t for batch in self._drawn for t in batch if t.shape == part.shape and t.dtype == part.dtype]
            if not twins:
                continue
            seen = True
            if not any(torch.equal(part.to(t.device), t) for t in twins):
                return False
        return seen

    def stop(self) -> None:
        """Nothing is kept or patched any more. Safe to call twice."""
        if self._plain is not None and _BaseDataLoaderIter.__next__ is self._now:
            _BaseDataLoaderIter.__next__ = self._plain  # type: ignore[method-assign]  # put back
            self._plain = None
        self._drawn.clear()


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.plain() if isinstance(tensor, NormalisedImages) else tensor.detach()


def _part(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor.size(0)
    if tensor.numel() <= _MOST_VALUES or rows < 3:
        return tensor
    few = max(1, rows * _MOST_VALUES // tensor.numel() // 2)
    return torch.cat([tensor[:few], tensor[-few:]])
