"""Finds bias (+ add) + activation after a convolution or a Linear layer, add + activation, and factors (a channel, a sample) +
add in a captured graph."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import consumers, dimensions, dispatch, match, storage
from advisor.ops.bias_act import api, spec
from advisor.ops.depthwise.api import depthwise_conv2d
from advisor.ops.grouped.api import grouped_conv2d

_CONVOLUTIONS = {F.conv2d, F.conv_transpose2d}
_PRODUCTS = {*_CONVOLUTIONS, F.linear}
_OF_VOLUMES = {F.conv3d, F.conv_transpose3d}  # whose result is taken as images
_OURS = {
    depthwise_conv2d,
    grouped_conv2d,
}  # put in earlier, for a convolution which autocast would run in half precision
_MUL = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
_MUL_IN_PLACE = {operator.imul, "mul_"}
_TO_NCHW = (0, 3, 1, 2)
_BIAS = 2  # position among a convolution's or Linear layer's arguments


@dataclass(frozen=True, slots=True)
class _Activation:
    """act(x + bias + residual): `dead` are the nodes whose place it takes besides the activation itself."""

    node: fx.Node
    x: fx.Node
    product: bool  # x is a convolution or a Linear layer, whose bias moves here
    residual: fx.Node | None
    activation: str
    slope: float
    dead: tuple[fx.Node, ...]

    @property
    def dim(self) -> int:
        """Of the channels."""
        return -1 if self.product and self.x.target is F.linear else 1

    @property
    def label(self) -> str:
        return spec.name(self.activation, bias=self.product, residual=self.residual is not None, dim=self.dim)


@dataclass(frozen=True, slots=True)
class _ScaledAdd:
    """residual + (branch + bias) * scale * keep."""

    node: fx.Node
    branch: fx.Node
    scale: fx.Node | None
    keep: fx.Node | None
    residual: fx.Node
    dead: tuple[fx.Node, ...]
    mixed: bool
    product: fx.Node | None = (
        None  # the branch, or what it is a view of: a convolution or a Linear layer, whose bias moves here
    )
    casting: tuple[fx.Node, ...] = ()  # the users which take the sum as autocast casts it

    @property
    def variant(self) -> spec.Scaled:
        """What the kernels are asked for."""
        return spec.Scaled(
            self.scale is not None,
            self.keep is not None,
            bias=self.product is not None,
            mixed=self.mixed,
            twin=bool(self.casting),
        )

    @property
    def label(self) -> str:
        return self.variant.name


def bias_of(node: fx.Node) -> Any:
    """The bias of a convolution or a Linear layer, or of what this is the image of; None when it has none or is neither.

    Nor for one pixel a sample, as in squeeze-and-excite and classifiers: what there is to gain is less than a launch costs.
    """
    result = match.value(node)
    if node.op != "call_function" or result is None:
        return None
    product = _volumes(node)
    if product is None and node.target not in _PRODUCTS:
        return None
    if result.dim() < 3 if node.target is F.linear else tuple(result.shape[2:]) == (1, 1):
        return None
    product = product or node
    return product.args[_BIAS] if len(product.args) > _BIAS else product.kwargs.get("bias")


def _volumes(node: fx.Node) -> fx.Node | None:
    """The convolution of volumes that this node is the image of, where nobody else sees its result."""
    whole = dimensions.image_of(node)
    return whole if whole is not None and whole.target in _OF_VOLUMES and match.only_user(whole) is node else None


def _activation(node: fx.Node) -> _Activation | None:
    follows = match.activation(node)
    before = match.operand(node)
    if follows is None or not isinstance(before, fx.Node) or match.only_user(before) is not node:
        return None
    if bias_of(before) is not None:
        return _Activation(node, before, True, None, *follows, dead=())
    first = before.args[0] if before.args else None
    if not isinstance(first, fx.Node):
        return None
    second = match.addend(before, first)
    if second is None:
        return None
    if not match.read_later(first, before) or not match.read_later(second, before):
        return None
    for x, other in ((first, second), (second, first)):
        if bias_of(x) is not None and match.only_user(x) is before:
            return _Activation(node, x, True, other, *follows, dead=(before,))
    return _Activation(node, first, False, second, *follows, dead=(before,))


def _factor(mul: fx.Node) -> tuple[fx.Node, fx.Node, str] | None:
    """What a product scales, by what, and whether that is one factor a "channel" or a "sample"."""
    first, second = match.operands(mul, _MUL) or (None, None)
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    result = match.value(mul)
    for base, factor in ((first, second), (second, first)):
        whole, small = match.value(base), match.value(factor)
        if whole is None or small is None or result is None or whole.dim() != 4 or whole.shape != result.shape:
            continue
        if mul.target in _MUL_IN_PLACE and (base is not first or len(base.users) > 1):
            continue
        n, c = whole.shape[:2]
        shape = (1,) * (4 - small.dim()) + tuple(small.shape)
        if shape == (1, c, 1, 1):
            return base, factor, "channel"
        if shape == (n, 1, 1, 1) and not small.requires_grad:
            return base, factor, "sample"
    return None


def _scaled_add(add: fx.Node) -> _ScaledAdd | None:
    for term in add.args[:2]:
        if not isinstance(term, fx.Node):
            continue
        residual = match.addend(add, term, mixed=True)
        if residual is None:
            continue
        found: dict[str, fx.Node] = {}
        dead: list[fx.Node] = []
        branch, reader = term, add
        while match.only_user(branch) is reader and (factor := _factor(branch)) is not None:
            base, node, kind = factor
            if kind in found or not match.read_later(node, branch):
                break
            found[kind] = node
            dead.append(branch)
            branch, reader = base, branch
        if (
            found
            and match.read_later(branch, reader)
            and match.read_later(residual, add)
            and _dtype(residual) in (_dtype(add), _dtype(branch))
        ):
            scale, keep = found.get("channel"), found.get("sample")
            return _ScaledAdd(add, branch, scale, keep, residual, tuple(dead), mixed=_dtype(residual) != _dtype(add))
    return None


def _dtype(node: fx.Node) -> torch.dtype | None:
    value = match.value(node)
    return None if value is None else value.dtype


def _product_of(site: _ScaledAdd) -> fx.Node | None:
    """The convolution or, behind a permute, Linear layer that gives the branch, where its bias can move into the sum."""
    found: Any = site.branch
    if site.scale is None or match.only_user(found) is None:
        return None
    if match.permutes(found, _TO_NCHW):
        found, view = found.args[0], found
        if not isinstance(found, fx.Node) or found.target is not F.linear or match.only_user(found) is not view:
            return None
    elif found.target is F.linear:
        return None
    return found if bias_of(found) is not None else None


def _with_neighbours(site: _ScaledAdd) -> Iterator[_ScaledAdd]:
    """The site with all that it could take in before and behind it, the most first, and alone."""
    product = _product_of(site)
    dtype = _dtype(site.branch)
    casting = tuple(consumers.casting(site.node, dtype, _OURS)) if dtype is not None and dtype in consumers.HALF else ()
    for taken in dict.fromkeys(((product, casting), (None, casting), (product, ()), (None, ()))):
        yield replace(site, product=taken[0], casting=taken[1])


def _scale_behind_permutes(graph: fx.Graph) -> None:
    """`(x * scale).permute(0, 3, 1, 2)` becomes `x.permute(0, 3, 1, 2) * scale[:, None, None]` where a sum follows.

    ConvNeXt's own code scales while channels are last. Both are the same products of the same memory.
    """
    for node in list(graph.nodes):
        scaled = match.operand(node) if match.permutes(node, _TO_NCHW) else None
        user = match.only_user(node)
        if not isinstance(scaled, fx.Node) or user is None or user.target not in _MUL | match.ADD:
            continue
        for base, factor in _last_factor(scaled) if match.only_user(scaled) is node else ():
            with graph.inserting_before(node):
                image = graph.call_method("permute", (base, *_TO_NCHW))
                channels = graph.call_function(operator.getitem, (factor, (slice(None), None, None)))
                product = graph.call_function(operator.mul, (image, channels))
            image.meta = {**node.meta, "example_value": cast(torch.Tensor, match.value(base)).permute(_TO_NCHW)}
            channels.meta = {**scaled.meta, "example_value": cast(torch.Tensor, match.value(factor))[:, None, None]}
            match.replace(node, product, (scaled,))
            break


def _last_factor(mul: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The image [N, H, W, C] that a product scales, and its factors [C]; nothing where it is no such product."""
    both = match.operands(mul, _MUL - _MUL_IN_PLACE)
    for base, factor in (both, both[::-1]) if both is not None else ():
        whole, small = match.value(base), match.value(factor)
        if whole is not None and small is not None and whole.dim() == 4 and small.shape == whole.shape[-1:]:
            yield cast(fx.Node, base), cast(fx.Node, factor)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape with 1 for what is not known before the graph runs: only the channels matter here."""
    return tuple(size if type(size) is int else 1 for size in tensor.shape)


def _refusal(site: _Activation | _ScaledAdd) -> str:
    x = match.value(site.x if isinstance(site, _Activation) else site.branch)
    dim = site.dim if isinstance(site, _Activation) else 1
    if x is None or (dim == 1 and x.dim() != 4) or type(x.shape[dim]) is not int:
        return "input is not 4-D, or its channel count is dynamic"
    if isinstance(site, _Activation):
        reason = spec.unsupported(
            shape=_shape(x),
            dim=dim,
            dense=True,
            dtype=match.dtype_name(x),
            activation=site.activation,
            slope=site.slope,
            bias=site.product,
            residual=site.residual is not None,
            arch=storage.MIN_ARCH,
        )
        kind = site.label
    else:
        result = storage.name(_dtype(site.node))
        reason = spec.scale_unsupported(
            shape=_shape(x),
            channels_last=True,
            dtype=match.dtype_name(x),
            residual=storage.name(_dtype(site.residual)),
            result=result,
            variant=site.variant,
            arch=storage.MIN_ARCH,
        )
        kind = spec.scaled_kind(site.variant, match.dtype_name(x), result)
    return dispatch.refusal(reason, spec.wins(kind, match.dtype_name(x)))


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Rewrite bias (+ add) + activation, add + activation, and factors + add in place.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operations; else the thin eager functions are
    called. A Linear layer's bias and activation are left to Inductor, which has them with its own casts in one pass. `report`
    gains one entry a site, under the path of the convolution or Linear layer or that of the module that adds.
    """
    seen: set[str] = set()
    _scale_behind_permutes(graph_module.graph)
    for node in list(graph_module.graph.nodes):
        if node._erased:
            continue
        site = _activation(node) or _scaled_add(node)
        if site is None:
            continue
        path = match.path(site.x if isinstance(site, _Activation) and site.product else node)
        if path in seen:
            path = f"{path}.{node.name}"
        seen.add(path)
        if isinstance(site, _ScaledAdd) and not compiled:
            site = next((more for more in _with_neighbours(site) if not _refusal(more)), site)
        reason = _refusal(site) or (_inductor(site) if compiled else "")
        if reason:
            report.unmatched[path] = match.said_of(site.label, reason)
            continue
        if isinstance(site, _Activation):
            _put_activation(site, compiled=compiled)
        else:
            _put_scaled_add(site, compiled=compiled)
        report.matched[path] = site.label


def _inductor(site: _Activation | _ScaledAdd) -> str:
    """Why a site is left alone in a graph that goes on to Inductor."""
    if isinstance(site, _Activation):
        return "Inductor fuses a Linear layer's activation" if site.dim == -1 else ""
    return "Inductor fuses a sum of two dtypes" if site.mixed else ""


def without_bias(product: fx.Node) -> fx.Node:
    """The same product before it, without its bias; of an image of volumes, that image."""
    bias, volumes = bias_of(product), _volumes(product)
    if volumes is not None:
        plain_volumes = _without(volumes, bias)
        with product.graph.inserting_before(product):
            image = product.graph.call_function(torch.flatten, (plain_volumes, *product.args[1:]))
        image.meta.update(product.meta)
        return image
    return _without(product, bias)


def _without(product: fx.Node, bias: Any) -> fx.Node:
    with product.graph.inserting_before(product):
        arguments = tuple(None if a is bias else a for a in product.args)
        options = {key: value for key, value in product.kwargs.items() if key != "bias"}
        plain = product.graph.call_function(product.target, arguments, options)  # type: ignore[arg-type]  # the node's own arguments
    plain.meta.update(product.meta)
    return plain


def _put_activation(site: _Activation, *, compiled: bool) -> None:
    graph = site.node.graph
    x, bias, volumes = site.x, None, _volumes(site.x) if site.product else None
    if site.product:
        bias, x = bias_of(x), without_bias(x)
    arguments = (x, bias, site.residual, site.activation, site.slope)
    with graph.inserting_before(site.node):
        if compiled:
            call = graph.call_function(torch.ops.advisor.bias_act.default, arguments)
            fused = graph.call_function(operator.getitem, (call, 0))
        else:  # nobody else has the product's output; a view of it, changed in place, would cost autograd two copies
            fused = graph.call_function(api.bias_act, (*arguments, site.product and volumes is None, site.dim))
    dead = (site.x, *((volumes,) if volumes is not None else ())) if site.product else ()
    match.replace(site.node, fused, (*site.dead, *dead))


def _put_scaled_add(site: _ScaledAdd, *, compiled: bool) -> None:
    graph = site.node.graph
    if compiled:
        with graph.inserting_before(site.node):
            operands = (site.branch, site.scale, site.keep, site.residual)
            fused = graph.call_function(torch.ops.advisor.scale_add.default, operands)
        match.replace(site.node, fused, site.dead)
        return
    branch, bias, dead = site.branch, None, site.dead
    if site.product is not None:
        bias, plain = bias_of(site.product), without_bias(site.product)
        if site.product is not branch:  # a view of it
            branch.replace_input_with(site.product, plain)
            dead = (*dead, site.product)
        else:
            branch, dead = plain, (*dead, branch)
    result, half_dtype, twin = _dtype(site.node), _dtype(site.branch), bool(site.casting)
    with graph.inserting_before(site.node):
        fused = graph.call_function(api.scale_add, (branch, site.scale, site.keep, site.residual, bias, result, twin))
        if twin:
            half = graph.call_function(operator.getitem, (fused, 1))
            fused = graph.call_function(operator.getitem, (fused, 0))
    if twin and half_dtype is not None:
        half.meta.update(site.node.meta)
        consumers.store_as(half, half_dtype)
        for user in site.casting:
            user.replace_input_with(site.node, half)
    match.replace(site.node, fused, dead)
