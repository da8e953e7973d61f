"""Sums in one launch or two: their kernels emulated, over every way an array can be seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from emulation.device import emulated

from advisor.cupy_loops.replay import sums

__all__ = ["emulated"]

SHAPES = [
    ((300, 33), (0,)),
    ((700, 20), (0,)),
    ((6, 5, 8, 9), (0, 2, 3)),
    ((2, 700, 3), (0, 2)),
    ((40, 130), (1,)),
    ((2100, 1), (0,)),
    ((2, 3, 500), (0, 1, 2)),
    ((1, 900, 3, 1), (1,)),
]


@pytest.mark.parametrize(
    ("shape", "axes", "letter"), [(*case, "d") for case in SHAPES] + [(*case, "f") for case in SHAPES[:3]]
)
def test_sums_means_and_variances(emulated: Any, shape: tuple[int, ...], axes: tuple[int, ...], letter: str) -> None:
    dtype = torch.float32 if letter == "f" else torch.float64
    numbers = torch.from_numpy(np.random.default_rng(0).normal(size=shape)).to(dtype)
    seen = sums.seen_as(shape, axes)
    assert seen is not None
    count = seen[0] * seen[2]

    def reduced(mean: torch.Tensor | None, by: int) -> torch.Tensor:
        x = numbers
        steps = sums.launches(*seen)
        for step in steps:
            out = torch.empty((step.parts, seen[1]), dtype=dtype)
            given = mean.data_ptr() if mean is not None and step is steps[0] else 0
            scale = np.dtype(letter).type(by if step is steps[-1] else 1)
            entry = emulated.compiled(sums.source(letter), f"{step.kernel}_{letter}")
            sizes = [np.int32(size) for size in step.sizes]
            entry((*step.grid, 1), (256, 1, 1), (x.data_ptr(), given, out.data_ptr(), *sizes, scale))
            x = out
        return x[0]

    exact = numbers.double()
    mean = reduced(None, count)
    close = {"rtol": 1e-5, "atol": 1e-4} if letter == "f" else {"rtol": 1e-12, "atol": 1e-11}
    torch.testing.assert_close(reduced(None, 1).double(), exact.sum(axes).flatten(), **close)
    torch.testing.assert_close(mean.double(), exact.mean(axes).flatten(), **close)
    torch.testing.assert_close(reduced(mean, count - 1).double(), exact.var(axes, correction=1).flatten(), **close)


def test_how_an_array_is_seen() -> None:
    assert sums.seen_as((4, 5, 6), (0, 1)) == (20, 6, 1)
    assert sums.seen_as((4, 5, 6), (2,)) == (1, 20, 6)
    assert sums.seen_as((4, 1, 6), (1,)) is None  # nothing is summed
    assert sums.seen_as((4, 5, 6, 7), (1, 3)) is None
    assert all(step.parts == 1 for step in sums.launches(25088, 64, 1)[-1:])


def test_dimensions_in_the_order_in_which_they_lie() -> None:
    x = np.zeros((4, 5, 6, 7))
    assert sums.lying(x.shape, x.strides, 8) == [0, 1, 2, 3]
    turned = x.transpose(0, 3, 1, 2)  # images whose channels lie innermost
    assert sums.lying(turned.shape, turned.strides, 8) == [0, 2, 3, 1]
    for gaps in (x[:, ::2], x[..., :3], np.broadcast_to(x, (2, 4, 5, 6, 7)), x[:, ::-1]):
        assert sums.lying(gaps.shape, gaps.strides, 8) is None
    one = np.zeros((1, 5, 1, 7)).transpose(2, 3, 0, 1)
    found = sums.lying(one.shape, one.strides, 8)
    assert found is not None
    assert [d for d in found if one.shape[d] > 1] == [3, 1]
