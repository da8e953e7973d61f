"""Naive kernels are known by what they compute on random numbers, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import stub_cupy
import test_cupy_replay

from advisor import cupy as operations
from advisor.cupy_loops.replay.arena import Plain
from advisor.cupy_loops.replay.recorder import REPLAY

CODE = 'extern "C" __global__ void k(const float* x, float* y) { y[0] = x[0]; }'
Kernel = Callable[..., None]


def convolution(stride: int, padding: int, turned: bool = False) -> Kernel:
    def run(x: Any, w: Any, y: Any, *_: Any) -> None:
        y[...] = operations.conv2d(x, w[:, :, ::-1, ::-1] if turned else w, stride=stride, padding=padding)

    return run


def product(a: Any, b: Any, y: Any) -> None:
    y[...] = np.asarray(b) @ np.asarray(a).T


def largest(x: Any, y: Any) -> None:
    y[...] = operations.max_pool2d(x, 2)[0]


def accumulating(x: Any, w: Any, y: Any, *_: Any) -> None:
    y += operations.conv2d(x, w, padding=1)


def at_the_edge(x: Any, w: Any, y: Any, *_: Any) -> None:
    y[...] = operations.conv2d(x, w, padding=1)
    y[:, :, 0, 0] += 1e-3  # as one that reads past its image


def activated(x: Any, w: Any, y: Any, *_: Any) -> None:
    y[...] = np.maximum(operations.conv2d(x, w, padding=1), 0)


def writes_its_input(x: Any, w: Any, y: Any, *_: Any) -> None:
    y[...] = operations.conv2d(x, w, padding=1)
    w *= 0.5


def found(kernel: Kernel, shapes: list[tuple[int, ...]], code: str = CODE, dtype: str = "f4") -> list[str]:
    """What a loop's recorder says of this kernel, whose last array is its output."""

    def loop(cp: Any, steps: int) -> list[Any]:
        rng = np.random.default_rng(0)
        raw = cp.RawKernel(code, "k", kernel)
        rest = [cp.array(rng.normal(size=shape).astype(dtype)) for shape in shapes[1:-1]]
        total = cp.zeros(())
        for _ in range(steps):
            x = cp.array(rng.normal(size=shapes[0]).astype(dtype))
            y = cp.zeros(shapes[-1], dtype=dtype)
            raw((1,), (1,), (x, *rest, y, np.int32(3))[: len(shapes) + (len(shapes[0]) == 4 and bool(rest))])
            total = total + y.sum()
        return [total]

    plain = test_cupy_replay.numbers(loop(stub_cupy.module(), 58))
    values, recorder = test_cupy_replay.replayed(loop, 58, Plain)
    assert recorder.phase == REPLAY, recorder.why
    np.testing.assert_allclose(values[0], plain[0], rtol=1e-4, atol=1e-3)
    return recorder.naive


IMAGES, TAPS, SAME = (2, 3, 6, 6), (4, 3, 3, 3), (2, 4, 6, 6)


@pytest.mark.parametrize(
    ("kernel", "shapes", "meaning"),
    [
        (convolution(1, 1), [IMAGES, TAPS, SAME], "convolution"),
        (convolution(1, 1, turned=True), [IMAGES, TAPS, SAME], "convolution"),
        (convolution(2, 0), [(2, 3, 7, 9), TAPS, (2, 4, 3, 4)], "convolution"),
        (product, [(5, 7), (6, 7), (6, 5)], "product"),
        (largest, [(2, 3, 6, 8), (2, 3, 3, 4)], "largest"),
    ],
)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_naive_kernel_is_known(kernel: Kernel, shapes: list[tuple[int, ...]], meaning: str, dtype: str) -> None:
    assert found(kernel, shapes, dtype=dtype) == [f"RawKernel:k: {meaning}"]


@pytest.mark.parametrize("kernel", [accumulating, at_the_edge, activated, writes_its_input])
def test_what_does_more_or_less_is_left(kernel: Kernel) -> None:
    assert found(kernel, [IMAGES, TAPS, SAME]) == []


@pytest.mark.parametrize(
    "code",
    [
        CODE.replace("y[0] =", "atomicAdd(y,") + ")",
        "__device__ int counter[4];" + CODE,
        "__constant__ float taps[9];" + CODE,
        CODE.replace("y[0] = x[0]", 'asm("")'),
    ],
)
def test_a_source_with_state_is_never_asked(code: str) -> None:
    assert found(convolution(1, 1), [IMAGES, TAPS, SAME], code) == []
