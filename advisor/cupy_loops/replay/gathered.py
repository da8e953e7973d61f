"""Products that read their operands where they lie: windows over an image are multiplied without columns of them (gathered.cu).

cuBLAS takes matrices whose rows or columns are regular. What is not is copied first (laid.py), and a copy of windows is as many times larger than its
image as the kernel has places. Here tables tell where each row, column and term lies. Which way is faster the device's clock says, for all
products that would share a copy together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from advisor.cupy_loops.replay.memory import pointer
from advisor.ops import sources
from advisor.resources import kernels_dir

THREADS = 256
DEPTH = 16  # of a tile: BK
LEAST_DEPTH, MOST_DEPTH = 128, 4096  # terms of a part: fewer are not worth a part; rounding grows with more
BLOCKS = 264  # that keep a GPU busy: two on each of 132 SMs; parts are for results of a quarter of these, as parts are written and read
LEAST_GAIN = 0.03  # of the time with cuBLAS
LEAST_SIZE = 1 << 20  # elements of a copy that is worth the question
MOST_PRODUCTS = 24  # that are asked about
_REACH = 1 << 31
Dims = tuple[tuple[int, int], ...]  # (length, stride in elements), the outermost first


@dataclass(frozen=True, slots=True)
class Tile:
    """What a block computes, what a thread of it does, and how its warps lie with TF32."""

    rows: int
    columns: int
    thread_rows: int
    thread_columns: int
    warps_down: int


TILES = (
    Tile(128, 128, 8, 8, 2),
    Tile(64, 256, 8, 8, 2),
    Tile(256, 64, 8, 8, 4),
    Tile(32, 256, 4, 8, 1),
    Tile(64, 128, 4, 8, 2),
    Tile(128, 64, 8, 4, 4),
    Tile(16, 256, 2, 8, 1),
    Tile(64, 64, 4, 4, 2),
    Tile(256, 32, 8, 4, 8),
    Tile(256, 16, 4, 4, 8),
)


@dataclass(frozen=True, slots=True)
class Operands:
    """A product as numbers: the dimensions of each matrix's rows and columns, as they lie."""

    rows_a: Dims
    depth_a: Dims
    depth_b: Dims
    columns_b: Dims

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, columns, terms."""
        return _size(self.rows_a), _size(self.columns_b), _size(self.depth_a)


def operands(a: Any, b: Any) -> Operands:
    """Of two sides: an array, the dimensions that are its matrix's rows, and those that are its columns."""
    (value_a, rows, depth), (value_b, inside, columns) = a, b
    return Operands(dims(value_a, rows), dims(value_a, depth), dims(value_b, inside), dims(value_b, columns))


def dims(value: Any, which: Iterable[int]) -> Dims:
    """These dimensions of an array."""
    return tuple((int(value.shape[d]), int(value.strides[d]) // int(value.dtype.itemsize)) for d in which)


def fits(found: Operands) -> bool:
    """Whether 32-bit offsets reach all elements, and there are any."""
    sides = (found.rows_a + found.depth_a, found.depth_b + found.columns_b)
    reach = max(sum(abs(stride) * (length - 1) for length, stride in side) for side in sides)
    m, n, k = found.sizes
    return min(m, n, k) > 0 and reach < _REACH and m * n < _REACH


def offsets(of: Dims) -> np.ndarray:
    """Where each element of these dimensions lies, rows first."""
    found = np.zeros(1, dtype=np.int64)
    for length, stride in of:
        found = (found[:, None] + np.arange(length, dtype=np.int64) * stride).ravel()
    return found.astype(np.int32)


def tile(m: int, n: int) -> Tile:
    """The tile that wastes least: of what it computes past the matrix, and of what it brings for each product that it makes."""

    def worth(each: Tile) -> float:
        used = m * n / (math.ceil(m / each.rows) * each.rows * math.ceil(n / each.columns) * each.columns)
        return float(used * min(1.0, each.rows * each.columns / (each.rows + each.columns) / 64) ** 0.5)

    return max(TILES, key=worth)


def parts(m: int, n: int, k: int, each: Tile) -> tuple[int, int]:
    """How many parts the terms are summed in, and how many terms a part has."""
    blocks = math.ceil(m / each.rows) * math.ceil(n / each.columns)
    wanted = max(1, min(BLOCKS // blocks, k // LEAST_DEPTH)) if blocks <= BLOCKS // 4 else 1
    terms = math.ceil(math.ceil(k / wanted) / DEPTH) * DEPTH
    if wanted > 1:
        terms = min(terms, MOST_DEPTH)
    return math.ceil(k / terms), terms


def innermost(of: Dims) -> int:
    """The smallest distance of neighbours."""
    return min((abs(stride) for length, stride in of if length > 1), default=_REACH)


def defines(found: Operands, each: Tile, *, tf32: bool) -> dict[str, int]:
    """Macros of the kernel for this product."""
    return {
        "BM": each.rows, "BN": each.columns, "TM": each.thread_rows, "TN": each.thread_columns,
        "WARPS_DOWN": each.warps_down, "TF32": int(tf32),
        "A_DEEP": int(innermost(found.depth_a) < innermost(found.rows_a)),
        "B_DEEP": int(innermost(found.depth_b) < innermost(found.columns_b)),
    }  # fmt: skip


@functools.cache
def source() -> str:
    """The kernels' text, what it includes with it; the macros of `defines` stand before it."""
    return sources.inlined(Path(__file__).with_name("gathered.cu"), (kernels_dir() / "include",))


def text(macros: dict[str, int]) -> str:
    """The source of one kernel."""
    return "".join(f"#define {name} {value}\n" for name, value in macros.items()) + source()


@dataclass(frozen=True, slots=True, eq=False)
class Gathered:
    """A product that is ready to be launched: its kernels, tables and grid."""

    module: Any
    kernel: Any
    add_up: Any
    tables: tuple[Any, ...]  # of a's rows and terms, b's terms and columns
    into: tuple[Any, Any]  # of the result's rows and columns
    dense: tuple[Any, Any]  # the same of a part
    sizes: tuple[int, int, int]
    grid: tuple[int, int, int]
    terms: int
    wide: bool  # the result's rows are written by four
    wide_part: bool

    def __call__(self, a: Any, b: Any, out: Any) -> None:
        """out = a b, on the current stream."""
        m, n, k = (np.int32(size) for size in self.sizes)
        count = self.grid[2]
        if count == 1:
            to, into, wide = out, self.into, self.wide and pointer(out) % 16 == 0
        else:
            to, into, wide = self.module.empty((count, *self.sizes[:2]), dtype=out.dtype), self.dense, self.wide_part
        given = (a, b, to, *self.tables, *into, m, n, k, np.int32(self.terms), np.int32(wide))
        self.kernel(self.grid, (THREADS,), given)
        if count > 1:
            blocks = min(BLOCKS * 8, -(-self.sizes[0] * self.sizes[1] // THREADS))
            self.add_up((blocks,), (THREADS,), (to, out, *self.into, m, n, np.int32(count)))


@dataclass(frozen=True, slots=True, eq=False)
class AskedProduct:
    """A product that a graph will make, in one of two ways.

    plain: makes it by cuBLAS of copies that are there; arrays: its operands, and where the result goes; copies: what makes each copy that cuBLAS
    needs, by what tells copies apart; largest: elements of the largest of them; operands: None where it cannot be gathered.
    """

    operands: Operands | None
    plain: Callable[[], Any]
    arrays: tuple[Any, Any, Any]
    copies: dict[Any, Callable[[], Any]]
    largest: int

    def times(self, gathered: Gathered, ms: Callable[[Callable[[], Any]], float]) -> tuple[float, float]:
        """Milliseconds by cuBLAS, its copies not counted, and so."""
        return ms(self.plain), ms(lambda: gathered(*self.arrays))


class Gatherer:
    """Makes products that read where their operands lie; kernels and tables are made once."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self.chosen: dict[tuple[Operands, bool], Gathered] = {}  # and whether in TF32
        self._asked: set[tuple[Operands, bool]] = set()
        self._kernels: dict[str, tuple[Any, Any]] = {}
        self._tables: dict[Dims, Any] = {}

    def made(self, found: Operands, *, tf32: bool, into: tuple[Dims, Dims] | None = None) -> Gathered:
        """What computes this product.

        Args:
            into: how the rows and columns of the result lie; None: row behind row.
        """
        m, n, k = found.sizes
        dense = ((m, n),), ((n, 1),)
        each = tile(m, n)
        count, terms = parts(m, n, k, each)
        code = text(defines(found, each, tf32=tf32))
        if code not in self._kernels:
            raw = self.module.RawModule(code=code)
            self._kernels[code] = raw.get_function("gathered"), raw.get_function("gathered_parts")
        rows, columns = into or dense
        return Gathered(
            module=self.module,
            kernel=self._kernels[code][0],
            add_up=self._kernels[code][1],
            tables=tuple(self._table(of) for of in (found.rows_a, found.depth_a, found.depth_b, found.columns_b)),
            into=(self._table(rows), self._table(columns)),
            dense=(self._table(dense[0]), self._table(dense[1])),
            sizes=(m, n, k),
            grid=(math.ceil(n / each.columns), math.ceil(m / each.rows), count),
            terms=terms,
            wide=by_four(rows, columns),
            wide_part=n % 4 == 0,
        )

    def choose(self, products: Sequence[AskedProduct], ms: Callable[[Callable[[], Any]], float], *, tf32: bool) -> None:
        """From here on `chosen` has those of these products that are faster so.

        Args:
            ms: milliseconds that the device takes for a call.
        """
        fresh: dict[Operands, AskedProduct] = {}
        for each in products:
            of = each.operands
            if of is None or (of, tf32) in self._asked or each.largest < LEAST_SIZE or not fits(of):
                continue
            if len(self._asked) < MOST_PRODUCTS:
                self._asked.add((of, tf32))
                fresh[of] = each
        ways = {of: self.made(of, tf32=tf32) for of in fresh}
        times = [each.times(ways[of], ms) for of, each in fresh.items()]
        copies = {key: ms(make) for each in fresh.values() for key, make in each.copies.items()}
        chosen = cheaper(times, [set(each.copies) for each in fresh.values()], copies)
        self.chosen |= {(of, tf32): ways[of] for number, of in enumerate(fresh) if number in chosen}

    def _table(self, of: Dims) -> Any:
        if of not in self._tables:
            self._tables[of] = self.module.asarray(offsets(of))
        return self._tables[of]


def cheaper(times: Sequence[tuple[float, float]], needs: Sequence[set[Any]], copies: dict[Any, float]) -> list[int]:
    """Which of these products are to be gathered: those that share copies all together, or one by one where it is faster even without its copies.

    Args:
        times: of each, by cuBLAS and gathered. needs: the copies that each takes by cuBLAS. copies: what making each takes.
    """
    found: list[int] = []
    for group in _groups(needs):
        shared = set().union(*(needs[i] for i in group))
        by_cublas = sum(times[i][0] for i in group) + sum(copies[key] for key in shared)
        if sum(times[i][1] for i in group) < (1 - LEAST_GAIN) * by_cublas:
            found += group
        else:
            found += [i for i in group if times[i][1] < (1 - LEAST_GAIN) * times[i][0]]
    return sorted(found)


def _groups(needs: Sequence[set[Any]]) -> list[list[int]]:
    """Products that are connected by copies."""
    groups: list[tuple[set[Any], list[int]]] = []
    for number, own in enumerate(needs):
        together = [group for group in groups if group[0] & own]
        groups = [group for group in groups if not group[0] & own]
        keys, members = set(own), [number]
        for known, others in together:
            keys |= known
            members += others
        groups.append((keys, members))
    return [members for _, members in groups]


def by_four(rows: Dims, columns: Dims) -> bool:
    """Whether four columns of a result lie side by side, each at a multiple of four."""
    wide = [(length, stride) for length, stride in columns if length > 1]
    if not wide or wide[-1][1] != 1 or wide[-1][0] % 4:
        return False
    return all(stride % 4 == 0 for _, stride in (*wide[:-1], *rows))


def _size(of: Dims) -> int:
    return math.prod(length for length, _ in of)
