"""What every change is: it is put on right behind `import cupy`, and taken back."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from advisor.core import transform_table
from advisor.loop.patches import Patches


class Unfit(Exception):
    """Why a change does not fit this process."""


class Change(ABC):
    """One change; an instance is one that is on."""

    id: ClassVar[str]

    @abstractmethod
    def apply(self, module: Any, patches: Patches) -> None:
        """Switch it on; `patches` takes it back.

        Raises:
            Unfit: it cannot be on here.
        """

    def effect(self) -> str:
        """What it has done so far, as people read it; "" for nothing."""
        return ""

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Inside, calls of CuPy's are advisor's own."""
        yield

    @property
    def working(self) -> bool:
        """Whether calls of CuPy's are its own right now, and none of the loop's."""
        return False

    @property
    def settling(self) -> bool:
        """Whether it still finds out what it has to do."""
        return False

    @property
    def title(self) -> str:
        """What people call it."""
        return transform_table.title(self.id)
