"""What a convolution is called with beside its tensors, and the names of its products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

FORWARD, DATA, WEIGHT = "forward", "data gradient", "weight gradient"


@dataclass(frozen=True, slots=True)
class Numbers:
    """Two of each but the groups, as for images."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def arguments(self) -> tuple[Any, ...]:
        """As aten::convolution wants them, behind the bias."""
        flat = [0] * len(self.padding)
        return list(self.stride), list(self.padding), list(self.dilation), False, flat, self.groups
