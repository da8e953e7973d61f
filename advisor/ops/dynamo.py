"""The Dynamo backend that runs the kernel families' rewrites over a captured graph.

What they share to read it is in match.py. A rewrite that fails leaves the graph as it was: the user's training goes on without it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from torch import fx

from advisor.ops import (
    catalog,
    concatenation,
    consumers,
    dimensions,
    match,
    plain_graph,
    recomputation,
    weight_casts,
)
from advisor.ops.sites import install


def _rewrite_or_leave(
    rewrite: Callable[..., None], graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool
) -> None:
    """Run one family's rewrite. When it raises, or leaves a graph that does not hold together, the graph is as it was."""
    before, matched = copy.deepcopy(graph_module.graph), dict(report.matched)
    try:
        rewrite(graph_module, report, compiled=compiled)
        graph_module.graph.lint()
    except Exception as error:  # the user's training goes on without this family
        graph_module.graph = before
        report.matched = matched
        report.unmatched[f"graph {report.graphs}"] = f"the rewrite failed: {type(error).__name__}: {error}"


def twin(graph_module: fx.GraphModule) -> fx.GraphModule:
    """The same graph once more, over the same tensors: rewrites of one leave the other as it is, bodies of checkpoints included."""
    found = fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph))
    found.meta = dict(graph_module.meta)
    for name, child in graph_module.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(found, name, twin(child))
    return found


def backend(
    reports: Mapping[str, match.MatchReport], *, mode: str | None, instead: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """A Dynamo backend that puts in the operations of the families named in `reports`, in the catalog's order.

    After them, where it is named, `weight_casts`: it takes the weights that no family's operation reads as they are.

    `mode` None runs the (rewritten) graph eagerly; else it is torch.compile's mode for Inductor. `instead` is given the graph and its
    inputs in Inductor's place, and returns what runs.
    """
    families = [family for family in catalog.FAMILIES if family.id in reports]
    rewrites = [(family.rewrite, reports[family.id]) for family in families]
    if weight_casts.ID in reports:
        rewrites.append((weight_casts.rewrite, reports[weight_casts.ID]))
    finishes = [(finish, reports[family.id]) for family in families if (finish := family.finish) is not None]

    def compile_graph(graph_module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        for _, report in rewrites:
            report.graphs += 1
        parts = [graph_module]
        for node, body in recomputation.bodies(graph_module):
            reason = recomputation.left_alone(body, compiled=mode is not None)
            if not reason:
                parts.append(body)
            for family in families if reason else ():
                reports[family.id].unmatched[match.path(node)] = reason
        for part in parts if families else ():
            plain_graph.without_idle_dropouts(part.graph)
            plain_graph.after_changes(part.graph)
            consumers.without_idle_casts(part.graph)
            plain_graph.written_out_silu(part.graph)
            dimensions.as_images(part.graph)
        for rewrite, report in (*rewrites, *finishes):
            for part in parts if rewrite is not weight_casts.rewrite else parts[:1]:
                _rewrite_or_leave(rewrite, part, report, compiled=mode is not None)
        if mode is None:
            for part in parts if families else ():
                concatenation.keep_nhwc(part.graph)
            for part in parts:
                install.install(part.graph)
            recomputation.as_written(graph_module)  # which compiles the checkpoints' bodies anew
        if rewrites or mode is None:
            graph_module.recompile()
        if mode is None:
            forward: Callable[..., Any] = graph_module.forward
            return forward
        if instead is not None:
            return cast(Callable[..., Any], instead(graph_module, inputs))
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        compiled: Any = compile_fx(
            graph_module, list(inputs), config_patches=list_mode_options(mode) if mode != "default" else None
        )
        return cast(Callable[..., Any], compiled)

    return compile_graph
