from __future__ import annotations

import torch
from torch import nn

from advisor.core.profile import Site
from advisor.loop.compiles import (
    Compilations,
    compiled_code_in_use,
    compiled_graphs,
    graph_breaks,
    inside_compiled_call,
    is_compiled,
    together,
)


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


def test_what_was_compiled_is_told_with_its_line_its_reason_and_its_time() -> None:
    def dice(x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()

    compiled = torch.compile(dice, backend="eager", dynamic=False)
    compiled(torch.zeros(2))
    since = Compilations()
    compiled(torch.zeros(3))
    (site,) = since.compiled()
    line = dice.__code__.co_firstlineno
    assert site.source.endswith(f"test_compiles.py:{line}")
    assert site.what.startswith("compilation of dice: ")
    assert "size mismatch" in site.what
    assert site.time_us > 0
    assert Compilations().compiled() == ()


def test_compilations_of_one_place_are_put_together_for_a_step() -> None:
    one = Site(source="a.py:1", what="compilation of f", calls=1, time_us=300.0)
    other = Site(source="b.py:1", what="compilation of g", calls=2, time_us=60.0)
    assert together([one, other, one], 4) == (
        Site(source="a.py:1", what="compilation of f", calls=0.5, time_us=150.0),
        Site(source="b.py:1", what="compilation of g", calls=0.5, time_us=15.0),
    )
    assert together([one], 0) == ()


def test_a_compiled_forward_is_compiled_however_it_came_about() -> None:
    class Decorated(nn.Module):
        @torch.compile(backend="eager")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    class Kept(nn.Module):
        @torch._dynamo.disable
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assigned, wrapped, in_place = nn.Linear(2, 2), torch.compile(nn.Linear(2, 2)), nn.Linear(2, 2)
    assigned.forward = torch.compile(assigned.forward, backend="eager")
    in_place.compile(backend="eager")
    assert [is_compiled(m) for m in (Decorated(), assigned, wrapped, in_place)] == [True] * 4
    assert [is_compiled(m) for m in (Kept(), nn.Linear(2, 2))] == [False] * 2


def test_inside_a_compiled_call_is_told_from_outside_and_from_where_dynamo_keeps_out() -> None:
    seen = []

    @torch._dynamo.disable
    def look() -> None:
        seen.append(inside_compiled_call())

    def outer(x: torch.Tensor) -> torch.Tensor:
        look()
        return x + 1

    look()
    torch.compile(outer, backend="eager")(torch.zeros(2))
    outer(torch.zeros(2))
    assert seen == [False, True, False]
