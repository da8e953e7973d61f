"""What stands in a graph for kernels of a script's own whose meaning is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from advisor.cupy import convolution_windows
from advisor.cupy_loops.facts import fewer_bits
from advisor.cupy_loops.replay import columns
from advisor.cupy_loops.replay.cublas import Products
from advisor.cupy_loops.replay.gathered import Operands, dims, fits
from advisor.cupy_loops.replay.memory import pointer
from advisor.cupy_loops.replay.naive import Meaning

Clock = Callable[[Callable[[], Any]], float]  # milliseconds that the device takes for a call


def naive_operations(
    module: Any, products: Products, found: Meaning, inputs: list[Any], ms: Clock
) -> Callable[..., None] | None:
    """What computes this of inputs that lie as these do, into an output that lies row by row; None for nothing."""

    def product(x: Any, y: Any, out: Any) -> None:
        out[...] = products.dot(x.T if found.numbers[0] else x, y.T if found.numbers[1] else y)

    def largest(x: Any, out: Any) -> None:
        size, stride = found.numbers
        out[...] = convolution_windows(x, (size, size), stride, 0).max(axis=(2, 3))

    if found.kind in ("columns", "image"):
        return _columns(module, found.kind, found.numbers, inputs[0])
    if found.kind == "convolution":
        ways = [_by_columns(module, products, found, *inputs), _by_windows(module, products, found, *inputs)]
        return _faster(module, [way for way in ways if way is not None], found, inputs, ms)
    known: dict[str, Callable[..., None]] = {"product": product, "largest": largest}
    return known.get(found.kind)


def _faster(
    module: Any, ways: list[Callable[..., None]], found: Meaning, inputs: list[Any], ms: Clock
) -> Callable[..., None]:
    """Of these, the one that is."""
    if len(ways) == 1:
        return ways[0]
    x, w = inputs
    stride, padding, _ = found.numbers
    shape = ((length + 2 * padding - k) // stride + 1 for length, k in zip(x.shape[2:], w.shape[2:], strict=True))
    out = module.empty((len(x), len(w), *shape), dtype=x.dtype)
    return min(ways, key=lambda way: ms(lambda: way(x, w, out)))


def _by_windows(module: Any, products: Products, found: Meaning, x: Any, w: Any) -> Callable[..., None] | None:
    """The image with its border of zeros, and a product that reads its windows where they lie."""
    stride, padding, turned = found.numbers
    (n, c, height, width), (c_out, _, kh, kw) = x.shape, w.shape
    high, wide = height + 2 * padding, width + 2 * padding
    oh, ow = (high - kh) // stride + 1, (wide - kw) // stride + 1

    def taps(w: Any) -> Any:
        return w[:, :, ::-1, ::-1] if turned else w

    of = Operands(
        rows_a=dims(taps(w), (0,)),
        depth_a=dims(taps(w), (1, 2, 3)),
        depth_b=((c, high * wide), (kh, wide), (kw, 1)),
        columns_b=((n, c * high * wide), (oh, stride * wide), (ow, stride)),
    )
    if str(x.dtype) != "float32" or not fits(of) or fewer_bits(module) not in ("", "tf32"):
        return None
    into = ((c_out, oh * ow),), ((n, c_out * oh * ow), (oh * ow, 1))
    product = products.gatherer.made(of, tf32=fewer_bits(module) == "tf32", into=into)
    border = _columns(module, "columns", (n, c, height, width, 1, 1, high, wide, 1, padding), x)

    def call(x: Any, w: Any, out: Any) -> None:
        image = module.empty((n, c, high, wide), dtype=x.dtype)
        border(x, image)
        product(taps(w), image, out)

    return call


def _by_columns(module: Any, products: Products, found: Meaning, x: Any, w: Any) -> Callable[..., None]:
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
