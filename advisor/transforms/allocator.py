"""PyTorch's allocator with segments that grow, in place of many of fixed sizes: what lies unused between blocks is less.

Where batches or images differ in size, blocks of one step do not fit the next one's, and reserved memory grows beyond what is allocated. Set
before the first tensor is on the GPU, so in fresh processes only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from advisor.loop.training import Training
from advisor.transforms.base import Match, Transform, Undo


class ExpandableSegments(Transform):
    """`expandable_segments:True`."""

    id = "expandable_segments"
    traced = False

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        if not torch.cuda.is_available():
            return Match(applies=False, reason="there is no GPU whose allocator it would set")
        return Match(applies=True, sites=("the CUDA caching allocator",))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        _set("True")
        return Undo([lambda: _set("False")])


def _set(value: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.memory._set_allocator_settings(f"expandable_segments:{value}")
