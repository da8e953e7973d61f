from __future__ import annotations

import torch

from advisor.profiling.compiles import compiled_code_in_use, compiled_graphs, graph_breaks


def test_nothing_is_known_where_nothing_is_compiled() -> None:
    assert (compiled_graphs(), compiled_code_in_use(), graph_breaks()) == (0, False, None)


def test_graphs_and_recompilations_are_counted() -> None:
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    double(torch.zeros(2))
    assert (compiled_graphs(), compiled_code_in_use(), graph_breaks()) == (1, True, 0.0)
    double(torch.zeros(2))
    assert compiled_graphs() == 1
    double(torch.zeros(3))
    assert compiled_graphs() == 2
    assert graph_breaks() == 0.0


def test_breaks_are_told_per_function_that_was_compiled() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        x = x * 2
        torch._dynamo.graph_break()
        return x - 1

    torch.compile(broken, backend="eager")(torch.zeros(2))
    assert graph_breaks() == 2.0
    torch.compile(lambda x: x + 3, backend="eager")(torch.zeros(2))
    assert graph_breaks() == 1.0
