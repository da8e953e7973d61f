"""Operands of products: views where they may be, else copies by a kernel, emulated; one copy of windows for the forward and the gradient."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest
import torch
from emulation.device import emulated

from advisor.cupy_loops.replay import laid
from advisor.cupy_loops.replay.memory import pointer

__all__ = ["emulated"]


def windows(x: np.ndarray, k: int, stride: int) -> np.ndarray:
    n, c, h, w = x.shape
    a, b, down, right = x.strides
    shape = (n, c, k, k, (h - k) // stride + 1, (w - k) // stride + 1)
    return np.lib.stride_tricks.as_strided(x, shape, (a, b, down, right, down * stride, right * stride))


IMAGE = np.random.default_rng(0).normal(size=(2, 3, 9, 8))
CASES = [
    ("the forward's windows", windows(IMAGE, 3, 2), (0, 4, 5), (1, 2, 3)),
    ("channels innermost", IMAGE.transpose(0, 2, 3, 1), (3,), (0, 1, 2)),
    ("a gap", IMAGE[:, :, ::2], (0, 1), (2, 3)),
    ("the other way round", IMAGE[:, ::-1, ::-1], (1,), (0, 2, 3)),
    ("broadcast", np.broadcast_to(IMAGE[:, :, :1, :1], (2, 3, 4, 5)), (1,), (0, 2, 3)),
    ("rows of four", IMAGE.transpose(1, 0, 2, 3), (0,), (1, 2, 3)),
    ("a row of one", IMAGE[:1, :, :3, :3], (0,), (1, 2, 3)),
]


def read(found: laid.Matrix, data: Any, size: tuple[int, int]) -> np.ndarray:
    """The matrix that cuBLAS sees from this address on."""
    itemsize = data.itemsize
    strides = (itemsize, found.lead * itemsize) if found.turned else (found.lead * itemsize, itemsize)
    return np.lib.stride_tricks.as_strided(data, size, strides)


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
@pytest.mark.parametrize("to", ["float64", "float32", "bfloat16"])
def test_an_array_as_a_matrix(emulated: Any, case: Any, to: str) -> None:
    _, value, rows, columns = case
    size = tuple(int(np.prod([value.shape[d] for d in dims])) for dims in (rows, columns))
    wanted = value.transpose(*rows, *columns).reshape(size)
    found = laid.matrix(value, rows, columns, to)
    assert found.copy is not None
    image = torch.from_numpy(IMAGE.copy())
    copied = torch.zeros(found.copy.size, dtype={"bfloat16": torch.int16}.get(to) or getattr(torch, to))
    entry = emulated.compiled(laid.source([found.copy]), found.copy.name)
    given = image.data_ptr() + pointer(value) - pointer(IMAGE)
    entry((2, 1, 1), (laid.THREADS, 1, 1), (given, copied.data_ptr()))
    seen = read(found, copied.numpy(), size)
    if to == "bfloat16":
        exact = torch.from_numpy(wanted.astype("f4")).bfloat16().view(torch.int16).numpy()
        np.testing.assert_array_equal(seen, exact)
    else:
        np.testing.assert_array_equal(seen, wanted.astype(to))


def test_what_lies_as_a_matrix_is_not_copied() -> None:
    x = np.zeros((6, 5, 4))
    for value, rows, columns, told in (
        (x, (0,), (1, 2), (False, 20)),
        (x, (1, 2), (0,), (True, 20)),
        (x[:, 0], (0,), (1,), (False, 20)),
        (x[:1, 0], (0,), (1,), (False, 4)),
        (x[:1, :, 1], (0,), (1,), (True, 4)),
    ):
        found = laid.matrix(value, rows, columns, "float64")
        assert (found.copy, found.turned, found.lead) == (None, *told)


def test_the_forward_and_the_weights_gradient_take_one_copy() -> None:
    x = windows(IMAGE, 3, 1)
    forward = laid.matrix(x, (0, 4, 5), (1, 2, 3), "float64")
    gradient = laid.matrix(x, (0, 4, 5), (1, 2, 3), "float64")
    turned = laid.matrix(x, (1, 2, 3), (0, 4, 5), "float64")
    assert forward.copy == gradient.copy == turned.copy
    assert forward.turned != turned.turned


def test_a_copy_is_kept_until_its_array_is_written_to() -> None:
    launched: list[str] = []

    def function(name: str) -> Any:
        return lambda grid, block, given: launched.append(name)

    raw = types.SimpleNamespace(get_function=function)
    module = types.SimpleNamespace(empty=np.empty, RawModule=lambda code: raw)
    copies, x = laid.Copies(module), IMAGE.copy()
    found = laid.matrix(windows(x, 3, 1), (0, 4, 5), (1, 2, 3), "float64").copy
    assert found is not None
    for _ in range(2):
        copies.made(windows(x, 3, 1), found)
    assert len(launched) == 2  # nothing is kept where no graph is made
    copies.remember(True)
    first = copies.made(windows(x, 3, 1), found)
    copies.wrote(np.zeros(4))
    assert copies.made(windows(x, 3, 1), found) is first
    copies.wrote(x[1, 2:, 4:])
    assert copies.made(windows(x, 3, 1), found) is not first
    copies.remember(False)
    assert len(launched) == 4
