"""Operands of matrix products as cuBLAS takes them: a view where the array lies so already, else a copy by a kernel whose shapes are constants.

A matrix of an array has some of its dimensions as rows and the others as columns. In a copy, those dimensions lie innermost among which is the
array's own innermost: windows over an image (im2col) are then read and written in rows, and the product for the weights' gradient takes the copy
that the forward's product has made. CuPy's own copy of such windows takes several times as long.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from advisor.cupy_loops.replay.memory import pointer, span

THREADS, MOST_BLOCKS = 256, 4224  # of one kernel: 32 on each of 132 SMs, which then take more elements each
_WHOLE = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "unsigned long long"}
_C = {"float32": "float", "float64": "double"}
HALVES = {"bfloat16": "advisor_bf16"}  # what is stored as 16 bits, and the function that rounds to it
_ROUND = """static __device__ unsigned short advisor_bf16(float f) {
  const unsigned int u = __float_as_uint(f);
  return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (unsigned short)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
"""

Dims = tuple[tuple[int, int], ...]  # (length, stride in elements), the outermost first


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of an array, which are written one behind the other. `kind`, `to`: their types before and behind."""

    dims: Dims
    kind: str
    to: str
    itemsize: int  # before

    @property
    def size(self) -> int:
        """How many elements."""
        size = 1
        for length, _ in self.dims:
            size *= length
        return size

    @property
    def at_once(self) -> int:
        """How many of them a thread writes."""
        size = 2 if self.to in HALVES else {"float32": 4, "float64": 8}.get(self.to, self.itemsize)
        most = min(4, 16 // size)
        return most if self.dims and self.dims[-1][0] % most == 0 else 1

    @property
    def name(self) -> str:
        """Of its kernel."""
        told = repr((self.dims, self.kind, self.to, self.itemsize))
        return "advisor_copy_" + hashlib.sha256(told.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Matrix:
    """`copy`: what makes it of the array; None: the array is it. It lies row behind row, or `turned`; `lead`: elements from one to the next."""

    copy: Copy | None
    turned: bool
    lead: int


def matrix(value: Any, rows: Iterable[int], columns: Iterable[int], to: str) -> Matrix:
    """How the array is the matrix of these dimensions, with numbers of type `to`."""
    kind, itemsize = str(value.dtype), int(value.dtype.itemsize)
    all_dims = [(n, s // itemsize) for n, s in zip(value.shape, value.strides, strict=True)]
    high, wide = merged([all_dims[d] for d in rows]), merged([all_dims[d] for d in columns])
    if kind == to and (found := _lies(high, wide)) is not None:
        return Matrix(None, *found)
    turned = _innermost(high) < _innermost(wide)
    dims = (*wide, *high) if turned else (*high, *wide)
    return Matrix(Copy(dims, kind, to, itemsize), turned, _size(high if turned else wide))


def merged(dims: list[tuple[int, int]]) -> Dims:
    """Neighbours that are one dimension as one; those of one element left out."""
    found: list[tuple[int, int]] = []
    for length, stride in dims:
        if length == 1:
            continue
        if found and found[-1][1] == stride * length:
            found[-1] = found[-1][0] * length, stride
        else:
            found.append((length, stride))
    return tuple(found)


def _lies(rows: Dims, columns: Dims) -> tuple[bool, int] | None:
    """(turned, lead) of a matrix that cuBLAS takes as it lies."""
    if len(rows) > 1 or len(columns) > 1:
        return None
    (m, down), (n, right) = rows[0] if rows else (1, 0), columns[0] if columns else (1, 0)
    if (not columns or right == 1) and (not rows or down >= n):
        return False, down if rows else n
    if (not rows or down == 1) and (not columns or right >= m):
        return True, right if columns else m
    return None


def _innermost(dims: Dims) -> tuple[int, int, Dims]:
    """What sorts first the dimensions that are read in the longest rows."""
    stride, length = min(((abs(stride), -length) for length, stride in dims if stride), default=(1 << 62, 0))
    return stride, length, dims


def _size(dims: Dims) -> int:
    size = 1
    for length, _ in dims:
        size *= length
    return size


def source(copies: Iterable[Copy]) -> str:
    """CUDA source of a module with a kernel for each."""
    return _ROUND + "".join(_kernel(copy) for copy in copies)


def _kernel(copy: Copy) -> str:
    same = copy.kind == copy.to
    given = _WHOLE[copy.itemsize] if same else _C[copy.kind]
    made = given if same else "unsigned short" if copy.to in HALVES else _C[copy.to]
    at_once = copy.at_once
    reach = sum(abs(stride) * (length - 1) for length, stride in copy.dims)
    whole = "int" if max(reach, copy.size + THREADS * MOST_BLOCKS) < 1 << 31 else "long long"
    lines, terms, rest = [], [], "i"
    for d in range(len(copy.dims) - 1, -1, -1):
        length, stride = copy.dims[d]
        each = at_once if d == len(copy.dims) - 1 else 1
        if d:
            lines.append(f"const unsigned {whole} q{d} = {rest} / {length // each}u;")
            lines.append(f"const {whole} i{d} = ({whole})({rest} - q{d} * {length // each}u);")
            rest = f"q{d}"
        else:
            lines.append(f"const {whole} i0 = ({whole}){rest};")
        terms.append(f"i{d} * ({stride * each})")
    step = copy.dims[-1][1] if copy.dims else 0
    value = f"x[{' + '.join(terms) or '0'} + k * ({step})]"
    if not same:
        value = f"{HALVES[copy.to]}((float){value})" if copy.to in HALVES else f"({made}){value}"
    text = "\n    ".join(lines)
    return f"""struct __align__(sizeof({made}) * {at_once}) Several_{copy.name} {{ {made} of[{at_once}]; }};
extern "C" __global__ void __launch_bounds__({THREADS}) {copy.name}(const {given}* __restrict__ x, {made}* __restrict__ y) {{
  for (unsigned {whole} i = blockIdx.x * {THREADS}u + threadIdx.x; i < {copy.size // at_once}u; i += gridDim.x * {THREADS}u) {{
    {text}
    Several_{copy.name} several;
#pragma unroll
    for (int k = 0; k < {at_once}; ++k) several.of[k] = {value};
    ((Several_{copy.name}*)y)[i] = several;
  }}
}}
"""


class Copies:
    """Makes copies, and remembers those of a graph while it is made, as long as nobody writes to what they are of."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._kernels: dict[str, Any] = {}
        self._kept: dict[tuple[int, Copy], tuple[Any, int, int]] | None = None  # the copy, and the bytes that it is of

    def remember(self, on: bool) -> None:
        """From here on copies are kept, or not, until they are written to; those of before are forgotten."""
        self._kept = {} if on else None

    def wrote(self, array: Any) -> None:
        """This array is written to."""
        if self._kept:
            first, last = span(array)
            self._kept = {key: kept for key, kept in self._kept.items() if kept[2] <= first or last <= kept[1]}

    def compile(self, copies: Iterable[Copy]) -> None:
        """Kernels of these, those that are not there yet, as one module."""
        wanted = {copy.name: copy for copy in copies if copy.name not in self._kernels}
        if wanted:
            raw = self._module.RawModule(code=source(wanted.values()))
            self._kernels |= {name: raw.get_function(name) for name in wanted}

    def made(self, value: Any, copy: Copy) -> Any:
        """The copy of this array, one dimension; bf16 as whole numbers of 16 bits."""
        key = pointer(value), copy
        if self._kept is not None and key in self._kept:
            return self._kept[key][0]
        found = self.make(value, copy)
        if self._kept is not None:
            self._kept[key] = found, *span(value)
        return found

    def make(self, value: Any, copy: Copy) -> Any:
        """The same, whatever is kept."""
        found = self._module.empty((copy.size,), dtype="uint16" if copy.to in HALVES else copy.to)
        if copy.size:
            self.compile([copy])
            blocks = min(MOST_BLOCKS, -(-copy.size // (THREADS * copy.at_once)))
            self._kernels[copy.name]((blocks,), (THREADS,), (value, found))
        return found
