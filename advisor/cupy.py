"""Convolution, pooling and norms with their gradients, as plain functions of CuPy's arrays, for who may edit a loop: CuPy 14 has none.

Images are (N, C, H, W), weights (C_out, C_in, KH, KW), any strides. fp16 products sum in fp32; what is given in fp32 or fp64 is computed in it.
All functions take NumPy's arrays too, and give arrays of what they were given.

    y = conv2d(x, w, b, stride=2, padding=1)
    dx, dw, db = conv2d_gradients(dy, x, w, stride=2, padding=1)

Formulas: Goodfellow, Bengio, Courville, "Deep Learning", §9.5; Ioffe and Szegedy, arXiv:1502.03167; Ba, Kiros, Hinton, arXiv:1607.06450.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy

Pair = int | tuple[int, int]  # one for both, or height and width


def conv2d(x: Any, w: Any, b: Any = None, *, stride: Pair = 1, padding: Pair = 0) -> Any:
    """The convolution (cross-correlation) of x with w, plus b.

    Args:
        x: (N, C_in, H, W).
        w: (C_out, C_in, KH, KW), of x's dtype.
        b: (C_out,) or None.

    Returns:
        (N, C_out, OH, OW), of x's dtype.

    Raises:
        ValueError: for shapes that do not fit.
    """
    _check_convolution(x, w)
    xp = _module(x)
    (sh, sw), (ph, pw) = _pair(stride), _pair(padding)
    kh, kw = w.shape[2:]
    if (kh, kw, sh, sw, ph, pw) == (1, 1, 1, 1, 0, 0):
        y = xp.tensordot(w[:, :, 0, 0], x, (1, 1)).transpose(1, 0, 2, 3)
    else:
        y = xp.tensordot(w, _windows(_padded(x, ph, pw), kh, kw, sh, sw), ((1, 2, 3), (1, 2, 3))).transpose(1, 0, 2, 3)
    return y if b is None else y + b.reshape(1, -1, 1, 1)


def conv2d_gradients(dy: Any, x: Any, w: Any, *, stride: Pair = 1, padding: Pair = 0) -> tuple[Any, Any, Any]:
    """Gradients of `conv2d` for its x, w and b, from that of its output.

    Returns:
        dx like x, dw like w, db (C_out,).

    Raises:
        ValueError: for shapes that do not fit.
    """
    _check_convolution(x, w)
    xp = _module(x)
    (sh, sw), (ph, pw) = _pair(stride), _pair(padding)
    kh, kw = w.shape[2:]
    padded = _padded(x, ph, pw)
    columns = _windows(padded, kh, kw, sh, sw)
    dw = xp.tensordot(dy, columns, ((0, 2, 3), (0, 4, 5)))
    spread = xp.tensordot(w, dy, (0, 1))  # (C_in, KH, KW, N, OH, OW)
    dx = xp.zeros(padded.shape, dtype=x.dtype)
    oh, ow = dy.shape[2:]
    for i in range(kh):
        for j in range(kw):
            dx[:, :, i : i + sh * oh : sh, j : j + sw * ow : sw] += spread[:, i, j].transpose(1, 0, 2, 3)
    height, width = x.shape[2:]
    return dx[:, :, ph : ph + height, pw : pw + width], dw, dy.sum(axis=(0, 2, 3))


def max_pool2d(x: Any, size: Pair, *, stride: Pair | None = None, padding: Pair = 0) -> tuple[Any, Any]:
    """The largest value of each window, and which it is, for `max_pool2d_gradient`.

    Returns:
        y (N, C, OH, OW) and its places in the windows, int64 of the same shape, row by row.
    """
    xp = _module(x)
    (kh, kw), (ph, pw) = _pair(size), _pair(padding)
    sh, sw = _pair(size if stride is None else stride)
    lowest = -numpy.inf if x.dtype.kind == "f" else numpy.iinfo(x.dtype).min
    windows = _windows(_padded(x, ph, pw, lowest), kh, kw, sh, sw)
    n, c, _, _, oh, ow = windows.shape
    flat = windows.reshape(n, c, kh * kw, oh, ow)
    places = flat.argmax(axis=2)
    return xp.take_along_axis(flat, places[:, :, None], axis=2)[:, :, 0], places


def max_pool2d_gradient(
    dy: Any, places: Any, shape: tuple[int, int, int, int], size: Pair, *, stride: Pair | None = None, padding: Pair = 0
) -> Any:
    """The gradient of `max_pool2d` for its x of this shape, from that of its output and the places that it gave."""
    xp = _module(dy)
    (kh, kw), (ph, pw) = _pair(size), _pair(padding)
    sh, sw = _pair(size if stride is None else stride)
    oh, ow = dy.shape[2:]
    dx = xp.zeros((*shape[:2], shape[2] + 2 * ph, shape[3] + 2 * pw), dtype=dy.dtype)
    for i in range(kh):
        for j in range(kw):
            chosen = xp.where(places == i * kw + j, dy, xp.zeros((), dtype=dy.dtype))
            dx[:, :, i : i + sh * oh : sh, j : j + sw * ow : sw] += chosen
    return dx[:, :, ph : ph + shape[2], pw : pw + shape[3]]


def batch_norm(x: Any, gamma: Any, beta: Any, *, eps: float = 1e-5) -> tuple[Any, Any, Any]:
    """x with mean 0 and variance 1 over each channel of the batch, times gamma plus beta (C,).

    Returns:
        y like x; mean and 1 / sqrt(variance + eps), (C,): for `batch_norm_gradients`, and for running averages.
    """
    axes = (0, *range(2, x.ndim))
    return _norm(x, gamma, beta, axes, (1, -1, *(1,) * (x.ndim - 2)), eps)


def batch_norm_gradients(dy: Any, x: Any, gamma: Any, mean: Any, scale: Any) -> tuple[Any, Any, Any]:
    """Gradients of `batch_norm` for x, gamma and beta; mean and scale are what it gave."""
    axes = (0, *range(2, x.ndim))
    shape = (1, -1, *(1,) * (x.ndim - 2))
    return _norm_gradients(dy, x, gamma, mean.reshape(shape), scale.reshape(shape), axes, axes, shape)


def layer_norm(x: Any, gamma: Any, beta: Any, *, eps: float = 1e-5) -> tuple[Any, Any, Any]:
    """x with mean 0 and variance 1 over its last axis, times gamma plus beta (of that axis' length).

    Returns:
        y like x; mean and 1 / sqrt(variance + eps), of x's shape without the last axis.
    """
    return _norm(x, gamma, beta, (x.ndim - 1,), (*(1,) * (x.ndim - 1), -1), eps)


def layer_norm_gradients(dy: Any, x: Any, gamma: Any, mean: Any, scale: Any) -> tuple[Any, Any, Any]:
    """Gradients of `layer_norm` for x, gamma and beta; mean and scale are what it gave."""
    last, others = (x.ndim - 1,), tuple(range(x.ndim - 1))
    shape = (*(1,) * (x.ndim - 1), -1)
    return _norm_gradients(dy, x, gamma, mean[..., None], scale[..., None], last, others, shape)


def _norm(
    x: Any, gamma: Any, beta: Any, axes: tuple[int, ...], shape: tuple[int, ...], eps: float
) -> tuple[Any, Any, Any]:
    mean = x.mean(axis=axes, keepdims=True)
    centred = x - mean
    scale = 1.0 / _module(x).sqrt((centred * centred).mean(axis=axes, keepdims=True) + eps)
    y = centred * scale * gamma.reshape(shape) + beta.reshape(shape)
    return y, mean.squeeze(axes), scale.squeeze(axes)


def _norm_gradients(
    dy: Any,
    x: Any,
    gamma: Any,
    mean: Any,
    scale: Any,
    axes: tuple[int, ...],
    others: tuple[int, ...],
    shape: tuple[int, ...],
) -> tuple[Any, Any, Any]:
    """axes: those that x is normed over; others: those that gamma is the same along."""
    hat = (x - mean) * scale
    scaled = dy * gamma.reshape(shape)
    count = 1
    for axis in axes:
        count *= x.shape[axis]
    mean_of = scaled.sum(axis=axes, keepdims=True) / count
    along = (scaled * hat).sum(axis=axes, keepdims=True) / count
    return (scaled - mean_of - hat * along) * scale, (dy * hat).sum(axis=others), dy.sum(axis=others)


def _check_convolution(x: Any, w: Any) -> None:
    if x.ndim != 4 or w.ndim != 4 or x.shape[1] != w.shape[1]:
        raise ValueError(f"x {x.shape} and w {w.shape}; expected (N, C_in, H, W) and (C_out, C_in, KH, KW)")


def _module(x: Any) -> Any:
    return numpy if isinstance(x, numpy.ndarray) else sys.modules["cupy"]


def _pair(value: Pair) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def _padded(x: Any, ph: int, pw: int, value: float = 0) -> Any:
    if not ph and not pw:
        return x
    return _module(x).pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)), mode="constant", constant_values=value)


def convolution_windows(x: Any, size: Pair, stride: Pair = 1, padding: Pair = 0) -> Any:
    """What each place of a convolution or a pooling sees: (N, C, KH, KW, OH, OW), of x's own memory where nothing is padded.

    Raises:
        ValueError: where x is smaller than a window.
    """
    (kh, kw), (sh, sw), (ph, pw) = _pair(size), _pair(stride), _pair(padding)
    return _windows(_padded(x, ph, pw), kh, kw, sh, sw)


def zeros_beside(x: Any, shape: tuple[int, ...]) -> Any:
    """Zeros of x's kind, type and device."""
    return _module(x).zeros(shape, dtype=x.dtype)


def _windows(x: Any, kh: int, kw: int, sh: int, sw: int) -> Any:
    """(N, C, KH, KW, OH, OW), of x's own memory."""
    n, c, height, width = x.shape
    oh, ow = (height - kh) // sh + 1, (width - kw) // sw + 1
    if oh < 1 or ow < 1:
        raise ValueError(f"windows of {kh}x{kw} in images of {height}x{width}; expected images at least as large")
    a, b, c_, d = x.strides
    tricks: Any = _module(x).lib.stride_tricks
    return tricks.as_strided(x, (n, c, kh, kw, oh, ow), (a, b, c_, d, sh * c_, sw * d))
