"""A grouped convolution by its numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class GroupedConv(NamedTuple):
    """One grouped convolution, 3 x 3 taps, padding 1: sizes of input and output; `group` channels a group."""

    batch: int
    channels: int
    height: int
    width: int
    out_height: int
    out_width: int
    group: int
    stride: int

    def transposed(self) -> GroupedConv:
        """With stride 1: the convolution with turned taps that gives the data gradient, from dy to dx."""
        return self._replace(height=self.out_height, width=self.out_width, out_height=self.height, out_width=self.width)


@lru_cache(maxsize=4096)
def grouped_conv(shape: tuple[int, ...], groups: int, stride: int) -> GroupedConv:
    """The convolution of an input of `shape` [N, C, H, W]."""
    n, c, h, w = shape
    return GroupedConv(n, c, h, w, (h - 1) // stride + 1, (w - 1) // stride + 1, c // groups, stride)
