"""Products of operands where they lie, emulated, and which of two ways is taken, by a planted clock."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulation import compiler
from emulation.device import emulated
from test_cupy_laid import windows

from advisor.cupy_loops.replay import gathered
from advisor.cupy_loops.replay.gathered import AskedProduct, Gatherer, Operands, Tile, by_four, cheaper, operands, parts
from advisor.cupy_loops.replay.memory import pointer
from advisor.ops import sources
from advisor.resources import kernels_dir

__all__ = ["emulated"]


@pytest.fixture
def device(emulated: Any, monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A module whose arrays are NumPy's in tensors' memory, and whose kernels are emulated, tensor cores with them."""
    file = Path(gathered.__file__).with_name("gathered.cu")
    emulated_source = sources.inlined(file, (compiler.INCLUDE, kernels_dir() / "include"))
    monkeypatch.setattr(gathered, "source", lambda: emulated_source)
    kept: list[torch.Tensor] = []

    def array(value: Any) -> np.ndarray:
        kept.append(torch.from_numpy(np.array(value)).clone(memory_format=torch.preserve_format))
        kept[-1].data_ptr()  # from here on its memory is known
        return kept[-1].numpy()

    def function(code: str, name: str) -> Any:
        entry = emulated.compiled(code, name)

        def call(grid: Any, block: Any, given: Any) -> None:
            values = [pointer(v) if isinstance(v, np.ndarray) else v for v in given]
            entry((*grid, 1, 1)[:3], (*block, 1, 1)[:3], values)

        return call

    def module(code: str) -> Any:
        return types.SimpleNamespace(get_function=lambda name: function(code, name))

    return types.SimpleNamespace(
        array=array,
        asarray=array,
        RawModule=module,
        empty=lambda shape, dtype: array(np.full(shape, np.nan, dtype=dtype)),
    )


def product(device: Any, a: Any, b: Any, tf32: bool, into: Any = None, out: Any = None) -> np.ndarray:
    of = operands(a, b)
    made = Gatherer(device).made(of, tf32=tf32, into=into)
    m, n, _ = of.sizes
    out = device.empty((m, n), "float32") if out is None else out
    made(a[0], b[0], out)
    return out


def as_matrix(side: Any) -> np.ndarray:
    value, rows, columns = side
    size = [int(np.prod([value.shape[d] for d in dims])) for dims in (rows, columns)]
    return value.transpose(*rows, *columns).reshape(size).astype(float)


def random(device: Any, *shape: int) -> np.ndarray:
    return device.array(np.random.default_rng(len(shape)).normal(size=shape).astype("f4"))


CASES = {
    "the forward of a convolution": lambda d: (
        (random(d, 18, 3, 3, 3), (0,), (1, 2, 3)),
        (windows(random(d, 2, 3, 9, 10), 3, 1), (1, 2, 3), (0, 4, 5)),
    ),
    "the weights' gradient, in parts": lambda d: (
        (random(d, 4, 5, 12, 12), (1,), (0, 2, 3)),
        (windows(random(d, 4, 3, 14, 14), 3, 1), (0, 4, 5), (1, 2, 3)),
    ),
    "a stride, and the image turned round": lambda d: (
        (random(d, 7, 2, 3, 3)[:, :, ::-1, ::-1], (0,), (1, 2, 3)),
        (windows(random(d, 2, 2, 9, 9), 3, 2), (1, 2, 3), (0, 4, 5)),
    ),
    "many terms": lambda d: ((random(d, 40, 700), (0,), (1,)), (random(d, 700, 33), (0,), (1,))),
}


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_a_product_is_numpys(device: Any, case: str, tf32: bool) -> None:
    a, b = CASES[case](device)
    wanted = as_matrix(a) @ as_matrix(b)
    scale = abs(as_matrix(a)) @ abs(as_matrix(b))
    found = product(device, a, b, tf32)
    assert (abs(found - wanted) <= (2e-3 if tf32 else 1e-5) * scale).all()


@pytest.mark.parametrize(
    ("tile", "tf32"),
    [
        pytest.param(
            tile,
            tf32,
            marks=[] if number in (0, 6, 8) and tf32 == number % 4 // 2 else [pytest.mark.long],
            id=f"{tile.rows}x{tile.columns}-{tf32}",
        )
        for number, tile in enumerate(gathered.TILES)
        for tf32 in (False, True)
    ],
)
def test_every_tile(device: Any, monkeypatch: pytest.MonkeyPatch, tile: Tile, tf32: bool) -> None:
    monkeypatch.setattr(gathered, "tile", lambda m, n: tile)
    a = random(device, tile.rows + 3, 21), (0,), (1,)
    b = random(device, 21, tile.columns + 4), (0,), (1,)
    for first, second in ((a, b), ((a[0].T.copy().T, *a[1:]), (b[0].T.copy().T, *b[1:]))):
        first, second = (device.array(first[0]), *first[1:]), (device.array(second[0]), *second[1:])
        wanted = as_matrix(first) @ as_matrix(second)
        found = product(device, first, second, tf32)
        np.testing.assert_allclose(found, wanted, atol=3e-2 if tf32 else 1e-4)


def test_a_result_lies_as_it_is_told_to(device: Any) -> None:
    x, w = random(device, 2, 3, 8, 8), random(device, 5, 3, 3, 3)
    a, b = (w, (0,), (1, 2, 3)), (windows(x, 3, 1), (1, 2, 3), (0, 4, 5))
    out = device.empty((2, 5, 6, 6), "float32")
    product(device, a, b, False, into=(((5, 36),), ((2, 180), (36, 1))), out=out)
    wanted = (as_matrix(a) @ as_matrix(b)).reshape(5, 2, 6, 6).transpose(1, 0, 2, 3)
    np.testing.assert_allclose(out, wanted, atol=1e-4)


def test_infinities_stay_where_they_are(device: Any) -> None:
    a, b = random(device, 6, 20), random(device, 20, 9)
    a[2, 3] = np.inf
    found = product(device, (a, (0,), (1,)), (b, (0,), (1,)), False)
    assert np.isinf(found[2]).all()
    assert np.isfinite(np.delete(found, 2, axis=0)).all()


def test_parts_are_for_small_results_of_many_terms() -> None:
    each = gathered.tile(64, 288)
    count, terms = parts(64, 288, 65536, each)
    assert count > 1
    assert terms <= gathered.MOST_DEPTH
    assert (count - 1) * terms < 65536 <= count * terms
    assert parts(64, 65536, 288, gathered.tile(64, 65536))[0] == 1


@pytest.mark.parametrize(
    ("rows", "columns", "wide"),
    [
        (((5, 36),), ((2, 180), (36, 1)), True),
        (((5, 35),), ((2, 180), (36, 1)), False),
        (((5, 36),), ((36, 2),), False),
        (((5, 1),), ((36, 5),), False),
    ],
)
def test_rows_that_are_written_by_four(rows: Any, columns: Any, wide: bool) -> None:
    assert by_four(rows, columns) is wide


def test_products_of_one_copy_are_chosen_together() -> None:
    copies = {"x": 5.0, "y": 1.0}
    both = [(2.0, 4.0), (2.0, 4.0), (1.0, 5.0)]
    assert cheaper(both, [{"x"}, {"x"}, {"y"}], copies) == [0, 1]  # 8 for 9: one alone would lose, 4 for 2
    assert cheaper(both, [{"x"}, {"x"}, {"y"}], {"x": 1.0, "y": 1.0}) == []
    assert cheaper([(2.0, 1.0), (2.0, 9.0)], [{"x"}, {"x"}], copies) == [0]  # even without its copy


def test_only_what_copies_much_is_asked_about_and_once(device: Any) -> None:
    asked: list[str] = []

    def question(name: str, length: int, largest: int) -> AskedProduct:
        of = Operands(((length, 8),), ((8, 1),), ((8, 16),), ((16, 1),))
        a, b, out = random(device, length, 8), random(device, 8, 16), random(device, length, 16)
        copies = {name: lambda: asked.append(f"copy {name}")}
        return AskedProduct(of, lambda: asked.append(name), (a, b, out), copies, largest)

    def ms(call: Any) -> float:
        before = len(asked)
        call()
        return {"large": 3.0, "copy large": 1.0}[asked[-1]] if len(asked) > before else 0.5

    both = [question("large", 32, gathered.LEAST_SIZE), question("small", 16, 10)]
    gatherer = Gatherer(device)
    for _ in range(2):
        gatherer.choose(both, ms, tf32=False)
    assert asked == ["large", "copy large"]
    assert [of for of, _ in gatherer.chosen] == [both[0].operands]
