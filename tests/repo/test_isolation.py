"""What tests/conftest.py promises each test."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("turn", [1, 2])
def test_a_test_draws_the_same_numbers_in_any_order(request: pytest.FixtureRequest, turn: int) -> None:
    seed = zlib.crc32(request.node.nodeid.encode())
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(seed)))
    assert random.random() == random.Random(seed).random()
    torch.rand(turn)  # more than another test has drawn


def test_no_two_test_files_have_one_name() -> None:
    """pytest imports them by name, so that of two only one is collected."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
