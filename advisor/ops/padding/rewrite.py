"""Finds padding with an image's own values in a captured graph."""

from __future__ import annotations

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import dispatch, match, storage
from advisor.ops.padding import api, spec

_FUNCTIONS = (F.pad, torch._C._nn.pad)


def _refused(node: fx.Node) -> tuple[fx.Node, spec.Amounts, str] | str:
    """Input, amounts and mode of the call; or why it is left alone, "" where it pads with a constant."""
    given = match.bound(node, ("input", "pad", "mode", "value"), {"mode": "constant", "value": None})
    mode, amounts = str(given["mode"]), given.get("pad")
    if mode == "constant":
        return ""
    x = match.value(given.get("input"))
    shape = None if x is None else match.static_shape(x)
    if x is None or shape is None:
        return "its shape is not known"
    if not isinstance(amounts, (tuple, list)) or not all(type(a) is int for a in amounts):
        return "amounts are dynamic"
    reason = spec.unsupported(
        shape=shape,
        amounts=tuple(amounts),
        mode=mode,
        channels_last=True,
        dtype=match.dtype_name(x),
        arch=storage.MIN_ARCH,
    )
    refused = dispatch.refusal(reason, spec.wins(mode, match.dtype_name(x)))
    return refused or (given["input"], (amounts[0], amounts[1], amounts[2], amounts[3]), mode)


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in for each such padding. With `compiled` the graph goes on to Inductor, which needs the torch.library operation."""
    graph = graph_module.graph
    calls = {node: match.path(node) for node in graph.nodes if node.target in _FUNCTIONS}
    for node, path in calls.items():
        found = _refused(node)
        if isinstance(found, str):
            if found:
                report.unmatched[path] = found
            continue
        x, amounts, mode = found
        with graph.inserting_before(node):
            call = (
                graph.call_function(torch.ops.advisor.pad2d.default, (x, list(amounts), mode))
                if compiled
                else graph.call_function(api.pad2d, (x, amounts, mode))
            )
        match.replace(node, call)
        report.matched[path] = mode
