"""What tests/conftest.py promises each test."""

from __future__ import annotations

import random
import zlib

import pytest
import torch


@pytest.mark.parametrize("turn", [1, 2])
def test_a_test_draws_the_same_numbers_in_any_order(request: pytest.FixtureRequest, turn: int) -> None:
    seed = zlib.crc32(request.node.nodeid.encode())
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(seed)))
    assert random.random() == random.Random(seed).random()
    torch.rand(turn)  # more than another test has drawn
