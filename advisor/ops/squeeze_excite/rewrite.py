"""Finds squeeze-and-excite in a captured graph: pool, two products with an activation between them, gate, product with x.

The products may be 1x1 convolutions (torchvision, timm) or linear layers with views round them; the pool a mean over the
pixels, as they are or in one dimension, an adaptive average pool of one pixel, or an average pool of the whole image.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import dispatch, match, storage
from advisor.ops.pooling.rewrite import avg_pool_window, is_whole
from advisor.ops.squeeze_excite import api, spec

_PRODUCT = {operator.mul, torch.mul, "mul"}
_GATES = {
    torch.sigmoid: "sigmoid",
    torch.sigmoid_: "sigmoid",
    F.sigmoid: "sigmoid",
    "sigmoid": "sigmoid",
    "sigmoid_": "sigmoid",
    F.hardsigmoid: "hardsigmoid",
}
# Steps that change nothing but the shape, where one value a sample and channel goes in and comes out.
_RESHAPES: set[Any] = {"view", "reshape", "flatten", "squeeze", "unsqueeze", "contiguous"}
_RESHAPES |= {torch.flatten, torch.reshape, torch.squeeze, torch.unsqueeze}
_EXPANDS = {"expand", "expand_as"}
_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_LINEAR = ("input", "weight", "bias")


@dataclass(frozen=True, slots=True)
class _Block:
    """`nodes` lead from the pool to the product, which is the last."""

    nodes: tuple[fx.Node, ...]
    x: fx.Node
    w1: fx.Node
    b1: fx.Node | None
    w2: fx.Node
    b2: fx.Node | None
    activation: str
    gate: str


class _Chain:
    """Walks from a node towards its first argument and keeps the nodes passed, each with one user."""

    def __init__(self, node: fx.Node) -> None:
        self.at, self.passed = node, []  # type: tuple[fx.Node, list[fx.Node]]

    def step(self) -> None:
        self.passed.append(self.at)
        before = match.operand(self.at)
        if isinstance(before, fx.Node):
            self.at = before

    def skip(self, targets: set[Any]) -> None:
        while self.at.op in ("call_function", "call_method") and self._moves(targets) and self._single():
            self.step()

    def _moves(self, targets: set[Any]) -> bool:
        return self.at.target in targets or (targets is _RESHAPES and _unsqueezes(self.at))

    def _single(self) -> bool:
        return len(self.at.users) == 1


def _unsqueezes(node: fx.Node) -> bool:
    """Whether the node is `y[:, :, None, None]` or its like."""
    if node.target is not operator.getitem or not isinstance(node.args[1], tuple):
        return False
    return all(index in (None, slice(None), Ellipsis) for index in node.args[1])


def _weights(node: fx.Node) -> tuple[fx.Node, fx.Node | None] | None:
    """Weight and bias of a linear layer, or of a convolution that is one on a single pixel."""
    if node.target is F.linear:
        given = match.bound(node, _LINEAR, {"bias": None})
    elif node.target in (F.conv2d, torch.conv2d):
        given = match.bound(node, _CONVOLUTION, {"bias": None, "padding": 0, "groups": 1})
        weight = match.value(given["weight"])
        if weight is None or tuple(weight.shape[2:]) != (1, 1) or given["groups"] != 1:
            return None
        if given["padding"] not in (0, (0, 0), [0, 0], "valid", "same"):
            return None
    else:
        return None
    bias = given["bias"]
    if not isinstance(given["weight"], fx.Node) or not (bias is None or isinstance(bias, fx.Node)):
        return None
    return given["weight"], bias


def _pooled(node: fx.Node) -> fx.Node | None:
    """What the node is the mean over all pixels of, with these in two dimensions or in one."""
    found: Any = None
    if node.target is F.adaptive_avg_pool2d:
        given = match.bound(node, ("input", "output_size"), {})
        found = given["input"] if given.get("output_size") in (1, (1, 1), [1, 1]) else None
    elif (pooling := avg_pool_window(node)) is not None and not isinstance(pooling, str):
        x, window, _, divisor = pooling
        found = x if divisor is None and is_whole(window, x) else None
    elif (taken := match.mean(node)) is not None:
        whole = match.value(taken[0])
        pixels = {4: [2, 3], 3: [2]}.get(0 if whole is None else whole.dim())
        found = taken[0] if taken[1] == pixels else None
    return found if isinstance(found, fx.Node) else None


def _in_one_dimension(node: fx.Node, x: fx.Node) -> bool:
    """Whether the node is `x` with its pixels in one dimension: `x.view(n, c, -1)`."""
    image, line = match.value(x), match.value(node)
    if node.target not in _RESHAPES or match.operand(node) is not x or image is None or line is None:
        return False
    return tuple(line.shape) == (*image.shape[:2], math.prod(image.shape[2:]))


def _block(product: fx.Node) -> _Block | str | None:
    """The squeeze-and-excite that ends in this product; why one that is there is left alone; None where there is none."""
    both = match.operands(product, _PRODUCT)
    for x, scale in (both, both[::-1]) if both is not None else ():
        if isinstance(x, fx.Node) and isinstance(scale, fx.Node) and x is not scale:
            found = _behind(product, x, scale)
            if found is not None:
                return found
    return None


def _behind(product: fx.Node, x: fx.Node, scale: fx.Node) -> _Block | str | None:
    chain = _Chain(scale)
    chain.skip(_EXPANDS)
    factor = chain.at
    chain.skip(_RESHAPES)
    gate = _GATES.get(chain.at.target)
    if gate is None:
        return None
    chain.step()
    chain.skip(_RESHAPES)
    second = _weights(chain.at)
    if second is None:
        return None
    chain.step()
    chain.skip(_RESHAPES)
    activation = match.activation(chain.at)
    if activation is None:
        return None
    chain.step()
    chain.skip(_RESHAPES)
    first = _weights(chain.at)
    if first is None:
        return None
    # From here on it is one, whatever becomes of it.
    chain.step()
    chain.skip(_RESHAPES)
    pooled = _pooled(chain.at)
    chain.step()
    if pooled is not None and pooled is not x and _in_one_dimension(pooled, x):
        chain.step()
        pooled = x
    if pooled is not x:
        return "it does not pool what it scales"
    if not match.recorded_alike(*chain.passed, product):
        return "a part of it runs without gradients"
    if any(match.only_user(node) is None for node in chain.passed):
        return "something else uses a part of it"
    if not _a_channel(factor, x):
        return "its gate is no factor a sample and channel"
    return _Block((*chain.passed[::-1], product), x, first[0], first[1], second[0], second[1], activation[0], gate)


def _a_channel(factor: fx.Node, x: fx.Node) -> bool:
    """Whether one factor belongs to each sample and channel: [N, C, 1, 1] beside [N, C, H, W]."""
    small, whole = match.value(factor), match.value(x)
    return small is not None and whole is not None and tuple(small.shape) == (*whole.shape[:2], 1, 1)


def _refusal(block: _Block, *, compiled: bool) -> str:
    """Why the kernels cannot take this block; empty when they can."""
    x, result = match.value(block.x), match.value(block.nodes[-1])
    w1, w2 = match.value(block.w1), match.value(block.w2)
    if x is None or result is None or w1 is None or w2 is None:
        return "its tensors are not known"
    shape = match.static_shape(x)
    if shape is None:
        return "shape is dynamic"
    if len(shape) != 4:
        return f"{len(shape)}-D input"
    if result.shape != x.shape or result.dtype != x.dtype:
        return "the product has another shape or dtype than its input"
    hidden = w1.shape[0]
    if w1.numel() != hidden * shape[1] or w2.numel() != hidden * shape[1] or w2.shape[0] != shape[1]:
        return "its weights do not lead from the channels and back"
    if not match.read_later(block.x, block.nodes[0]):
        return "its input is changed in place elsewhere"
    parameters = [match.value(p) for p in (block.w1, block.b1, block.w2, block.b2) if p is not None]
    dtype = match.dtype_name(x)
    reason = spec.unsupported(
        shape=shape,
        # A compiled graph would copy; run eagerly, the operation looks for itself at each call.
        channels_last=not compiled or x.is_contiguous(memory_format=torch.channels_last),
        hidden=hidden,
        dtype=dtype,
        parameters=tuple("unknown type" if p is None else match.dtype_name(p) for p in parameters),
        activation=block.activation,
        gate=block.gate,
        arch=storage.MIN_ARCH,
    )
    wins = spec.wins(channels=shape[1], hidden=hidden, activation=block.activation, gate=block.gate, dtype=dtype)
    return dispatch.refusal(reason, wins)


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in for every squeeze-and-excite; `report` gains one entry a block.

    With `compiled` the graph goes on to Inductor, which needs the torch.library operation; else the thin eager function is
    called.
    """
    graph = graph_module.graph
    # Places are named before any of them is rewritten: a name says whether its module makes the call more than once.
    products = [node for node in graph.nodes if match.operands(node, _PRODUCT) is not None]
    for node, path in [(node, match.path(node)) for node in products]:
        block = _block(node)
        if block is None:
            continue
        reason = block if isinstance(block, str) else _refusal(block, compiled=compiled)
        if isinstance(block, str) or reason:
            report.unmatched[path] = reason
            continue
        arguments = (block.x, block.w1, block.b1, block.w2, block.b2, block.activation, block.gate)
        with graph.inserting_before(node):
            if compiled:
                call = graph.call_function(torch.ops.advisor.squeeze_excite.default, arguments)
                fused = graph.call_function(operator.getitem, (call, 0))
            else:
                fused = graph.call_function(api.squeeze_excite, arguments)
        match.replace(node, fused, block.nodes[-2::-1])
        report.matched[path] = spec.name(block.activation, block.gate)
