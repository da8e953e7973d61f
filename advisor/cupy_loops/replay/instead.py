"""What stands in a graph for kernels of a script's own whose meaning is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from advisor.cupy import convolution_windows
from advisor.cupy_loops.replay import columns
from advisor.cupy_loops.replay.cublas import Products
from advisor.cupy_loops.replay.memory import pointer
from advisor.cupy_loops.replay.naive import Meaning


def naive_operations(module: Any, products: Products, found: Meaning, inputs: list[Any]) -> Callable[..., None] | None:
    """What computes this of inputs that lie as these do, into an output that lies row by row; None for nothing."""

    def product(x: Any, y: Any, out: Any) -> None:
        out[...] = products.dot(x.T if found.numbers[0] else x, y.T if found.numbers[1] else y)

    def largest(x: Any, out: Any) -> None:
        size, stride = found.numbers
        out[...] = convolution_windows(x, (size, size), stride, 0).max(axis=(2, 3))

    if found.kind in ("columns", "image"):
        return _columns(module, found.kind, found.numbers, inputs[0])
    if found.kind == "convolution":
        return _convolution(module, products, found, *inputs)
    known: dict[str, Callable[..., None]] = {"product": product, "largest": largest}
    return known.get(found.kind)


def _convolution(module: Any, products: Products, found: Meaning, x: Any, w: Any) -> Callable[..., None]:
    """Windows of the image, its border of zeros with them, as columns in one pass; and a product for each image."""
    stride, padding, turned = found.numbers
    (n, c, height, width), (c_out, _, kh, kw) = x.shape, w.shape
    oh, ow = ((length + 2 * padding - k) // stride + 1 for length, k in ((height, kh), (width, kw)))
    gather = _columns(module, "columns", (n, c, height, width, kh, kw, oh, ow, stride, padding), x)

    def call(x: Any, w: Any, out: Any) -> None:
        seen = module.empty((n, c * kh * kw, oh * ow), dtype=x.dtype)
        gather(x, seen)
        taps = (w[:, :, ::-1, ::-1] if turned else w).reshape(c_out, -1)
        products.batched(taps, seen, out.reshape(n, c_out, -1))

    return call


def _columns(module: Any, kind: str, numbers: tuple[int, ...], given: Any) -> Callable[..., None]:
    kernels = {}
    for wide in (True, False):
        name, text, size = columns.source(kind, numbers, given, wide=wide)
        kernels[wide] = module.RawKernel(text, name), -(-size // 256)

    def call(x: Any, out: Any) -> None:
        kernel, blocks = kernels[pointer(out) % 16 == 0]
        kernel((blocks,), (256,), (x, out))

    return call
