"""A transform by its id, as its row in `core/transform_table.py` names its class: imported, and torch with it, when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from advisor.core.errors import AdvisorError
from advisor.core.transform_table import row

if TYPE_CHECKING:
    from advisor.transforms.base import Transform


def get(identifier: str) -> Transform:
    """The transform with this id.

    Raises:
        AdvisorError: when there is none, or it is one of `advisor.cupy_loops`.
    """
    if row(identifier).cupy:
        raise AdvisorError(f"{identifier} is for loops of CuPy alone", expected="a change for loops of PyTorch's")
    module, _, name = row(identifier).code.partition(":")
    found = import_module(f"advisor.transforms.{module}")
    transform: Transform = getattr(found, name)() if name else found.get(identifier)
    return transform
