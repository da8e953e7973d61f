"""What holds for every test: none sees what an earlier one in the same process has compiled."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def dynamo_begins_anew() -> Iterator[None]:
    """Dynamo's counters and compiled code are the process's; advisor reads both to tell what a script does."""
    _forget_compiled_code()  # what a fixture of wider scope has compiled
    yield
    _forget_compiled_code()


def _forget_compiled_code() -> None:
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None or not any(utils.counters.values()):
        return
    import torch

    torch._dynamo.reset()
    utils.counters.clear()
