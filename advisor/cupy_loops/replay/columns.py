"""im2col and col2im that a script has written as ElementwiseKernels: known by what they do to random numbers, as naive kernels are (naive.py).

Shapes are read from the array that is written and from the numbers that the kernel is given: which of them is a height, nobody has to say.
Ours have all sizes as constants, and add in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from advisor import cupy as operations

STRIDES = (1, 2, 3, 4)
_C = {"float32": "float", "float64": "double"}


def into_columns(
    given: Any, shape: tuple[int, ...], numbers: set[int]
) -> Iterator[tuple[tuple[int, ...], Callable[[Any], Any]]]:
    """Sizes and function of each im2col that could make an array (N, C, KH, KW, OH, OW) of this shape of the one given."""
    n, c, kh, kw, oh, ow = shape
    for h, w in _pairs(numbers, given.size // (n * c) if given.size % (n * c) == 0 else 0):
        for stride, padding in itertools.product(STRIDES, range(max(kh, kw))):
            if ((h + 2 * padding - kh) // stride + 1, (w + 2 * padding - kw) // stride + 1) != (oh, ow):
                continue

            def columns(x: Any, at: tuple[int, ...] = (n, c, h, w), s: int = stride, p: int = padding) -> Any:
                return operations.convolution_windows(x.reshape(at), (kh, kw), s, p).copy()

            yield (n, c, h, w, kh, kw, oh, ow, stride, padding), columns


def into_image(
    given: Any, shape: tuple[int, ...], numbers: set[int]
) -> Iterator[tuple[tuple[int, ...], Callable[[Any], Any]]]:
    """The same of each col2im that could make an image (N, C, H, W) of this shape."""
    n, c, h, w = shape
    for kh, kw in itertools.product(sorted(numbers), repeat=2):
        for stride, padding in itertools.product(STRIDES, range(max(kh, kw, 1))):
            oh, ow = (h + 2 * padding - kh) // stride + 1, (w + 2 * padding - kw) // stride + 1
            if min(kh, kw, oh, ow) < 1 or n * c * kh * kw * oh * ow != given.size:
                continue

            def image(col: Any, at: tuple[int, ...] = (n, c, kh, kw, oh, ow), s: int = stride, p: int = padding) -> Any:
                return added_up(col.reshape(at), h, w, s, p)

            yield (n, c, h, w, kh, kw, oh, ow, stride, padding), image


def _pairs(numbers: set[int], product: int) -> Iterator[tuple[int, int]]:
    return ((a, b) for a in sorted(numbers) for b in sorted(numbers) if a * b == product)


def added_up(col: Any, height: int, width: int, s: int, p: int) -> Any:
    """The image (N, C, height, width) of columns that are added up, as col2im does; s: stride, p: padding."""
    n, c, kh, kw, oh, ow = col.shape
    total = operations.zeros_beside(col, (n, c, height + 2 * p + s - 1, width + 2 * p + s - 1))
    for a, b in itertools.product(range(kh), range(kw)):
        total[:, :, a : a + s * oh : s, b : b + s * ow : s] += col[:, :, a, b]
    return total[:, :, p : p + height, p : p + width]


def source(kind: str, numbers: tuple[int, ...], given: Any, *, wide: bool = True) -> tuple[str, str, int]:
    """Name and CUDA source of our kernel, and how many threads it takes: one writes some elements of a row.

    Args:
        kind: "columns" or "image". given: an array that lies as those that it will be given. wide: what is written lies at a multiple of 16
            bytes.
    """
    n, c, h, w, kh, kw, oh, ow, s, p = numbers
    kind_of = _C[str(given.dtype)]
    if kind == "columns":
        at_once = 16 // given.dtype.itemsize
        at_once = at_once if wide and ow % at_once == 0 else 1
        size = n * c * kh * kw * oh * ow // at_once
        body = f"""
    const unsigned x = i % {ow // at_once} * {at_once}, r = i / {ow // at_once};
    const unsigned y = r % {oh}, q = r / {oh};
    const unsigned b = q % {kw}, t = q / {kw};
    const unsigned a = t % {kh}, m = t / {kh};
    const unsigned v = y * {s} + a - {p}u;
    Several value;
#pragma unroll
    for (unsigned e = 0; e < {at_once}; ++e) {{
      const unsigned u = (x + e) * {s} + b - {p}u, k = (m * {h} + v) * {w} + u;
      value.of[e] = v < {h}u && u < {w}u ? in[{_offset(given)}] : (T)0;
    }}"""
    else:
        at_once, size = 1, n * c * h * w
        body = f"""
    const unsigned x = i % {w}, r = i / {w}, y = r % {h}, m = r / {h};
    Several several;
    T& value = several.of[0];
    value = 0;
#pragma unroll
    for (unsigned a = 0; a < {kh}; ++a) {{
      const unsigned v = y + {p}u - a;
      if (v % {s} || v / {s} >= {oh}u) continue;
#pragma unroll
      for (unsigned b = 0; b < {kw}; ++b) {{
        const unsigned u = x + {p}u - b;
        if (u % {s} || u / {s} >= {ow}u) continue;
        const unsigned k = (((m * {kh} + a) * {kw} + b) * {oh} + v / {s}) * {ow} + u / {s};
        value += in[{_offset(given)}];
      }}
    }}"""
    name = f"advisor_{kind}"
    last = "value" if kind == "columns" else "several"
    text = f"""#define T {kind_of}
struct __align__(sizeof(T) * {at_once}) Several {{ T of[{at_once}]; }};
extern "C" __global__ void __launch_bounds__(256) {name}(const T* __restrict__ in, T* __restrict__ out) {{
  const unsigned i = blockIdx.x * 256 + threadIdx.x;
  if (i < {size}u) {{{body}
    ((Several*)out)[i] = {last};
  }}
}}
"""
    return name, text, size


def _offset(given: Any) -> str:
    """Where the k-th element of the array lies, rows first."""
    if given.flags.c_contiguous:
        return "k"
    terms, rest = [], "k"
    for length, stride in reversed(list(zip(given.shape, given.strides, strict=True))):
        step = stride // given.dtype.itemsize
        terms.append(f"{rest} % {length}u * {step}u")
        rest = f"({rest} / {length}u)"
    return " + ".join(terms)
