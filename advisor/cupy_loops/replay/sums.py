"""Sums over some axes of an array, in one launch or two. CuPy's own reduction keeps one block busy for each few results: a (6272, 128) array's sum
over its rows takes 67 µs of an H200, a (25088, 64) one's 257, its variance 542. The order of the additions is another one here.

An array is seen as (outer, middle, inner), summed over outer and inner. A first launch sums parts of these, a second one the parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

SMALL = 1 << 11  # numbers of which the plain kernel makes short work
BLOCKS = 512  # that keep a GPU busy
LEAST = 64  # numbers that a thread block sums at least
_FEW_COLUMNS = 16  # of fewer, a warp would leave most of its lanes idle
_MOST = 1 << 31
_LETTERS = {"float32": "f", "float64": "d"}
_C = {"f": "float", "d": "double"}

# With a mean the squared distances from it are summed. What is summed is divided by `by`.
SOURCE = """
extern "C" __global__ void __launch_bounds__(256) advisor_sum_columns_L(const T* __restrict__ x, const T* __restrict__ mean,
    T* __restrict__ out, int rows, int columns, int each, T by) {
  __shared__ T part[8][33];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
  const int first = blockIdx.y * each, last = first + each < rows ? first + each : rows;
  T total = 0;
  if (column < columns) {
    const T middle = mean ? mean[column] : (T)0;
#pragma unroll 4
    for (int row = first + warp; row < last; row += 8) {
      const T value = x[(long long)row * columns + column] - middle;
      total += mean ? value * value : value;
    }
  }
  part[warp][lane] = total;
  __syncthreads();
  if (warp == 0 && column < columns) {
    for (int i = 1; i < 8; ++i) total += part[i][lane];
    out[(long long)blockIdx.y * columns + column] = total / by;
  }
}
extern "C" __global__ void __launch_bounds__(256) advisor_sum_parts_L(const T* __restrict__ x, const T* __restrict__ mean,
    T* __restrict__ out, int outer, int middle, int inner, int each, T by) {
  __shared__ T part[256];
  const unsigned all = (unsigned)outer * (unsigned)inner, first = blockIdx.y * (unsigned)each;
  const unsigned last = first + each < all ? first + each : all;
  const T center = mean ? mean[blockIdx.x] : (T)0;
  T total = 0;
#pragma unroll 4
  for (unsigned k = first + threadIdx.x; k < last; k += 256) {
    const unsigned row = k / (unsigned)inner;
    const T value = x[((long long)row * middle + blockIdx.x) * inner + (k - row * (unsigned)inner)] - center;
    total += mean ? value * value : value;
  }
  part[threadIdx.x] = total;
  __syncthreads();
  for (int half = 128; half; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) out[(long long)blockIdx.y * middle + blockIdx.x] = part[0] / by;
}
"""


def source(letter: str) -> str:
    """Both kernels for one type: "f" or "d"."""
    return f"#define T {_C[letter]}\n{SOURCE.replace('_L(', f'_{letter}(')}#undef T\n"


@dataclass(frozen=True, slots=True)
class SumLaunch:
    """One kernel over (outer, middle, inner) numbers, which gives `parts` rows of `middle` sums."""

    kernel: str
    grid: tuple[int, int]
    sizes: tuple[int, ...]
    parts: int


def launches(outer: int, middle: int, inner: int) -> list[SumLaunch]:
    """What sums an array seen so."""
    if inner == 1 and middle >= _FEW_COLUMNS:
        blocks = -(-middle // 32)
        parts = max(1, min(-(-BLOCKS // blocks), outer // LEAST))
        each = -(-outer // parts)
        parts = -(-outer // each)
        first = SumLaunch("advisor_sum_columns", (blocks, parts), (outer, middle, each), parts)
    else:
        numbers = outer * inner
        parts = max(1, min(-(-BLOCKS // middle), numbers // (256 * 4)))
        each = -(-numbers // parts)
        parts = -(-numbers // each)
        first = SumLaunch("advisor_sum_parts", (middle, parts), (outer, middle, inner, each), parts)
    return [first] if parts == 1 else [first, *launches(parts, middle, 1)]


def seen_as(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, int, int] | None:
    """(outer, middle, inner) of an array summed over these axes; None where it cannot be seen so."""
    groups: list[list[Any]] = []  # whether neighbours are summed over, and how many numbers they are
    for axis, length in enumerate(shape):
        if length == 1:
            continue
        if groups and groups[-1][0] == (axis in axes):
            groups[-1][1] *= length
        else:
            groups.append([axis in axes, length])
    kinds = [summed for summed, _ in groups]
    sizes = [size for _, size in groups]
    if kinds == [True]:
        return sizes[0], 1, 1
    if kinds == [True, False]:
        return sizes[0], sizes[1], 1
    if kinds == [False, True]:
        return 1, sizes[0], sizes[1]
    return (sizes[0], sizes[1], sizes[2]) if kinds == [True, False, True] else None


def lying(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> list[int] | None:
    """The dimensions in the order in which an array lies, the outermost first; None where it has gaps or overlaps."""
    order = sorted(range(len(shape)), key=lambda d: (-strides[d], d))
    inside = itemsize
    for d in reversed(order):
        if shape[d] == 1:
            continue
        if strides[d] != inside:
            return None
        inside *= shape[d]
    return order


class Sums:
    """`sum`, `mean` and `var` of arrays, as CuPy's methods; what they are not for they leave to the plain ones."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._array = module.ndarray
        plain = module.ndarray.__mro__[1]  # below the methods that are wrapped
        self._sum, self._mean, self._var = plain.sum, plain.mean, plain.var
        text = "".join(source(letter) for letter in _C)
        raw = module.RawModule(code=text)
        names = [f"advisor_sum_{kind}_{letter}" for kind in ("columns", "parts") for letter in _C]
        self._kernels = {name: raw.get_function(name) for name in names}

    def sum(self, x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        """As `ndarray.sum`."""
        seen = self._seen(x, axis, dtype, out)
        if seen is None:
            return self._sum(x, axis, dtype, out, keepdims)
        return self._reduced(x, seen, None, 1).reshape(_shape(x, axis, keepdims))

    def mean(self, x: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        """As `ndarray.mean`."""
        seen = self._seen(x, axis, dtype, out)
        if seen is None:
            return self._mean(x, axis, dtype, out, keepdims)
        return self._reduced(x, seen, None, seen[0] * seen[2]).reshape(_shape(x, axis, keepdims))

    def var(
        self, x: Any, axis: Any = None, dtype: Any = None, out: Any = None, ddof: int = 0, keepdims: bool = False
    ) -> Any:
        """As `ndarray.var`."""
        seen = self._seen(x, axis, dtype, out)
        count = seen[0] * seen[2] if seen else 0
        if seen is None or not isinstance(ddof, int) or count <= ddof:
            return self._var(x, axis, dtype, out, ddof, keepdims)
        mean = self._reduced(x, seen, None, count)
        return self._reduced(x, seen, mean, count - ddof).reshape(_shape(x, axis, keepdims))

    def _seen(self, x: Any, axis: Any, dtype: Any, out: Any) -> tuple[int, int, int] | None:
        """How the array is summed; None where the plain method is as good."""
        if not isinstance(x, self._array) or str(x.dtype) not in _LETTERS or dtype is not None or out is not None:
            return None
        order = lying(x.shape, x.strides, x.itemsize) if SMALL <= x.size < _MOST else None
        if order is None:
            return None
        axes = _axes(x, axis)
        kept = [d for d in order if d not in axes and x.shape[d] > 1]
        if kept != sorted(kept):  # sums would lie in another order than CuPy's
            return None
        seen = seen_as(tuple(x.shape[d] for d in order), tuple(i for i, d in enumerate(order) if d in axes))
        # Many short sums: a block for each is too much.
        return None if seen is None or (seen[0] * seen[2] < LEAST and seen[1] > BLOCKS) else seen

    def _reduced(self, x: Any, seen: tuple[int, int, int], mean: Any, by: int) -> Any:
        letter = _LETTERS[str(x.dtype)]
        steps = launches(*seen)
        for number, launch in enumerate(steps):
            last = number == len(steps) - 1
            made = self._module.empty((launch.parts, seen[1]), dtype=x.dtype)
            given = mean if mean is not None and number == 0 else np.uint64(0)  # no address
            sizes = [np.int32(size) for size in launch.sizes]
            scale = x.dtype.type(by if last else 1)
            self._kernels[f"{launch.kernel}_{letter}"](launch.grid, (256,), (x, given, made, *sizes, scale))
            x = made
        return x


def _axes(x: Any, axis: Any) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(x.ndim))
    return tuple(a % x.ndim for a in (axis if isinstance(axis, (tuple, list)) else (axis,)))


def _shape(x: Any, axis: Any, keepdims: bool) -> list[int]:
    axes = _axes(x, axis)
    if keepdims:
        return [1 if i in axes else length for i, length in enumerate(x.shape)]
    return [length for i, length in enumerate(x.shape) if i not in axes]
