"""Matrix products by cuBLAS with a workspace of their own, so that a stream that captures takes them.

CuPy refuses cuBLAS during capture (its workspace would be taken from the driver then): issue 6290 there. With one set beforehand cuBLAS may be
captured (cuBLAS documentation, "CUDA Graphs support").
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterable
from typing import Any

from advisor.cupy_loops.facts import fewer_bits
from advisor.cupy_loops.replay import laid, subscripts
from advisor.cupy_loops.replay.gathered import AskedProduct, Gatherer, operands
from advisor.cupy_loops.replay.laid import Copies, Copy
from advisor.cupy_loops.replay.memory import pointer

WORKSPACE = 32 << 20  # bytes; what cuBLAS recommends for sm_90
# cudaDataType, cublasComputeType_t and the type of alpha and beta, by NumPy's name
_TYPES = {"float32": (0, 68, ctypes.c_float), "float64": (1, 70, ctypes.c_double), "float16": (2, 68, ctypes.c_float)}
_FAST_TF32, _BF16 = 77, 14
_NAMES = ("libcublas.so.13", "libcublas.so.12")
Side = tuple[Any, list[int], list[int]]  # an array, and the dimensions that are the rows and the columns of its matrix


class CublasUnavailable(Exception):
    """Why there are no products."""


class Products:
    """A handle of cuBLAS's on the current device."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._library = _library()
        self._handle = ctypes.c_void_p()
        self._check(self._library.cublasCreate_v2(ctypes.byref(self._handle)))
        self._workspace = module.empty(WORKSPACE, dtype="uint8")
        self.copies = Copies(module)
        self.gatherer = Gatherer(module)
        self._asked: list[AskedProduct] | None = None

    def prepare(self, calls: Iterable[Callable[[], Any]], ms: Callable[[Callable[[], Any]], float]) -> None:
        """Before these calls are captured: kernels of the copies that their products take are compiled, and products chosen that take none.

        Args:
            calls: make products of the loop's own arrays; nothing of these is computed. ms: milliseconds that the device takes for a call.
        """
        self._asked = []
        try:
            for call in calls:
                with contextlib.suppress(Exception):  # the graph will say so
                    call()
        finally:
            asked, self._asked = self._asked, None
        self.copies.compile(copy for each in asked for _, copy in each.copies)
        self.copies.remember(True)
        try:
            self.gatherer.choose(asked, ms, tf32=fewer_bits(self.module) == "tf32")
        except Exception:  # no memory for both ways, most likely: what is there is cuBLAS's
            self.gatherer.chosen.clear()
        finally:
            self.copies.remember(False)

    def dot(self, a: Any, b: Any, out: Any = None) -> Any:
        """As `cupy.dot` for arrays of one or more dimensions."""
        self._refuse(out)
        if a.ndim == 0 or b.ndim == 0 or (a.ndim == 1 and b.ndim == 1):
            raise CublasUnavailable("a product of vectors or numbers")
        return self.tensordot(a, b, (a.ndim - 1, max(0, b.ndim - 2)))

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        """As `cupy.matmul`."""
        self._refuse(out)
        if a.ndim <= 2 and b.ndim <= 2:
            return self.dot(a, b)
        if b.ndim == 2:
            return self.dot(a, b)
        if a.ndim != b.ndim or a.shape[:-2] != b.shape[:-2]:
            raise CublasUnavailable("a product of batches that are broadcast")
        shape = (*a.shape[:-1], b.shape[-1])
        result = self.module.empty((_size(a.shape[:-2]), *shape[-2:]), dtype=self._dtype(a, b))
        self.batched(a.reshape(-1, *a.shape[-2:]), b.reshape(-1, *b.shape[-2:]), result)
        return result.reshape(shape)

    def batched(self, a: Any, b: Any, out: Any) -> None:
        """out[i] = a[i] b[i], of (batch, rows, columns); an `a` of two dimensions is the same for all."""
        a, b = (self.module.ascontiguousarray(value, dtype=out.dtype) for value in (a, b))
        m, k, n, batch = a.shape[-2], a.shape[-1], b.shape[-1], len(out)
        kind, compute, scalar = self._ready(out.dtype)
        one, zero = scalar(1.0), scalar(0.0)
        of_a, of_b, of_out = (ctypes.c_void_p(int(x.data.ptr)) for x in (a, b, out))
        steps = [ctypes.c_longlong(step) for step in (k * n, m * k if a.ndim == 3 else 0, m * n)]
        self._check(
            self._library.cublasGemmStridedBatchedEx(
                self._handle, 0, 0, n, m, k, ctypes.byref(one), of_b, kind, n, steps[0],
                of_a, kind, k, steps[1], ctypes.byref(zero), of_out, kind, n, steps[2], batch, compute, -1,
            )
        )  # fmt: skip

    def rmatmul(self, b: Any, a: Any) -> Any:
        """`b.__rmatmul__(a)`."""
        return self.matmul(a, b)

    def tensordot(self, a: Any, b: Any, axes: Any = 2) -> Any:
        """As `cupy.tensordot`."""
        if isinstance(axes, int):
            first, second = list(range(a.ndim - axes, a.ndim)), list(range(axes))
        else:
            first, second = ([x] if isinstance(x, int) else list(x) for x in axes)
        first, second = [x % a.ndim for x in first], [x % b.ndim for x in second]
        left = [i for i in range(a.ndim) if i not in first]
        right = [i for i in range(b.ndim) if i not in second]
        k = _size([a.shape[i] for i in first])
        if not k or not a.size or not b.size:
            raise CublasUnavailable("a product of nothing")
        result = self.module.empty((a.size // k, b.size // k), dtype=self._dtype(a, b))
        self._gemm((a, left, first), (b, second, right), k, result)
        return result.reshape([*(a.shape[i] for i in left), *(b.shape[i] for i in right)])

    def inner(self, a: Any, b: Any) -> Any:
        """As `cupy.inner` for arrays of one or more dimensions."""
        if a.ndim == 0 or b.ndim == 0 or a.ndim == b.ndim == 1:
            raise CublasUnavailable("a product of vectors or numbers")
        return self.tensordot(a, b, (a.ndim - 1, b.ndim - 1))

    def einsum(self, text: Any, a: Any, b: Any) -> Any:
        """As `cupy.einsum` of two arrays, where each letter is summed or kept: a product, and its dimensions in another order."""
        found = subscripts.contraction(text, a.shape, b.shape) if isinstance(text, str) else None
        if found is None:
            raise CublasUnavailable("a sum that is no product of two matrices")
        if found.batch:
            left, right = (value.transpose(order) for value, order in zip((a, b), found.orders, strict=True))
            shape = (
                *left.shape[: found.batch],
                *left.shape[found.batch : found.batch + found.rows],
                *right.shape[found.batch + found.summed :],
            )
            made = self.matmul(
                left.reshape(_size(left.shape[: found.batch]), -1, found.depth),
                right.reshape(_size(right.shape[: found.batch]), found.depth, -1),
            ).reshape(shape)
        else:
            made = self.tensordot(a, b, found.axes)
        return made.transpose(found.into)

    def _dtype(self, a: Any, b: Any) -> Any:
        """The type of the product, and of what is multiplied."""
        found = self.module.result_type(a, b)
        if str(found) not in _TYPES:
            raise CublasUnavailable(f"a product of {a.dtype} and {b.dtype}")
        return found

    @staticmethod
    def _refuse(out: Any) -> None:
        if out is not None:
            raise CublasUnavailable("a product into a given array")

    def _gemm(self, a: Side, b: Side, k: int, out: Any) -> None:
        """out (m, n) = a b. Row by row that is, column by column, the product of the transposed ones the other way round."""
        bits = fewer_bits(self.module)
        to = "bfloat16" if out.dtype == "float32" and bits == "bf16" else str(out.dtype)
        a, b = ((_typed(value, to), rows, columns) for value, rows, columns in (a, b))
        if self._asked is not None:
            self._asked.append(self._question(a, b, k, out, to))
            return
        if to == "float32" == str(a[0].dtype) == str(b[0].dtype):
            gathered = self.gatherer.chosen.get((operands(a, b), bits == "tf32"))
            if gathered is not None:
                gathered(a[0], b[0], out)
                return
        self._by_cublas(a, b, k, out, to)

    def _question(self, a: Side, b: Side, k: int, out: Any, to: str) -> AskedProduct:
        copies: dict[tuple[int, Copy], Callable[[], Any]] = {}
        for value, rows, columns in (a, b):
            if (copy := laid.matrix(value, rows, columns, to).copy) is not None:
                copies[pointer(value), copy] = functools.partial(self.copies.make, value, copy)
        single = to == "float32" == str(a[0].dtype) == str(b[0].dtype)
        return AskedProduct(
            operands=operands(a, b) if single else None,
            plain=functools.partial(self._by_cublas, a, b, k, out, to),
            arrays=(a[0], b[0], out),
            copies=copies,
            largest=max((copy.size for _, copy in copies), default=0),
        )

    def _by_cublas(self, a: Side, b: Side, k: int, out: Any, to: str) -> None:
        (of_a, turn_a, lead_a), (of_b, turn_b, lead_b) = self._laid(*a, to), self._laid(*b, to)
        m, n = out.shape
        kind, compute, scalar = self._ready(out.dtype)
        given = _BF16 if to == "bfloat16" else kind
        one, zero = scalar(1.0), scalar(0.0)
        pointers = [ctypes.c_void_p(int(x.data.ptr)) for x in (of_b, of_a, out)]
        self._check(
            self._library.cublasGemmEx(
                self._handle, int(turn_b), int(turn_a), n, m, k, ctypes.byref(one), pointers[0], given, lead_b,
                pointers[1], given, lead_a, ctypes.byref(zero), pointers[2], kind, n, compute, -1,
            )
        )  # fmt: skip

    def _ready(self, dtype: Any) -> tuple[int, int, Any]:
        """The handle is set for the current stream; cuBLAS's type of these numbers, what it computes in, and the type of a factor."""
        kind, compute, scalar = _TYPES[str(dtype)]
        if kind == 0 and fewer_bits(self.module) == "tf32":
            compute = _FAST_TF32
        stream = self.module.cuda.get_current_stream()
        self._check(self._library.cublasSetStream_v2(self._handle, ctypes.c_void_p(stream.ptr)))
        workspace = ctypes.c_void_p(int(self._workspace.data.ptr))
        self._check(self._library.cublasSetWorkspace_v2(self._handle, workspace, ctypes.c_size_t(WORKSPACE)))
        return kind, compute, scalar

    def _laid(self, value: Any, rows: list[int], columns: list[int], to: str) -> tuple[Any, bool, int]:
        """The array as a matrix of this type, a copy if it must be; whether it lies column by column; and the distance of its rows or columns."""
        found = laid.matrix(value, rows, columns, to)
        if found.copy is not None:
            value = self.copies.made(value, found.copy)
        return value, found.turned, found.lead

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise CublasUnavailable(f"cuBLAS refused (status {status})")


@functools.cache
def _library() -> Any:
    for name in _NAMES:
        try:
            return ctypes.CDLL(name)  # CuPy has loaded it already
        except OSError:
            continue
    raise CublasUnavailable("no " + " or ".join(_NAMES))


def _typed(value: Any, to: str) -> Any:
    """The array, of a type that copies and cuBLAS take for products of this type."""
    kind = str(value.dtype)
    if kind != to and (kind not in ("float32", "float64") or to == "float16"):
        return value.astype("float32" if to == "bfloat16" else to)
    return value


def _size(shape: Any) -> int:
    size = 1
    for length in shape:
        size *= int(length)
    return size
