import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from searched_loop import Wrapped


@pytest.fixture(autouse=True)
def _rows(declare: Callable[..., None]) -> None:
    """The changes of these tests have rows, beside advisor's own."""
    for kind in _below(Wrapped):
        if hasattr(kind, "id"):
            declare(kind.id)


def _below(kind: type[Wrapped]) -> Iterator[type[Wrapped]]:
    for below in kind.__subclasses__():
        yield below
        yield from _below(below)
