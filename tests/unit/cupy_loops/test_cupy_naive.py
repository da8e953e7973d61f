"""Naive kernels are known by what they compute on random numbers, and only then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import stub_cupy
import test_cupy_replay
import torch
from emulation.device import emulated

from advisor import cupy as operations
from advisor.cupy_loops.changes.graphs import Graphs
from advisor.cupy_loops.replay import columns
from advisor.cupy_loops.replay.arena import Plain
from advisor.cupy_loops.replay.recorder import REPLAY
from advisor.loop.patches import Patches

__all__ = ["emulated"]

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


def im2col(x: Any, *numbers: Any) -> None:
    *sizes, y = numbers
    h, w, _, _, kh, kw, stride, _, padding, *_ = sizes
    y[...] = operations.convolution_windows(x.reshape(*y.shape[:2], h, w), (kh, kw), stride, padding)


def col2im(col: Any, *numbers: Any) -> None:
    *sizes, y = numbers
    h, w, oh, ow, kh, kw, stride, _, padding, *_ = sizes
    y[...] = columns.added_up(col.reshape(*y.shape[:2], kh, kw, oh, ow), h, w, stride, padding)


class Elementwise(stub_cupy.ElementwiseKernel):
    """With a source beside the function."""

    def __init__(self, in_params: str, out_params: str, operation: Any, name: str) -> None:
        super().__init__(in_params, out_params, "y = x", name)
        self.does = operation

    def __call__(self, *args: Any) -> Any:
        self.does(*args)
        return args[-1]


@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), (2, 0)])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_im2col_and_col2im_are_known(stride: int, padding: int, dtype: str) -> None:
    h, w, kh, kw = 8, 6, 4, 2
    oh, ow = (h + 2 * padding - kh) // stride + 1, (w + 2 * padding - kw) // stride + 1
    numbers = (h, w, oh, ow, kh, kw, stride, stride, padding, padding, 1, 1)

    def loop(cp: Any, steps: int) -> list[Any]:
        rng = np.random.default_rng(0)
        there, back = cp.ElementwiseKernel("", "", im2col, "there"), cp.ElementwiseKernel("", "", col2im, "back")
        total = cp.zeros(())
        for _ in range(steps):
            x = cp.array(rng.normal(size=(2, 3, h, w)).astype(dtype))
            col = there(x.reshape(-1), *numbers, cp.empty((2, 3, kh, kw, oh, ow), dtype=dtype))
            rolled = (col * 2.0).transpose(1, 2, 3, 0, 4, 5).copy().transpose(3, 0, 1, 2, 4, 5)
            y = back(rolled, *numbers, cp.empty((2, 3, h, w), dtype=dtype))
            total = total + y.sum()
        return [total]

    def module() -> Any:
        made = stub_cupy.module()
        made.ElementwiseKernel = Elementwise
        return made

    plain = test_cupy_replay.numbers(loop(module(), 58))
    cp, patches, change = module(), Patches(), Graphs(Plain)
    change.apply(cp, patches)
    values = loop(cp, 58)
    patches.restore_all()
    assert change.recorder is not None
    assert change.recorder.phase == REPLAY, change.recorder.why
    np.testing.assert_allclose(values[0], plain[0], rtol=1e-5)
    assert change.recorder.naive == ["ElementwiseKernel:there: columns", "ElementwiseKernel:back: image"]


@pytest.mark.parametrize("kind", ["columns", "image"])
@pytest.mark.parametrize(("stride", "padding"), [(1, 0), (3, 2)])
def test_sources_of_columns_and_images(emulated: Any, kind: str, stride: int, padding: int) -> None:
    n, c, h, w, kh, kw = 2, 3, 7, 9, 3, 4
    oh, ow = (h + 2 * padding - kh) // stride + 1, (w + 2 * padding - kw) // stride + 1
    numbers, rng = (n, c, h, w, kh, kw, oh, ow, stride, padding), np.random.default_rng(0)
    if kind == "columns":
        given = torch.from_numpy(rng.normal(size=(n, c, h, w)))
        wanted = operations.convolution_windows(given.numpy(), (kh, kw), stride, padding)
    else:  # lies as a product leaves it
        given = torch.from_numpy(rng.normal(size=(c, kh, kw, n, oh, ow))).permute(3, 0, 1, 2, 4, 5)
        wanted = columns.added_up(given.numpy(), h, w, stride, padding)
    for wide in (True, False):
        name, source, size = columns.source(kind, numbers, given.numpy(), wide=wide)
        out = torch.empty(wanted.shape, dtype=torch.float64)
        emulated.compiled(source, name)((-(-size // 256), 1, 1), (256, 1, 1), (given.data_ptr(), out.data_ptr()))
        np.testing.assert_array_equal(out.numpy(), wanted)
