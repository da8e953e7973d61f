"""The ways to make a convolution's three products, and each product's error against fp64 on a part of it.

A way is a layout that the operands are brought into, and whether cuDNN searches for its algorithm by timing or goes by its heuristics; or
a family of bundled kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from advisor.core.findings import Semantics
from advisor.transforms.choosing import families
from advisor.transforms.choosing.numbers import DATA, FORWARD, WEIGHT, Numbers

SAMPLES, CHANNELS = 1, 4  # of a product that are made again in fp64
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}

Kernel = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Way:
    """`layout`: "" for the operands' own; `search`: None for the user's own setting of cudnn.benchmark; `family`: "" for PyTorch's own."""

    layout: str = ""
    search: bool | None = None
    family: str = ""

    @property
    def name(self) -> str:
        """As `nhwc, searched`, or `conv3x3 kernels`."""
        if self.family:
            return f"{self.family} kernels"
        words = [self.layout] * bool(self.layout) + ["searched" if self.search else "by heuristics"] * (
            self.search is not None
        )
        return ", ".join(words) or USUAL


USUAL = "as usual"
AS_USUAL = Way()


def layout_of(x: torch.Tensor) -> str:
    """`nhwc` where x lies so and not in NCHW as well, else `nchw`."""
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    return "nhwc" if last else "nchw"


def candidates(
    direction: str,
    operands: Sequence[torch.Tensor],
    numbers: Numbers,
    *,
    cudnn: bool,
    allowed: Semantics = Semantics.REASSOCIATED,
) -> tuple[Way, ...]:
    """Those beside the usual one.

    Args:
        operands: x and weight for the forward, dy, x and weight for a gradient.
        allowed: what may become of the numbers.
    """
    x, weight = operands[-2:]
    lies = layout_of(x)
    other = "nchw" if lies == "nhwc" else "nhwc"
    bundled = tuple(Way(family=name) for name in families.taking(direction, x, weight, numbers, lies, allowed))
    if not cudnn:
        return (Way(layout=other), *bundled)
    searched = not torch.backends.cudnn.benchmark
    return Way(search=searched), Way(layout=other, search=False), Way(layout=other, search=True), *bundled


@contextmanager
def searching(search: bool | None) -> Iterator[None]:
    """cudnn.benchmark as wanted; None leaves it."""
    before = torch.backends.cudnn.benchmark
    if search is None or search == before:
        yield
        return
    torch.backends.cudnn.benchmark = search
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@dataclass(frozen=True, slots=True)
class Originals:
    """PyTorch's own kernels, called below autograd: forward (x, weight, bias, *numbers), backward (dy, x, weight, bias sizes, *numbers, mask)."""

    forward: Kernel
    backward: Kernel


def made_forward(
    kernels: Originals, way: Way, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, numbers: Numbers
) -> torch.Tensor:
    """The result, in the layout that x has."""
    if way.family:
        y = families.made(way.family, FORWARD, (x, weight), numbers)
        return y if bias is None else y.add_(bias.to(y.dtype).view(1, -1, 1, 1))
    with searching(way.search):
        if not way.layout:
            usual: torch.Tensor = kernels.forward(x, weight, bias, *numbers.arguments)
            return usual
        y = kernels.forward(laid(x, way.layout), laid(weight, way.layout), bias, *numbers.arguments)
        return laid(y, layout_of(x))


def made_gradient(
    kernels: Originals,
    way: Way,
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: list[int] | None,
    numbers: Numbers,
    mask: Sequence[bool],
) -> tuple[torch.Tensor | None, ...]:
    """The gradients wanted, in the layouts of x and weight. Of a family: one of x and weight alone."""
    if way.family:
        direction = DATA if mask[0] else WEIGHT
        made = families.made(way.family, direction, (laid(dy, layout_of(x)), x, weight), numbers)
        bias = dy.sum((0, 2, 3)) if mask[2] else None
        return (made, None, bias) if mask[0] else (None, made, bias)
    with searching(way.search):
        if not way.layout:
            found: tuple[torch.Tensor | None, ...] = kernels.backward(
                dy, x, weight, bias_sizes, *numbers.arguments, list(mask)
            )
            return found
        there = [laid(tensor, way.layout) for tensor in (dy, x, weight)]
        dx, dweight, dbias = kernels.backward(*there, bias_sizes, *numbers.arguments, list(mask))
        return (
            laid(dx, layout_of(x)) if mask[0] else dx,
            laid(dweight, layout_of(weight)) if mask[1] else dweight,
            dbias,
        )


def laid(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor in this layout: itself where it lies so."""
    return tensor.contiguous(memory_format=FORMATS[layout])


# ---- errors


def exact_part(
    kernels: Originals, direction: str, operands: Sequence[torch.Tensor], numbers: Numbers
) -> Callable[[torch.Tensor], float]:
    """The relative error, in the 2-norm, of a product against fp64 on a part of it.

    Args:
        operands: x and weight for the forward; dy, x and weight for a gradient.

    Of forward and data gradient a few samples are made again; of the weight's gradient, which sums over all samples, a few channels.
    """
    if direction == FORWARD:
        x, weight = operands
        exact = kernels.forward(x[:SAMPLES].double(), weight.double(), None, *numbers.arguments)
        return lambda y: _error(y[:SAMPLES], exact)
    dy, x, weight = operands
    if direction == DATA:
        parts = (dy[:SAMPLES].double(), x[:SAMPLES].double(), weight.double())
        exact = kernels.backward(*parts, None, *numbers.arguments, [True, False, False])[0]
        return lambda dx: _error(dx[:SAMPLES], exact)
    inputs = min(CHANNELS, weight.shape[1])
    outputs = min(CHANNELS, weight.shape[0] // numbers.groups)
    alone = Numbers(numbers.stride, numbers.padding, numbers.dilation, 1)
    few = (dy[:, :outputs].double(), x[:, :inputs].double(), weight[:outputs, :inputs].double())
    exact = kernels.backward(*few, None, *alone.arguments, [False, True, False])[1]
    return lambda dweight: _error(dweight[:outputs, :inputs], exact)


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    norm = float(exact.norm())
    off = float((found.double() - exact).norm())
    return off / norm if norm > 0 else (0.0 if off == 0 else float("inf"))
