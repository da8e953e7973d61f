"""Finds 3 x 3 convolutions of stride 1 in a captured graph, for the families that take some of them by their channels."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import fx

from advisor.ops import dispatch, match


def rewriting(
    spec: Any,
    dtypes: Callable[[], Collection[str]],
    function: Callable[..., Any],
    operation: Any,
    *,
    padded: bool = False,
) -> Callable[..., None]:
    """A family's `rewrite`.

    Args:
        spec: the family's, which knows the convolution by its channels: `SUPPORTS`, `name(inputs, outputs)`, `wins_between(inputs, outputs,
            dtype)`.
        dtypes: gives those of what is multiplied.
        function: of x and weight, for eager graphs; `operation` is torch.library's, for those that go on to Inductor.
        padded: both take the padding too.
    """

    def taken(node: fx.Node) -> match.Conv2d | str:
        """The convolution that the kernels take, or why it is left alone; "" where it is of another kind."""
        call = match.conv2d(node)
        if isinstance(call, str) or call.unsupported(spec.SUPPORTS):
            return ""
        if call.bias is not None:
            return "has a bias"
        result = match.value(node)
        if result is None:
            return "the result's dtype is not known"
        dtype, outputs = match.dtype_name(result), call.weight_shape[0]
        if dtype not in dtypes():
            return f"dtype {dtype}"
        wins = spec.wins_between(call.channels, outputs, dtype)
        return match.said_of(spec.name(call.channels, outputs), dispatch.refusal("", wins)) or call

    def rewrite(graph_module: fx.GraphModule, report: match.MatchReport, *, compiled: bool) -> None:
        """Put the operation in where the kernels take a convolution.

        With `compiled` the graph goes on to Inductor, which needs the torch.library operation; autocast's cast of the input, which
        is inside the convolution, is then written out before it. `report` gains one entry a convolution that the kernels know.
        """
        graph = graph_module.graph
        for node, call in match.convolutions(graph, report, taken):
            with graph.inserting_before(node):
                x = match.in_dtype_of(node, call.x) if compiled else call.x
                numbers = call.padding[:1] if padded else ()
                new = graph.call_function(operation if compiled else function, (x, call.weight, *numbers))
            report.matched[match.path(node)] = spec.name(call.channels, call.weight_shape[0])
            match.replace(node, new)

    return rewrite
