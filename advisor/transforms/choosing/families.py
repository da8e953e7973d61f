"""The bundled kernels as ways to make a product: those whose families compute a convolution alone, each direction by itself.

Not here: `first_conv`, `few_channels` and `fft_conv`, whose kernels share work between a call's products (padded or transformed
operands), and the 1 x 1 convolutions beside a norm. Their own transforms put them in place. `exact_conv` splits its operands anew for
each product here, and is timed with that.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from advisor.core.findings import Semantics
from advisor.ops import alignment
from advisor.ops.conv3x3 import api as conv3x3_api
from advisor.ops.conv3x3 import cuda as conv3x3
from advisor.ops.conv3x3 import spec as conv3x3_spec
from advisor.ops.depthwise import api as depthwise_api
from advisor.ops.depthwise import cuda as depthwise
from advisor.ops.depthwise import spec as depthwise_spec
from advisor.ops.exact_conv import api as exact_api
from advisor.ops.exact_conv import cuda as exact
from advisor.ops.exact_conv import spec as exact_spec
from advisor.ops.exact_conv import tf32
from advisor.ops.grouped import api as grouped_api
from advisor.ops.grouped import cuda as grouped
from advisor.ops.grouped.conv import GroupedConv, grouped_conv
from advisor.ops.large_depthwise import api as large_api
from advisor.ops.large_depthwise import cuda as large
from advisor.ops.large_depthwise import spec as large_spec
from advisor.ops.strided_pointwise import api as strided_api
from advisor.ops.strided_pointwise import cuda as strided
from advisor.ops.strided_pointwise import spec as strided_spec
from advisor.ops.winograd import api as winograd_api
from advisor.ops.winograd import cuda as winograd
from advisor.ops.winograd import spec as winograd_spec
from advisor.resources import kernels_dir
from advisor.transforms.choosing.numbers import DATA, FORWARD, WEIGHT, Numbers

Product = Callable[..., torch.Tensor]
One = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Bundled:
    """One family.

    Attributes:
        layout: that its operands lie in, and its results.
        refused: (x, weight, numbers) → why it cannot take them; "" when it can.
        products: direction → (x, weight, numbers) for the forward, (dy, x, weight, numbers) for a gradient.
        semantics: what becomes of the numbers: a way is taken only where that is allowed.
    """

    layout: str
    refused: Callable[[torch.Tensor, torch.Tensor, Numbers], str]
    products: dict[str, Product]
    semantics: Semantics = Semantics.REASSOCIATED


def _refused_3x3(x: torch.Tensor, weight: torch.Tensor, n: Numbers) -> str:
    taken = (n.stride, n.padding, n.dilation, n.groups) == ((1, 1), (1, 1), (1, 1), 1)
    return _reason(taken, lambda: conv3x3_api.unsupported(x, weight, None))


def _call_3x3(x: torch.Tensor, weight: torch.Tensor) -> conv3x3_spec.Conv3x3:
    return conv3x3_spec.call(tuple(x.shape), weight.shape[0])


def _refused_grouped(x: torch.Tensor, weight: torch.Tensor, n: Numbers) -> str:
    taken = n.groups > 1 and n.stride in ((1, 1), (2, 2)) and (n.padding, n.dilation) == ((1, 1), (1, 1))
    return _reason(taken, lambda: grouped_api.unsupported(x, weight, None, n.stride[0], n.groups))


def _call_grouped(x: torch.Tensor, n: Numbers) -> GroupedConv:
    return grouped_conv(tuple(x.shape), n.groups, n.stride[0])


def _refused_depthwise(x: torch.Tensor, weight: torch.Tensor, n: Numbers) -> str:
    taken = _depthwise(x, weight, n) and n.stride[0] == n.stride[1] and n.dilation[0] == n.dilation[1]
    pair = (n.padding[0], n.padding[1])
    return _reason(taken, lambda: depthwise_api.unsupported(x, weight, None, n.stride[0], pair, n.dilation[0]))


def _call_depthwise(x: torch.Tensor, weight: torch.Tensor, n: Numbers) -> depthwise_spec.DepthwiseConv:
    pair = (n.padding[0], n.padding[1])
    return depthwise_spec.call(tuple(x.shape), weight.shape[2], n.stride[0], pair, n.dilation[0])


def _refused_large(x: torch.Tensor, weight: torch.Tensor, n: Numbers) -> str:
    taken = _depthwise(x, weight, n) and (n.stride, n.dilation) == ((1, 1), (1, 1))
    return _reason(taken, lambda: large_api.unsupported(x, weight, None, (n.padding[0], n.padding[1])))


def _call_large(x: torch.Tensor, weight: torch.Tensor, n: Numbers) -> large_spec.LargeConv:
    return large_spec.call(tuple(x.shape), (weight.shape[2], weight.shape[3]), (n.padding[0], n.padding[1]))


def _refused_strided(x: torch.Tensor, weight: torch.Tensor, n: Numbers) -> str:
    taken = (n.stride, n.padding, n.dilation, n.groups) == ((2, 2), (0, 0), (1, 1), 1)
    return _reason(taken, lambda: strided_api.unsupported(x, weight, None))


def _call_strided(x: torch.Tensor, weight: torch.Tensor) -> strided_spec.StridedConv:
    return strided_spec.call(tuple(x.shape), weight.shape[0])


def _refused_exact(x: torch.Tensor, weight: torch.Tensor, n: Numbers) -> str:
    if tf32.allowed():
        return tf32.ALLOWED
    taken = n.stride[0] == n.stride[1] and n.dilation[0] == n.dilation[1] and x.dtype == torch.float32
    sizes = n.stride[0], (n.padding[0], n.padding[1]), n.dilation[0], n.groups
    return _reason(taken, lambda: exact_api.CONVOLUTION.unsupported(x, weight, None, *sizes))


def _call_exact(x: torch.Tensor, weight: torch.Tensor, n: Numbers) -> exact_spec.ExactConv:
    pair = (n.padding[0], n.padding[1])
    return exact_spec.call(tuple(x.shape), tuple(weight.shape), n.stride[0], pair, n.dilation[0], n.groups)


def _exact_weight(weight: torch.Tensor, n: Numbers, *, gradient: bool) -> exact.HalfParts:
    return exact.split_weight(alignment.aligned(weight.contiguous()), n.groups, gradient=gradient)


def _exact_data(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, n: Numbers) -> torch.Tensor:
    return exact.backward_data(exact.split(dy), _exact_weight(weight, n, gradient=True), x, _call_exact(x, weight, n))


def _refused_winograd(x: torch.Tensor, weight: torch.Tensor, n: Numbers) -> str:
    taken = (n.stride, n.dilation, n.groups) == ((1, 1), (1, 1), 1) and n.padding[0] == n.padding[1]
    return _reason(taken, lambda: winograd_api.unsupported(x, weight, None, n.padding[0]))


def _call_winograd(x: torch.Tensor, weight: torch.Tensor, n: Numbers) -> winograd_spec.WinogradConv:
    return winograd_spec.call(tuple(x.shape), weight.shape[0], n.padding[0])


def _depthwise(x: torch.Tensor, weight: torch.Tensor, n: Numbers) -> bool:
    return n.groups == x.shape[1] == weight.shape[0] > 1


def _reason(taken: bool, more: Callable[[], str]) -> str:
    return more() if taken else "another kind of convolution"


BUNDLED = {
    "conv3x3": Bundled(
        "nhwc",
        _refused_3x3,
        {
            FORWARD: lambda x, w, n: conv3x3.forward(x, w, _call_3x3(x, w))[0],
            DATA: lambda dy, x, w, n: conv3x3.backward_data(dy, w, _call_3x3(x, w)),
            WEIGHT: lambda dy, x, w, n: conv3x3.backward_weight(dy, x, w, _call_3x3(x, w)),
        },
    ),
    "grouped": Bundled(
        "nhwc",
        _refused_grouped,
        {
            FORWARD: lambda x, w, n: grouped.forward(x, w, _call_grouped(x, n))[0],
            DATA: lambda dy, x, w, n: grouped.backward_data(dy, w, _call_grouped(x, n)),
            WEIGHT: lambda dy, x, w, n: grouped.backward_weight(dy, x, w, _call_grouped(x, n)),
        },
    ),
    "depthwise": Bundled(
        "nhwc",
        _refused_depthwise,
        {
            FORWARD: lambda x, w, n: depthwise.forward(x, w.contiguous(), None, _call_depthwise(x, w, n))[0],
            DATA: lambda dy, x, w, n: depthwise.backward_data(dy, w.contiguous(), _call_depthwise(x, w, n)),
            WEIGHT: lambda dy, x, w, n: depthwise.backward_weight(
                dy, x, w.contiguous(), None, _call_depthwise(x, w, n)
            )[0],
        },
    ),
    "large_depthwise": Bundled(
        "nchw",
        _refused_large,
        {
            FORWARD: lambda x, w, n: large.forward(x, w.contiguous(), None, _call_large(x, w, n)),
            DATA: lambda dy, x, w, n: large.backward_data(dy, w.contiguous(), _call_large(x, w, n)),
            WEIGHT: lambda dy, x, w, n: large.backward_weight(dy, x, w.contiguous(), _call_large(x, w, n)),
        },
    ),
    "exact_conv": Bundled(
        "nhwc",
        _refused_exact,
        {
            FORWARD: lambda x, w, n: exact.forward(
                exact.split(x), _exact_weight(w, n, gradient=False), None, x, _call_exact(x, w, n)
            ),
            DATA: _exact_data,
            WEIGHT: lambda dy, x, w, n: exact.backward_weight(exact.split(dy), exact.split(x), w, _call_exact(x, w, n)),
        },
    ),
    # Its error is above that of storing bf16.
    "winograd": Bundled(
        "nhwc",
        _refused_winograd,
        {
            FORWARD: lambda x, w, n: winograd.forward(x, w, _call_winograd(x, w, n)),
            DATA: lambda dy, x, w, n: winograd.backward_data(dy, w, _call_winograd(x, w, n)),
        },
        Semantics.PRECISION,
    ),
    # Its weight's gradient is cuDNN's, of pixels gathered before: no kernel of its own.
    "strided_pointwise": Bundled(
        "nhwc",
        _refused_strided,
        {
            FORWARD: lambda x, w, n: strided.forward(x, alignment.aligned(w.contiguous()), _call_strided(x, w)),
            DATA: lambda dy, x, w, n: strided.backward_data(dy, alignment.aligned(w.contiguous()), _call_strided(x, w)),
        },
    ),
}


@cache
def digest() -> str:
    """Of the sources of these kernels: what was timed with others is timed again."""
    found = hashlib.sha256()
    for name in sorted(BUNDLED):
        for path in sorted((kernels_dir() / name).glob("*.cu*")):
            found.update(path.read_bytes())
    return found.hexdigest()[:12]


def taking(
    direction: str, x: torch.Tensor, weight: torch.Tensor, numbers: Numbers, layout: str, allowed: Semantics
) -> tuple[str, ...]:
    """The families that can make this product of operands as they lie, and change its numbers no more than is allowed."""
    return tuple(
        name
        for name, of in BUNDLED.items()
        if of.layout == layout
        and of.semantics in (Semantics.REASSOCIATED, allowed)
        and direction in of.products
        and not of.refused(x, weight, numbers)
    )


def made(name: str, direction: str, operands: tuple[torch.Tensor, ...], numbers: Numbers) -> torch.Tensor:
    """The product, of operands in the family's layout: x and weight for the forward, dy, x and weight for a gradient."""
    return BUNDLED[name].products[direction](*operands, numbers)
