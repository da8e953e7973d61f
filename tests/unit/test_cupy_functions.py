"""advisor.cupy's functions against torch's, in fp64, on NumPy's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from advisor import cupy

RNG = np.random.default_rng(0)


def leaf(array: Any) -> torch.Tensor:
    return torch.tensor(array, requires_grad=True)


def same(*pairs: tuple[Any, torch.Tensor | None]) -> None:
    for ours, theirs in pairs:
        assert theirs is not None
        np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [((3, 3), 1, 1), ((4, 2), (2, 1), (1, 0)), ((1, 1), 1, 0), ((5, 5), 3, 2)]
)
def test_convolution(kernel: tuple[int, int], stride: Any, padding: Any) -> None:
    x, w, b = RNG.normal(size=(2, 3, 9, 8)), RNG.normal(size=(4, 3, *kernel)), RNG.normal(size=4)
    tx, tw, tb = leaf(x), leaf(w), leaf(b)
    y = F.conv2d(tx, tw, tb, stride=stride, padding=padding)
    dy = RNG.normal(size=y.shape)
    y.backward(torch.tensor(dy))
    dx, dw, db = cupy.conv2d_gradients(dy, x, w, stride=stride, padding=padding)
    same((cupy.conv2d(x, w, b, stride=stride, padding=padding), y), (dx, tx.grad), (dw, tw.grad), (db, tb.grad))


@pytest.mark.parametrize(("size", "stride", "padding"), [(2, None, 0), (3, 2, 1), ((2, 3), (2, 1), (1, 1))])
def test_max_pooling(size: Any, stride: Any, padding: Any) -> None:
    x = RNG.normal(size=(2, 3, 9, 8))
    tx = leaf(x)
    y = F.max_pool2d(tx, size, stride=stride, padding=padding)
    dy = RNG.normal(size=y.shape)
    y.backward(torch.tensor(dy))
    ours, places = cupy.max_pool2d(x, size, stride=stride, padding=padding)
    dx = cupy.max_pool2d_gradient(dy, places, x.shape, size, stride=stride, padding=padding)
    same((ours, y), (dx, tx.grad))


def test_norms() -> None:
    for shape, width in (((4, 3, 5, 6), 3), ((7, 3), 3)):
        x, gamma, beta, dy = (
            RNG.normal(size=shape),
            RNG.normal(size=width),
            RNG.normal(size=width),
            RNG.normal(size=shape),
        )
        tx, tg, tb = leaf(x), leaf(gamma), leaf(beta)
        y = F.batch_norm(tx, None, None, tg, tb, training=True)
        y.backward(torch.tensor(dy))
        ours, mean, scale = cupy.batch_norm(x, gamma, beta)
        found = cupy.batch_norm_gradients(dy, x, gamma, mean, scale)
        same((ours, y), *zip(found, (tx.grad, tg.grad, tb.grad), strict=True))
    x, gamma, beta, dy = RNG.normal(size=(4, 3, 6)), RNG.normal(size=6), RNG.normal(size=6), RNG.normal(size=(4, 3, 6))
    tx, tg, tb = leaf(x), leaf(gamma), leaf(beta)
    y = F.layer_norm(tx, (6,), tg, tb)
    y.backward(torch.tensor(dy))
    ours, mean, scale = cupy.layer_norm(x, gamma, beta)
    same(
        (ours, y), *zip(cupy.layer_norm_gradients(dy, x, gamma, mean, scale), (tx.grad, tg.grad, tb.grad), strict=True)
    )


def test_shapes_that_do_not_fit_are_told() -> None:
    with pytest.raises(ValueError, match=r"expected \(N, C_in, H, W\)"):
        cupy.conv2d(np.zeros((1, 2, 4, 4)), np.zeros((3, 1, 3, 3)))
    with pytest.raises(ValueError, match="at least as large"):
        cupy.conv2d(np.zeros((1, 1, 2, 2)), np.zeros((3, 1, 3, 3)))
