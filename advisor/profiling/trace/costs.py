"""What each kind of operator computes and moves at least, from one call's shapes."""

from __future__ import annotations

from math import prod
from typing import Any

from advisor.profiling.trace.calls import SCALAR_TYPE_BYTES, Cost, OperatorCall, Shape


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


def _read(w: Shape, stride: list[int], transposed: bool) -> float:
    """The share of its input that a convolution reads: a stride beyond the taps steps over the rest."""
    return 1.0 if transposed else prod(min(1.0, k / max(s, 1)) for k, s in zip(w[2:], stride, strict=False))


def _convolution(call: OperatorCall) -> Cost | None:
    x, w = call.shape(0), call.shape(1)
    if x is None or w is None or len(x) != len(w) or len(x) < 3:
        return None
    n = len(w) - 2
    stride, padding = _numbers(call.argument(3), n, 1), _numbers(call.argument(4), n, 0)
    dilation, transposed = _numbers(call.argument(5), n, 1), call.argument(6) is True
    groups = call.argument(8) if isinstance(call.argument(8), int) else max(x[1] // max(w[1], 1), 1)
    y = _conv_output(x, w, stride, padding, dilation, transposed, _numbers(call.argument(7), n, 0), int(groups))
    element = call.sizes[0][0][1]
    unread = call.nbytes(0) * (1.0 - _read(w, stride, transposed))
    # Without its arguments a stride is not known: the shape is then that of stride 1 without padding, and said to be so.
    return Cost(
        call.all_bytes() - unread + prod(y) * element, _product_flops(x, w, y, transposed), "", bool(call.arguments)
    )


def _convolution_backward(call: OperatorCall) -> Cost | None:
    y, x, w = call.shape(0), call.shape(1), call.shape(2)
    if y is None or x is None or w is None:
        return None
    transposed = call.argument(7) is True
    mask = next((a for a in reversed(call.arguments) if isinstance(a, list) and a and isinstance(a[0], bool)), None)
    data, weight = (bool(mask[0]), bool(mask[1])) if mask else (True, True)
    bias = bool(mask and len(mask) > 2 and mask[2])
    element = call.sizes[0][0][1]
    nbytes = call.nbytes(0)
    read = _read(w, _numbers(call.argument(4), len(w) - 2, 1), transposed)
    nbytes += (read * call.nbytes(1) + call.nbytes(2)) if weight else 0.0  # x is read, the weights' gradient is written
    nbytes += (call.nbytes(2) + call.nbytes(1)) if data else 0.0  # the weights are read, x's gradient is written
    nbytes += y[1] * element if bias and len(y) > 1 else 0.0
    return Cost(nbytes, (data + weight) * _product_flops(x, w, y, transposed), "", True)


def _mm(call: OperatorCall, first: int) -> Cost | None:
    a, b = call.shape(first), call.shape(first + 1)
    if not a or not b or len(a) < 2:
        return None
    n = b[-1] if len(b) > 1 else 1
    out = prod(a[:-1]) * n
    return Cost(call.all_bytes() + out * call.sizes[first][0][1], 2.0 * out * a[-1], "", True)


def _linear(call: OperatorCall) -> Cost | None:
    x, w = call.shape(0), call.shape(1)
    if not x or not w:
        return None
    out = prod(x[:-1]) * (w[0] if len(w) > 1 else 1)
    return Cost(call.all_bytes() + out * call.sizes[0][0][1], 2.0 * out * x[-1], "", True)


def _pool_forward(call: OperatorCall, *, indices: bool, max_pool: bool) -> Cost | None:
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


def _reduction(call: OperatorCall) -> Cost | None:
    x = call.shape(0)
    if x is None:
        return None
    dims, element = call.argument(1), call.sizes[0][0][1]
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = [dims]
    kept = prod(n for i, n in enumerate(x) if i not in {d % len(x) for d in dims}) if dims and x else 1
    return _reads_and_writes(call.nbytes(0), kept * element, call.elements(0))


def _upsample(call: OperatorCall, *, backward: bool) -> Cost | None:
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


def _to_copy(call: OperatorCall) -> Cost | None:
    kind = call.argument(1)
    size = SCALAR_TYPE_BYTES.get(kind) if isinstance(kind, int) and not isinstance(kind, bool) else None
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


def model(name: str, call: OperatorCall) -> Cost | None:
    """The cost of a call of the operator of this name, without its namespace; None where nothing is known of it."""
    stem = name.removesuffix("_")
    for kind in (_product, _window, _copy, _many, _elementwise):
        found = kind(stem, call)
        if found is not None:
            return found
    return None


def _product(stem: str, call: OperatorCall) -> Cost | None:
    """Convolutions and matrix products."""
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
    return None


def _window(stem: str, call: OperatorCall) -> Cost | None:
    """Pooling and upsampling."""
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
    return None


def _copy(stem: str, call: OperatorCall) -> Cost | None:
    """What moves values, or makes them."""
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
    return None


def _many(stem: str, call: OperatorCall) -> Cost | None:
    """Updates of many tensors in one call."""
    if stem.startswith("_fused_"):  # parameters and state are read and written, gradients (the second list) are read
        lists = [i for i in range(len(call.sizes)) if len(call.sizes[i]) > 1 or call.tensors[i] is None]
        total = sum(call.nbytes(i) for i in lists)
        return _reads_and_writes(total, total - call.nbytes(1), 4.0 * call.elements(0))
    if stem in ("_foreach_norm", "_foreach_max"):
        return _reads_and_writes(call.nbytes(0), 0.0, call.elements(0))
    if stem.startswith("_foreach_"):
        return _reads_and_writes(call.all_bytes(), call.nbytes(0), call.elements(0))
    return None


def _elementwise(stem: str, call: OperatorCall) -> Cost | None:
    """Losses, reductions, and what has a result for each element."""
    if stem == "native_dropout":
        return _reads_and_writes(call.nbytes(0), call.nbytes(0) + call.elements(0), call.elements(0))
    if stem in ("nll_loss_forward", "nll_loss2d_forward"):
        return _reads_and_writes(call.elements(1) * call.sizes[0][0][1] + call.nbytes(1), 8.0, call.elements(1))
    if stem in ("nll_loss_backward", "nll_loss2d_backward"):
        return _reads_and_writes(call.nbytes(0) + call.nbytes(2), call.nbytes(1), call.elements(2))
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
