"""What is compared between processes is computed with whole fp32 products, whatever the script has set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from advisor.distributed.prints import WholeProducts
from advisor.transforms import tf32


@pytest.fixture
def allowed() -> Iterator[tuple[object, ...]]:
    """TF32 as a script allows it."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    yield tf32.settings()
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_no_tf32_from_the_first_call_on_until_the_end(allowed: tuple[object, ...]) -> None:
    net, whole = nn.Linear(2, 2), WholeProducts()
    assert tf32.settings() == allowed
    net(torch.ones(1, 2))
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
    whole.end()
    assert tf32.settings() == allowed
    net(torch.ones(1, 2))
    assert tf32.settings() == allowed


def test_where_no_module_was_called_nothing_is_set(allowed: tuple[object, ...]) -> None:
    WholeProducts().end()
    nn.Linear(2, 2)(torch.ones(1, 2))
    assert tf32.settings() == allowed
