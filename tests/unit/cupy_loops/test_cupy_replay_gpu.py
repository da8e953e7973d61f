"""Recorded steps on a GPU: graphs, products and sums of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import test_cupy_replay

from advisor.cupy_loops.changes.graphs import Graphs
from advisor.cupy_loops.replay.recorder import REPLAY
from advisor.loop.patches import Patches

pytestmark = pytest.mark.gpu


@pytest.fixture
def cp() -> Any:
    return pytest.importorskip("cupy")


@pytest.mark.parametrize("loop", [test_cupy_replay.rebinding, test_cupy_replay.in_place, test_cupy_replay.hoarding])
def test_a_replayed_loop_gives_what_the_plain_one_gives(cp: Any, loop: test_cupy_replay.Loop) -> None:
    def numbers(found: list[Any]) -> list[Any]:
        return [np.array(v) if isinstance(v, list) else cp.asnumpy(v) for v in found]

    plain, patches, change = numbers(loop(cp, 120)), Patches(), Graphs()
    change.apply(cp, patches)
    try:
        found = numbers(loop(cp, 120))
    finally:
        patches.restore_all()
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9)
    assert change.recorder is not None
    assert change.recorder.phase == REPLAY or loop is test_cupy_replay.hoarding
    assert not change.recorder.refused


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_are_those_of_cupy(cp: Any, dtype: str) -> None:
    from advisor.cupy_loops.replay.cublas import Products

    ours, rng = Products(cp), np.random.default_rng(0)
    a, b = (cp.asarray(rng.normal(size=s).astype(dtype)) for s in ((37, 19), (19, 23)))
    for x, y in ((a, b), (b.T, a.T), (a, b[:, ::2]), (a[:1], b), (a, b[:, :1]), (a[:, 0], a)):
        cp.testing.assert_allclose(ours.dot(x, y), x.dot(y), rtol=1e-5)
    x, w = (cp.asarray(rng.normal(size=s).astype(dtype)) for s in ((4, 3, 2, 2, 5, 5), (6, 3, 2, 2)))
    axes = ((1, 2, 3), (1, 2, 3))
    cp.testing.assert_allclose(ours.tensordot(x, w, axes), cp.tensordot(x, w, axes), rtol=1e-4, atol=1e-5)


def test_sums_are_those_of_cupy(cp: Any) -> None:
    from advisor.cupy_loops.replay.sums import Sums

    ours, rng = Sums(cp), np.random.default_rng(0)
    for shape, axis in (((6272, 128), 0), ((128, 64, 14, 14), (0, 2, 3)), ((5, 3), 0), ((7001, 100), (0,))):
        x = cp.asarray(rng.normal(size=shape))
        for name in ("sum", "mean", "var"):
            for keep in (False, True):
                found = getattr(ours, name)(x, axis=axis, keepdims=keep)
                cp.testing.assert_allclose(found, getattr(x, name)(axis=axis, keepdims=keep), rtol=1e-9, atol=1e-9)
