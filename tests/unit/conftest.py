"""What tests of several parts have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import distributed


@pytest.fixture
def process_group() -> Iterator[None]:
    """A process group of this process alone, over gloo."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
