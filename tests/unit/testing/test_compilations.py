"""Dynamo's own lists, read since a moment; and whether compiled code ran."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from advisor.testing.compilations import Compilations, CompiledRuns


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_only_what_came_after_counts() -> None:
    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()
        return x * 2

    torch.compile(broken, backend="eager")(torch.ones(2))
    since = Compilations()
    assert not since.any
    assert since.breaks() == ()
    assert since.compiled() == ()
    torch.compile(lambda x: x * 3, backend="eager")(torch.ones(2))
    assert since.any
    assert since.breaks() == ()
    (site,) = since.compiled()
    assert "test_compilations.py" in site.source


def test_a_break_is_told_once_with_its_line() -> None:
    since = Compilations()

    def broken(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        torch._dynamo.graph_break()  # here
        return x * 2

    run = torch.compile(broken, backend="eager", dynamic=False)
    run(torch.ones(2))
    run(torch.ones(3))  # compiled anew, broken at the same line
    (site,) = since.breaks()
    line = next(i for i, text in enumerate(open(__file__, encoding="utf-8"), 1) if text.endswith("# here\n"))  # noqa: SIM115 – open on purpose
    assert site.source.endswith(f"test_compilations.py:{line}")
    assert "graph_break" in site.what


def test_compiled_code_is_told_from_code_that_dynamo_only_leaves_alone() -> None:
    run = torch.compile(lambda x: x * 2, backend="eager")
    run(torch.ones(2))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    with CompiledRuns() as plain:
        torch.ones(2) * 2
        optimizer.step()  # runs under a switch of Dynamo's that turns it off
    assert not plain.seen
    with CompiledRuns() as compiled:
        run(torch.ones(2))
    assert compiled.seen
    with CompiledRuns() as first:
        torch.compile(lambda x: x * 5, backend="eager")(torch.ones(2))
    assert first.seen


def test_the_switch_is_put_back_when_the_step_raises() -> None:
    frames = sys.modules["torch._dynamo.eval_frame"]
    plain = frames._maybe_set_eval_frame
    with pytest.raises(KeyboardInterrupt), CompiledRuns():
        raise KeyboardInterrupt
    assert frames._maybe_set_eval_frame is plain


def test_dynamo_is_never_loaded() -> None:
    code = (
        "import sys; from advisor.testing.compilations import *\n"
        "with CompiledRuns() as runs: pass\n"
        "c = Compilations(); print(c.any, c.breaks(), c.compiled(), runs.seen, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "()", "()", "False", "False"]
