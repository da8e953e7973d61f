"""A batch norm's statistics from the kernel that made its input, in place of a pass that reads it.

A producer is a family's function whose kernels can leave, beside a result [N, C, H, W], its moments: [parts, 3, C] fp32, of each
part of the result's pixels and each channel how many values, their mean, and the sum of squares of their distances from it, of the
values as they are stored (kernels/include/moments.cuh). It gives None in their place where PyTorch's own operation ran. A consumer
is a batch norm's function with an argument `moments`: with None it reads the tensor itself.

In a family's rewrite.py `PRODUCES` names its producers, by the function that stands in the graph without moments, and `CONSUMES`
its consumers; consumers pair the two in `finish`, once every family has put in what it has. Not so for Inductor's graphs, whose
operations leave no moments.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from advisor.ops import catalog, dispatch, match
from advisor.ops.family import Producer


def pair(graph: fx.Graph, consumers: Mapping[Any, Callable[[fx.Node], str]]) -> None:
    """Every batch norm of `consumers` behind a producer takes that one's moments, where both sides win by it.

    `consumers`: a norm's function → of its node, why it has no use for moments; empty where it has.
    """
    producers: dict[Any, Producer] = {}
    for family in catalog.FAMILIES:
        producers |= family.produces
    producing = {producer.function for producer in producers.values()}
    for norm in list(graph.nodes):
        if norm.op != "call_function" or norm.target not in consumers:
            continue
        x = norm.args[0]
        if not isinstance(x, fx.Node) or consumers[norm.target](norm):
            continue
        if x.target is operator.getitem and isinstance(x.args[0], fx.Node) and x.args[0].target in producing:
            parts = _second(x.args[0])  # for another norm over the same tensor
        elif x.op == "call_function" and x.target in producers:
            producer = producers[x.target]
            if dispatch.refusal("", producer.wins(x)) or match.changed_in_place(x):
                continue
            parts = _leaving(x, producer)
        else:
            continue
        norm.update_kwarg("moments", parts)


def _leaving(plain: fx.Node, producer: Producer) -> fx.Node:
    """The producer in the place of its plain function; the node of its moments."""
    graph = plain.graph
    with graph.inserting_before(plain):
        both = graph.call_function(producer.function, plain.args, plain.kwargs)
        result, parts = match.results(both, 2)
    match.replace(plain, result)
    return parts


def _second(both: fx.Node) -> fx.Node:
    return next(user for user in both.users if user.args[1] == 1)
