"""Modelled flops and minimum device-memory bytes of one operator call, from its recorded shapes and dtypes.

The bytes model is the one of the roofline (Williams, Waterman, Patterson, CACM 52(4), 2009): every input element is read
once, every output element is written once, nothing is kept in a cache between operators. It is a lower bound, never a
measurement. Flops follow Goodfellow, Bengio, Courville, "Deep Learning" §9: a convolution has
2·N·C_out·H_out·W_out·(C_in/groups)·K_h·K_w, each of its two backward products as many; a matrix product 2·m·n·k.
Elementwise work counts one operation an output element, normalisation and pooling a few; they are bounded by bytes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

from advisor.profiling.trace.cupy_names import torch_name

Shape = Sequence[int]

_BYTES = {
    "float": 4,
    "double": 8,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "long int": 8,
    "long": 8,
    "int": 4,
    "short int": 2,
    "short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
}
_SHORT = {
    "float": "fp32",
    "double": "fp64",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "short int": "int16",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
}
# torch.dtype as operators record it among their arguments: c10::ScalarType.
_SCALAR_TYPE_BYTES = {0: 1, 1: 1, 2: 2, 3: 4, 4: 8, 5: 2, 6: 4, 7: 8, 9: 8, 10: 16, 11: 1, 15: 2, 23: 1, 24: 1}


@dataclass(frozen=True, slots=True)
class Cost:
    """`nbytes` and `flops` of one call; `dtype` is fp64 where a tensor is, else that of its first floating-point tensor ("bf16"), else of the
    first.

    `exact` is False when the operator is unknown: then its output is assumed to be as large as its largest input.
    """

    nbytes: float = 0.0
    flops: float = 0.0
    dtype: str = ""
    exact: bool = False


class _Call:
    """One operator call: tensors with their element sizes, and its other arguments where they were recorded."""

    __slots__ = ("arguments", "sizes", "strides", "tensors", "types")

    def __init__(self, shapes: str, dtypes: str, arguments: str, strides: str) -> None:
        inputs: list[Any] = json.loads(shapes) if shapes else []
        self.strides: list[Any] = json.loads(strides) if strides else []
        types = dtypes.split(",") if dtypes else []
        types += [""] * (len(inputs) - len(types))
        self.types = types
        self.tensors: list[list[int] | None] = []  # by argument position; None where the argument is no tensor
        self.sizes: list[list[tuple[int, int]]] = []  # (elements, bytes of an element) of the tensors of an argument
        default = next((t for t in types if t in _BYTES), "float")
        for entry, kind in zip(inputs, types, strict=False):
            if entry and isinstance(entry[0], list):
                self.tensors.append(None)
                self.sizes.append([(prod(shape), _BYTES[default]) for shape in entry])
            elif kind in _BYTES or (entry and not kind):
                self.tensors.append(entry)
                self.sizes.append([(prod(entry), _BYTES.get(kind, 4))])
            else:
                self.tensors.append(None)
                self.sizes.append([])
        self.arguments: list[Any] = json.loads(arguments) if arguments else []

    def shape(self, index: int) -> list[int] | None:
        return self.tensors[index] if index < len(self.tensors) else None

    def nbytes(self, index: int) -> float:
        return float(sum(n * size for n, size in self.sizes[index])) if index < len(self.sizes) else 0.0

    def elements(self, index: int) -> float:
        return float(sum(n for n, _ in self.sizes[index])) if index < len(self.sizes) else 0.0

    def read_bytes(self, index: int) -> float:
        """Of a tensor that was expanded, what is there to be read: along a dimension of stride 0 that is one element."""
        shape, strides = self.shape(index), self.strides[index] if index < len(self.strides) else []
        if not shape or len(strides) != len(shape):
            return self.nbytes(index)
        return float(prod(n for n, stride in zip(shape, strides, strict=True) if stride) * self.sizes[index][0][1])

    def all_bytes(self) -> float:
        return sum(self.read_bytes(i) for i in range(len(self.sizes)))

    def largest_bytes(self) -> float:
        return max((self.nbytes(i) for i in range(len(self.sizes))), default=0.0)

    def largest_elements(self) -> float:
        return max((self.elements(i) for i in range(len(self.sizes))), default=0.0)

    @property
    def double(self) -> bool:
        """A tensor among them, no single number, is in fp64: then all is computed so."""
        return any(t == "double" and shape for t, shape in zip(self.types, self.tensors, strict=False))

    def promotes(self) -> bool:
        """Tensors in fp64 meet others of fewer bits, so that those are computed in fp64 as well."""
        floats = {_SHORT.get(t, "") for t, shape in zip(self.types, self.tensors, strict=False) if shape}
        return self.double and bool(floats & {"fp32", "fp16", "bf16"})

    def argument(self, index: int) -> Any:
        return self.arguments[index] if index < len(self.arguments) else None

    def dtype(self) -> str:
        if self.double:
            return "fp64"
        # Python's numbers are wrapped as numbers in fp64 and converted: no work, and none that a script could spare itself.
        shorts = [_SHORT[t] for t in self.types if t in _SHORT and t != "double"]
        return next((s for s in shorts if s.startswith(("fp", "bf"))), shorts[0] if shorts else "")


def _numbers(value: Any, count: int, default: int) -> list[int]:
    """An argument that may be a number or a list, as `count` numbers (torch repeats a single one)."""
    if isinstance(value, int):
        return [value] * count
    if isinstance(value, list) and value and all(isinstance(v, int) for v in value):
        return [int(v) for v in (value if len(value) == count else value[:1] * count)]
    return [default] * count


def window_output(
    size: Shape, kernel: Shape, stride: Shape, padding: Shape, dilation: Shape, *, ceil: bool = False
) -> list[int]:
    """Spatial output sizes of a convolution or pooling window (torch.nn.Conv2d, MaxPool2d: "Shape")."""
    out = []
    for n, k, s, p, d in zip(size, kernel, stride, padding, dilation, strict=False):
        span = n + 2 * p - d * (k - 1) - 1
        out.append(max((-(-span // s) if ceil else span // s) + 1, 0))
    return out


def _conv_output(
    x: Shape, w: Shape, stride: list[int], padding: list[int], dilation: list[int], transposed: bool,
    output_padding: list[int], groups: int,
) -> list[int]:  # fmt: skip
    if not transposed:
        return [x[0], w[0], *window_output(x[2:], w[2:], stride, padding, dilation)]
    spatial = [
        (n - 1) * s - 2 * p + d * (k - 1) + o + 1
        for n, k, s, p, d, o in zip(x[2:], w[2:], stride, padding, dilation, output_padding, strict=False)
    ]
    return [x[0], w[1] * groups, *spatial]


def _product_flops(x: Shape, w: Shape, y: Shape, transposed: bool) -> float:
    # Each element of the larger side meets one filter: for a transposed convolution the roles of x and y are exchanged.
    positions = prod(x) if transposed else prod(y)
    return 2.0 * positions * prod(w[1:])


def _convolution(call: _Call) -> Cost | None:
    x, w = call.shape(0), call.shape(1)
    if x is None or w is None or len(x) != len(w) or len(x) < 3:
        return None
    n = len(w) - 2
    stride, padding = _numbers(call.argument(3), n, 1), _numbers(call.argument(4), n, 0)
    dilation, transposed = _numbers(call.argument(5), n, 1), call.argument(6) is True
    groups = call.argument(8) if isinstance(call.argument(8), int) else max(x[1] // max(w[1], 1), 1)
    y = _conv_output(x, w, stride, padding, dilation, transposed, _numbers(call.argument(7), n, 0), int(groups))
    element = call.sizes[0][0][1]
    # Without its arguments a stride is not known: the shape is then that of stride 1 without padding, and said to be so.
    return Cost(call.all_bytes() + prod(y) * element, _product_flops(x, w, y, transposed), "", bool(call.arguments))


def _convolution_backward(call: _Call) -> Cost | None:
    y, x, w = call.shape(0), call.shape(1), call.shape(2)
    if y is None or x is None or w is None:
        return None
    transposed = call.argument(7) is True
    mask = next((a for a in reversed(call.arguments) if isinstance(a, list) and a and isinstance(a[0], bool)), None)
    data, weight = (bool(mask[0]), bool(mask[1])) if mask else (True, True)
    bias = bool(mask and len(mask) > 2 and mask[2])
    element = call.sizes[0][0][1]
    nbytes = call.nbytes(0)
    nbytes += (call.nbytes(1) + call.nbytes(2)) if weight else 0.0  # x is read, the weights' gradient is written
    nbytes += (call.nbytes(2) + call.nbytes(1)) if data else 0.0  # the weights are read, x's gradient is written
    nbytes += y[1] * element if bias and len(y) > 1 else 0.0
    return Cost(nbytes, (data + weight) * _product_flops(x, w, y, transposed), "", True)


def _mm(call: _Call, first: int) -> Cost | None:
    a, b = call.shape(first), call.shape(first + 1)
    if not a or not b or len(a) < 2:
        return None
    n = b[-1] if len(b) > 1 else 1
    out = prod(a[:-1]) * n
    return Cost(call.all_bytes() + out * call.sizes[first][0][1], 2.0 * out * a[-1], "", True)


def _linear(call: _Call) -> Cost | None:
    x, w = call.shape(0), call.shape(1)
    if not x or not w:
        return None
    out = prod(x[:-1]) * (w[0] if len(w) > 1 else 1)
    return Cost(call.all_bytes() + out * call.sizes[0][0][1], 2.0 * out * x[-1], "", True)


def _pool_forward(call: _Call, *, indices: bool, max_pool: bool) -> Cost | None:
    x = call.shape(0)
    if not x or len(x) < 3:
        return None
    n = len(x) - 2 if len(x) > 3 else max(len(x) - 1, 1)
    kernel = _numbers(call.argument(1), n, 1)
    stride = _numbers(call.argument(2), n, 0)
    stride = [s or k for s, k in zip(stride, kernel, strict=True)]
    dilation = _numbers(call.argument(4), n, 1) if max_pool else [1] * n
    ceil = call.argument(5 if max_pool else 4) is True
    y = prod(x[:-n]) * prod(
        window_output(x[-n:], kernel, stride, _numbers(call.argument(3), n, 0), dilation, ceil=ceil)
    )
    element = call.sizes[0][0][1]
    return Cost(call.nbytes(0) + y * (element + (8 if indices else 0)), float(y * prod(kernel)), "", True)


def _reads_and_writes(read: float, written: float, flops: float) -> Cost:
    return Cost(read + written, flops, "", True)


def _reduction(call: _Call) -> Cost | None:
    x = call.shape(0)
    if x is None:
        return None
    dims, element = call.argument(1), call.sizes[0][0][1]
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = [dims]
    kept = prod(n for i, n in enumerate(x) if i not in {d % len(x) for d in dims}) if dims and x else 1
    return _reads_and_writes(call.nbytes(0), kept * element, call.elements(0))


def _upsample(call: _Call, *, backward: bool) -> Cost | None:
    x, sizes = call.shape(0), call.argument(2 if backward else 1)
    if x is None or len(x) < 3:
        return None
    if not isinstance(sizes, list) or not sizes:
        scales = next((a for a in call.arguments if isinstance(a, list) and a and isinstance(a[0], float)), None)
        if backward or scales is None or len(scales) != len(x) - 2:
            return None
        sizes = [int(n * s) for n, s in zip(x[2:], scales, strict=True)]
    out = prod(sizes) if backward and len(sizes) == len(x) else prod(x[:2]) * prod(sizes)
    return _reads_and_writes(call.nbytes(0), out * call.sizes[0][0][1], 4.0 * max(out, prod(x)))


def _to_copy(call: _Call) -> Cost | None:
    kind = call.argument(1)
    size = _SCALAR_TYPE_BYTES.get(kind) if isinstance(kind, int) and not isinstance(kind, bool) else None
    if size is None:
        return None
    return _reads_and_writes(call.nbytes(0), call.elements(0) * size, 0.0)


_REDUCTIONS = frozenset(
    [
        "sum",
        "mean",
        "amax",
        "amin",
        "prod",
        "norm",
        "linalg_vector_norm",
        "var",
        "std",
        "all",
        "any",
        "max",
        "min",
        "logsumexp",
    ]
)
_COMPARISONS = frozenset(
    ["eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "isnan", "isfinite", "isinf"]
)
_SAME_OUTPUT = frozenset(
    [
        "add",
        "sub",
        "rsub",
        "mul",
        "div",
        "neg",
        "reciprocal",
        "pow",
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "abs",
        "clamp",
        "clamp_min",
        "clamp_max",
        "maximum",
        "minimum",
        "where",
        "lerp",
        "addcmul",
        "addcdiv",
        "square",
        "relu",
        "gelu",
        "silu",
        "sigmoid",
        "tanh",
        "hardswish",
        "hardsigmoid",
        "leaky_relu",
        "elu",
        "softplus",
        "mish",
        "hardtanh",
        "threshold_backward",
        "gelu_backward",
        "silu_backward",
        "sigmoid_backward",
        "tanh_backward",
        "hardswish_backward",
        "hardsigmoid_backward",
        "leaky_relu_backward",
        "hardtanh_backward",
        "masked_fill",
        "clone",
        "contiguous",
        "softmax",
        "_softmax",
        "_softmax_backward_data",
        "log_softmax",
        "_log_softmax",
        "_log_softmax_backward_data",
        "native_batch_norm",
        "cudnn_batch_norm",
        "_native_batch_norm_legit",
        "_batch_norm_with_update",
        "native_layer_norm",
        "native_group_norm",
        "mse_loss_backward",
    ]
)
_NORM_BACKWARD = frozenset(
    [
        "native_batch_norm_backward",
        "cudnn_batch_norm_backward",
        "batch_norm_backward",
        "native_layer_norm_backward",
        "native_group_norm_backward",
    ]
)


def _model(name: str, call: _Call) -> Cost | None:
    stem = name.removesuffix("_")
    if stem in ("convolution", "_convolution"):
        return _convolution(call)
    if stem == "convolution_backward":
        return _convolution_backward(call)
    if stem == "linear":
        return _linear(call)
    if stem in ("mm", "bmm", "mv", "matmul"):
        return _mm(call, 0)
    if stem in ("addmm", "baddbmm", "addmv"):
        return _mm(call, 1)
    if stem in ("max_pool2d_with_indices", "max_pool3d_with_indices"):
        return _pool_forward(call, indices=True, max_pool=True)
    if stem in ("max_pool1d", "max_pool2d", "max_pool3d"):
        return _pool_forward(call, indices=False, max_pool=True)
    if stem in ("avg_pool2d", "avg_pool3d"):
        return _pool_forward(call, indices=False, max_pool=False)
    if stem in ("max_pool2d_with_indices_backward", "max_pool3d_with_indices_backward"):
        # The gradient and the indices (int64, one an output element) are read; the input's values are not needed.
        return _reads_and_writes(call.nbytes(0) + 8 * call.elements(0), call.nbytes(1), call.elements(0))
    if stem in ("avg_pool2d_backward", "avg_pool3d_backward", "_adaptive_avg_pool2d_backward"):
        return _reads_and_writes(call.nbytes(0), call.nbytes(1), call.elements(1))
    if stem in ("_adaptive_avg_pool2d", "adaptive_avg_pool2d"):
        x, size = call.shape(0), call.argument(1)
        if not x or not isinstance(size, list):
            return None
        return _reads_and_writes(call.nbytes(0), prod(x[:-2]) * prod(size) * call.sizes[0][0][1], call.elements(0))
    if stem.startswith(("upsample_", "_upsample_")):
        return _upsample(call, backward=stem.endswith("_backward"))
    if stem in ("copy", "_copy_from", "_foreach_copy"):  # destination, source
        return _reads_and_writes(call.read_bytes(1), call.nbytes(0), 0.0)
    if stem in ("fill", "zero", "normal", "uniform", "bernoulli", "random", "_foreach_zero"):
        return _reads_and_writes(0.0, call.nbytes(0), 0.0)
    if stem in ("zeros_like", "ones_like", "full_like"):  # of the other tensor only the shape is read
        return _reads_and_writes(0.0, call.nbytes(0), 0.0)
    if stem in ("new_zeros", "new_ones", "new_full"):
        size = call.argument(1)
        return _reads_and_writes(0.0, prod(size) * call.sizes[0][0][1] if isinstance(size, list) else 0.0, 0.0)
    if stem in ("_to_copy", "to"):
        return _to_copy(call)
    if stem in ("cat", "_cat", "stack"):
        return _reads_and_writes(call.nbytes(0), call.nbytes(0), 0.0)
    if stem == "native_dropout":
        return _reads_and_writes(call.nbytes(0), call.nbytes(0) + call.elements(0), call.elements(0))
    if stem in ("nll_loss_forward", "nll_loss2d_forward"):
        return _reads_and_writes(call.elements(1) * call.sizes[0][0][1] + call.nbytes(1), 8.0, call.elements(1))
    if stem in ("nll_loss_backward", "nll_loss2d_backward"):
        return _reads_and_writes(call.nbytes(0) + call.nbytes(2), call.nbytes(1), call.elements(2))
    if stem.startswith("_fused_"):  # parameters and state are read and written, gradients (the second list) are read
        lists = [i for i in range(len(call.sizes)) if len(call.sizes[i]) > 1 or call.tensors[i] is None]
        total = sum(call.nbytes(i) for i in lists)
        return _reads_and_writes(total, total - call.nbytes(1), 4.0 * call.elements(0))
    if stem in ("_foreach_norm", "_foreach_max"):
        return _reads_and_writes(call.nbytes(0), 0.0, call.elements(0))
    if stem.startswith("_foreach_"):
        return _reads_and_writes(call.all_bytes(), call.nbytes(0), call.elements(0))
    if stem in _REDUCTIONS:
        return _reduction(call)
    if stem in _COMPARISONS:
        return _reads_and_writes(call.all_bytes(), call.largest_elements(), call.largest_elements())
    if stem in _NORM_BACKWARD:
        return _reads_and_writes(call.all_bytes(), call.largest_bytes(), 8.0 * call.largest_elements())
    if stem in _SAME_OUTPUT:
        factor = 5.0 if "norm" in stem else 1.0
        return _reads_and_writes(call.all_bytes(), call.largest_bytes(), factor * call.largest_elements())
    return None


@lru_cache(maxsize=65536)
def cost(op: str, shapes: str, dtypes: str, arguments: str = "", strides: str = "") -> Cost:
    """Modelled cost of one call of `op`.

    Args:
        op: operator name with namespace, `aten::convolution`.
        shapes: JSON list, one entry an argument: a tensor's shape, a list of shapes for a list of tensors, else `[]`.
        dtypes: comma-separated C++ type names of the arguments, as the profiler records them.
        arguments: JSON list with the values of the arguments that are no tensors, null for tensors; "" if unknown.
        strides: as `shapes`, the tensors' strides; "" if unknown.

    Returns:
        Zero bytes when no shapes were recorded. Unknown operators: all tensor inputs read and an output as large as the
        largest input written, `exact=False`.
    """
    try:
        call = _Call(shapes, dtypes, arguments, strides)
    except (ValueError, TypeError):
        return Cost()
    if not call.sizes:
        return Cost()
    name = torch_name(op).rpartition("::")[2]
    try:
        found = _model(name, call)
    except (IndexError, TypeError, ValueError, ZeroDivisionError):
        found = None  # an overload with other arguments than the model expects
    if found is None:
        found = Cost(call.all_bytes() + call.largest_bytes(), 0.0, "", False)
    return Cost(found.nbytes, found.flops, call.dtype(), found.exact)


def modelled_bytes(op: str, shapes: str, dtypes: str, arguments: str = "") -> float:
    """Least bytes of device memory that one call reads and writes."""
    return cost(op, shapes, dtypes, arguments).nbytes


def flops(op: str, shapes: str, dtypes: str, arguments: str = "") -> float:
    """Floating-point operations of one call."""
    return cost(op, shapes, dtypes, arguments).flops


@lru_cache(maxsize=65536)
def promotes(shapes: str, dtypes: str) -> bool:
    """Whether an operator is given tensors in fp64 and in fewer bits, so that it computes all of it in fp64."""
    try:
        return _Call(shapes, dtypes, "", "").promotes()
    except (ValueError, TypeError):
        return False


@lru_cache(maxsize=65536)
def layouts(shapes: str, strides: str) -> tuple[str, ...]:
    """ "nhwc" or "nchw" of each dense tensor of four or more dimensions, in order; those that fit both are left out.

    A tensor with one channel or one pixel fits both and tells nothing.
    """
    try:
        pairs = list(zip(json.loads(shapes), json.loads(strides), strict=False)) if strides else []
    except ValueError:
        return ()
    found = []
    for shape, stride in pairs:
        if len(shape) < 4 or len(stride) != len(shape) or isinstance(shape[0], list):
            continue
        channels, spatial = shape[1], prod(shape[2:])
        if channels <= 1 or spatial <= 1:
            continue
        if stride[1] == 1 and stride[-1] == channels:
            found.append("nhwc")
        elif stride[-1] == 1 and stride[1] == spatial:
            found.append("nchw")
    return tuple(found)


def layout(shapes: str, strides: str) -> str:
    """Layout of an operator's first tensor that has one; "" when that cannot be told."""
    return next(iter(layouts(shapes, strides)), "")
