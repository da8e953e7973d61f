"""The casts of a graph's weights to half precision in a few multi-tensor launches, in place of one for each weight.

Under autocast every convolution and linear layer casts its fp32 weight with a kernel of its own, and its gradient back with
another: 2 x 54 launches a step for ResNet-50, most of them shorter than a launch. Here the graph casts all of them in one
(ops/casts), and the gradients back the same way.
Bit-equal to autocast: one rounding to nearest even forward, none backward. Copies have the strides of what they copy, so
filters stay channels_last.

A weight is taken where it is an fp32 leaf that needs a gradient and autocast casts it for one operation. A second use, cast
or not, is left to autocast: what its cache does with the sum of both gradients depends on the region around it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator

import torch
from torch import fx

from advisor.ops import consumers, dispatch, match, nvrtc, storage
from advisor.ops.casts import api as casts
from advisor.ops.pointwise.api import pointwise_conv2d

ID = "weight_casts"
# Elements of one group. Its gradients wait for each other, so this bounds the memory that waits: 2 + 4 bytes an element, 96 MiB.
GROUP_ELEMENTS = 1 << 24

# What casts its weights: PyTorch's own, and an operation of ours whose backward is PyTorch's.
_LOWERED = {*consumers.LOWERED, pointwise_conv2d}

engaged, fell_back = dispatch.counters(ID)


def cast_weights(dtype: torch.dtype, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies of `weights` in `dtype`, with their strides, differentiable to any order.

    Args:
        dtype: fp16 or bf16.
        weights: fp32 leaves on one device.
    """
    reason = nvrtc.transformed()
    if reason:
        fell_back[reason] += 1
        return tuple(weight.to(dtype) for weight in weights)
    engaged[f"{len(weights)} weights"] += 1
    # An operation inside no_grad or inference mode ignores the graph; one outside must find it.
    with torch.inference_mode(False), torch.enable_grad():
        return casts.cast(dtype, *weights)


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Cast the graph's weights in groups, each before the first operation that needs one of it."""
    if compiled:
        report.unmatched["graph"] = "Inductor fuses casts itself"
        return
    taken: dict[tuple[torch.dtype, torch.device], list[tuple[fx.Node, fx.Node]]] = {}
    for node in graph_module.graph.nodes:
        dtype = _computed_in(node)
        if dtype is None:
            continue
        for weight in _parameters(node):
            found = match.value(weight)
            if found is None or found.dtype != torch.float32:
                continue
            why_not = refused(weight, found)
            place = f"{match.path(node)} {list(found.shape)}"
            if why_not:
                report.unmatched[place] = why_not
            else:
                report.matched[place] = f"cast to {storage.name(dtype)}"
                taken.setdefault((dtype, found.device), []).append((weight, node))
    for (dtype, _), weights in taken.items():
        for group in _groups(weights):
            _cast(graph_module.graph, dtype, group)


def _computed_in(node: fx.Node) -> torch.dtype | None:
    """The half precision in which autocast runs this convolution or product; None for any other node."""
    result = match.value(node)
    lowered = node.op == "call_function" and node.target in _LOWERED and result is not None
    return result.dtype if lowered and result is not None and result.dtype in consumers.HALF else None


def _parameters(node: fx.Node) -> list[fx.Node]:
    """Weight and bias of a convolution or product."""
    given = match.operand(node)
    return [argument for argument in node.all_input_nodes if argument is not given]


def refused(weight: fx.Node, found: torch.Tensor) -> str:
    if weight.op not in ("placeholder", "get_attr") or not found.is_leaf:
        return "is computed in the graph"
    if not found.requires_grad:
        return "needs no gradient, and autocast keeps no cast of it"
    if len(weight.users) > 1:
        return f"{len(weight.users)} operations use it"
    return ""


def _groups(weights: Iterable[tuple[fx.Node, fx.Node]]) -> Iterator[list[tuple[fx.Node, fx.Node]]]:
    group: list[tuple[fx.Node, fx.Node]] = []
    elements = 0
    for weight, user in weights:
        found = match.value(weight)
        size = 0 if found is None else found.numel()
        if group and elements + size > GROUP_ELEMENTS:
            yield group
            group, elements = [], 0
        group.append((weight, user))
        elements += size
    if group:
        yield group


def _cast(graph: fx.Graph, dtype: torch.dtype, group: list[tuple[fx.Node, fx.Node]]) -> None:
    with graph.inserting_before(group[0][1]):
        copies = graph.call_function(cast_weights, (dtype, *(weight for weight, _ in group)))
        for place, (weight, user) in enumerate(group):
            copy = graph.call_function(operator.getitem, (copies, place))
            found = match.value(weight)
            copy.meta["example_value"] = None if found is None else found.to(dtype)
            user.replace_input_with(weight, copy)
