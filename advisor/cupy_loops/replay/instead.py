"""What stands in a graph for kernels of a script's own whose meaning is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from advisor.cupy import convolution_windows
from advisor.cupy_loops.replay import columns
from advisor.cupy_loops.replay.cublas import Products
from advisor.cupy_loops.replay.naive import Meaning


def naive_operations(module: Any, products: Products, found: Meaning, inputs: list[Any]) -> Callable[..., None] | None:
    """What computes this of inputs that lie as these do, into an output that lies row by row; None for nothing."""

    def product(x: Any, y: Any, out: Any) -> None:
        out[...] = products.dot(x.T if found.numbers[0] else x, y.T if found.numbers[1] else y)

    def convolution(x: Any, w: Any, out: Any) -> None:
        stride, padding, turned = found.numbers
        seen = module.ascontiguousarray(convolution_windows(x, w.shape[2:], stride, padding))
        taps = (w[:, :, ::-1, ::-1] if turned else w).reshape(len(w), -1)
        n = len(x)
        products.batched(taps, seen.reshape(n, taps.shape[1], -1), out.reshape(n, len(w), -1))

    def largest(x: Any, out: Any) -> None:
        size, stride = found.numbers
        out[...] = convolution_windows(x, (size, size), stride, 0).max(axis=(2, 3))

    if found.kind in ("columns", "image"):
        return _columns(module, found, inputs[0])
    known: dict[str, Callable[..., None]] = {"product": product, "convolution": convolution, "largest": largest}
    return known.get(found.kind)


def _columns(module: Any, found: Meaning, given: Any) -> Callable[..., None]:
    name, text, size = columns.source(found.kind, found.numbers, given)
    kernel = module.RawKernel(text, name)

    def call(x: Any, out: Any) -> None:
        kernel((-(-size // 256),), (256,), (x, out))

    return call
