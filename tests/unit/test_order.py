"""The order of tests is of no account: what one has compiled, the next does not see."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from advisor.loop.compiles import compiled_graphs


@pytest.mark.parametrize("turn", ["first", "second"])
def test_nothing_is_compiled_when_a_test_begins(turn: str) -> None:
    assert compiled_graphs() == 0
    torch.compile(nn.Linear(1, 1), backend="eager")(torch.zeros(1, 1))
    assert compiled_graphs() > 0
