"""Recorded steps on a GPU: graphs, products and sums of their own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import test_cupy_fusing
import test_cupy_replay

from advisor.cupy_loops.changes.graphs import Graphs
from advisor.cupy_loops.replay.recorder import REPLAY
from advisor.cupy_loops.replay.worth import Worth
from advisor.loop.patches import Patches

pytestmark = pytest.mark.gpu


@pytest.fixture
def cp() -> Any:
    return pytest.importorskip("cupy")


LOOPS = [
    test_cupy_replay.rebinding,
    test_cupy_replay.in_place,
    test_cupy_replay.hoarding,
    test_cupy_fusing.momentum,
    test_cupy_fusing.columns,
    test_cupy_fusing.types,
    test_cupy_fusing.mirrored,
    test_cupy_fusing.slices,
]


@pytest.fixture(autouse=True)
def whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worth, "replayed", lambda worth: "")


@pytest.mark.parametrize("loop", LOOPS)
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
    assert not change.recorder.unfused


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_products_are_those_of_cupy(cp: Any, dtype: str) -> None:
    from advisor.cupy_loops.replay.cublas import Products

    ours, rng = Products(cp), np.random.default_rng(0)
    a, b = (cp.asarray(rng.normal(size=s).astype(dtype)) for s in ((37, 19), (19, 23)))
    for x, y in ((a, b), (b.T, a.T), (a, b[:, ::2]), (a[:1], b), (a, b[:, :1]), (a[:, 0], a)):
        cp.testing.assert_allclose(ours.dot(x, y), x.dot(y), rtol=1e-5)
    x, w = (cp.asarray(rng.normal(size=s).astype(dtype)) for s in ((4, 3, 2, 2, 5, 5), (6, 3, 2, 2)))
    a, b = (cp.asarray(rng.normal(size=s).astype(dtype)) for s in ((6, 5, 7), (6, 7, 3)))
    cp.testing.assert_allclose(ours.matmul(a, b), cp.matmul(a, b), rtol=1e-4, atol=1e-5)
    axes = ((1, 2, 3), (1, 2, 3))
    cp.testing.assert_allclose(ours.tensordot(x, w, axes), cp.tensordot(x, w, axes), rtol=1e-4, atol=1e-5)


def test_sums_are_those_of_cupy(cp: Any) -> None:
    from advisor.cupy_loops.replay.sums import Sums

    ours, rng = Sums(cp), np.random.default_rng(0)
    for shape, axis in (
        ((6272, 128), 0),
        ((128, 64, 14, 14), (0, 2, 3)),
        ((5, 3), 0),
        ((7001, 100), (0,)),
        ((128, 1000), 1),
        ((100352, 1), None),
    ):
        x = cp.asarray(rng.normal(size=shape))
        for name in ("sum", "mean", "var"):
            for keep in (False, True):
                found = getattr(ours, name)(x, axis=axis, keepdims=keep)
                cp.testing.assert_allclose(found, getattr(x, name)(axis=axis, keepdims=keep), rtol=1e-9, atol=1e-9)


NAIVE = r"""
extern "C" __global__ void naive(const float* x, const float* w, float* y, int c_in, int c_out, int h, int width) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, n = i / (c_out * h * width), o = i / (h * width) % c_out;
    int row = i / width % h, column = i % width;
    float sum = 0.0f;
    for (int c = 0; c < c_in; ++c)
        for (int a = 0; a < 3; ++a)
            for (int b = 0; b < 3; ++b) {
                int p = row + a - 1, q = column + b - 1;
                if (p >= 0 && p < h && q >= 0 && q < width)
                    sum += x[((n * c_in + c) * h + p) * width + q] * w[((o * c_in + c) * 3 + a) * 3 + b];
            }
    y[i] = sum;
}
"""


def test_a_naive_kernel_is_replaced_where_that_is_faster(cp: Any) -> None:
    def loop(cp: Any, steps: int) -> list[Any]:
        rng = np.random.default_rng(0)
        kernel = cp.RawKernel(NAIVE, "naive")
        w, losses = cp.asarray(rng.normal(size=(128, 64, 3, 3)).astype("f4")), []
        for i in range(steps):
            x = cp.asarray(rng.normal(size=(8, 64, 32, 32)).astype("f4"))
            y = cp.empty((8, 128, 32, 32), dtype="f4")
            sizes = [np.int32(size) for size in (64, 128, 32, 32)]
            kernel((y.size // 256,), (256,), (x, w, y, *sizes))
            loss = (y * y).mean()
            if i % 20 == 19:
                losses.append(float(loss))
        return [losses]

    plain, patches, change = loop(cp, 120), Patches(), Graphs()
    change.apply(cp, patches)
    try:
        found = loop(cp, 120)
    finally:
        patches.restore_all()
    np.testing.assert_allclose(found[0], plain[0], rtol=1e-5)
    assert change.recorder is not None
    assert change.recorder.phase == REPLAY, change.recorder.why
    assert change.recorder.naive == ["RawKernel:naive: convolution"]
