"""Gathered products on a GPU, beside CuPy's in fp64; a convolution that a naive kernel computes, by them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.gpu
SIZES = [(8, 32, 14, 64, 3), (4, 3, 32, 16, 5), (16, 64, 7, 33, 1)]  # images, channels, height, channels out, taps


@pytest.fixture
def cp() -> Any:
    return pytest.importorskip("cupy")


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize(("n", "c", "h", "o", "k"), SIZES)
def test_forward_and_weights_gradient(cp: Any, n: int, c: int, h: int, o: int, k: int, tf32: bool) -> None:
    from advisor.cupy import convolution_windows
    from advisor.cupy_loops.replay.gathered import Gatherer, operands

    rng = np.random.default_rng(0)
    x, w = (cp.asarray(rng.normal(size=s).astype("f4")) for s in ((n, c, h + k - 1, h + k - 1), (o, c, k, k)))
    dy = cp.asarray(rng.normal(size=(n, o, h, h)).astype("f4"))
    windows = convolution_windows(x, k)
    for a, b in (
        ((w, (0,), (1, 2, 3)), (windows, (1, 2, 3), (0, 4, 5))),
        ((dy, (1,), (0, 2, 3)), (windows, (0, 4, 5), (1, 2, 3))),
        ((windows, (0, 4, 5), (1, 2, 3)), (w[:, :, ::-1, ::-1], (1, 2, 3), (0,))),
    ):
        of = operands(a, b)
        out = cp.full(of.sizes[:2], cp.nan, dtype="f4")
        Gatherer(cp).made(of, tf32=tf32)(a[0], b[0], out)
        left, right = (
            value.transpose(*rows, *columns).reshape(int(np.prod([value.shape[d] for d in rows])), -1).astype("f8")
            for value, rows, columns in (a, b)
        )
        scale = abs(left) @ abs(right)
        assert bool((abs(out - left @ right) <= (2e-3 if tf32 else 1e-5) * scale).all())


def test_the_clock_chooses_for_products_that_share_a_copy(cp: Any) -> None:
    from advisor.cupy import convolution_windows
    from advisor.cupy_loops.replay.cuda import Graphs

    rng = np.random.default_rng(0)
    x, w = (cp.asarray(rng.normal(size=s).astype("f4")) for s in ((64, 32, 34, 34), (64, 32, 3, 3)))
    backend, windows = Graphs(cp), convolution_windows(x, 3)
    plain = cp.tensordot(w, windows, ((1, 2, 3), (1, 2, 3)))
    backend.products.prepare([lambda: backend.products.tensordot(w, windows, ((1, 2, 3), (1, 2, 3)))], backend.ms)
    assert len(backend.products.gatherer.chosen) <= 1
    found = backend.products.tensordot(w, windows, ((1, 2, 3), (1, 2, 3)))
    cp.testing.assert_allclose(found, plain, rtol=1e-3, atol=1e-3)
    cp.testing.assert_allclose(
        backend.products.einsum("ockl,ncklhw->nohw", w, windows), plain.transpose(1, 0, 2, 3), rtol=1e-3, atol=1e-3
    )
