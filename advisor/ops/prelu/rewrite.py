"""Finds PReLU with a slope a channel in a captured graph."""

from __future__ import annotations

import torch
from torch import fx
from torch.nn import functional as F

from advisor.ops import consumers, dispatch, dispatch_table, match, storage
from advisor.ops.prelu import api, spec

_TARGETS = (F.prelu, torch.prelu)


def _refused(node: fx.Node) -> str:
    x, weight, result = match.value(node.args[0]), match.value(node.args[1]), match.value(node)
    shape = None if x is None else match.static_shape(x)
    if x is None or weight is None or result is None or shape is None or len(node.args) != 2:
        return "its shape is not known"
    if tuple(weight.shape) != shape[1:2]:
        return "one slope for all channels"
    if x.dtype != result.dtype and consumers.taken_as(node) != x.dtype:
        return "its result is taken in another dtype"
    reason = spec.TENSORS.refusal(shape=shape, channels_last=True, dtype=match.dtype_name(x), arch=storage.MIN_ARCH)
    return dispatch.refusal(reason, spec.wins(match.dtype_name(x)))


def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
    """Put the operation in for each PReLU. `report` gains one entry each."""
    if not dispatch_table.read()["prelu"].taken and not dispatch.forced():
        return  # nothing is dispatched: nothing to look for
    graph = graph_module.graph
    calls = {node: match.path(node) for node in graph.nodes if node.op == "call_function" and node.target in _TARGETS}
    for node, path in calls.items():
        reason = "left to Inductor" if compiled else _refused(node)
        if reason:
            report.unmatched[path] = reason
            continue
        given = match.value(node.args[0])
        with graph.inserting_before(node):
            call = graph.call_function(api.prelu, (node.args[0], node.args[1]))
        match.replace(node, call)
        if given is not None:
            consumers.store_as(call, given.dtype)
        report.matched[path] = "prelu"
