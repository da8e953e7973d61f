"""The changes of a plan that are on in this process, and why others are not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from advisor.core.errors import first_line
from advisor.core.plan import PlanItem
from advisor.core.transform_table import ROWS
from advisor.cupy_loops.changes.base import Change, Unfit
from advisor.cupy_loops.changes.registry import CHANGES
from advisor.loop.patches import Patches


@dataclass(slots=True, eq=False)
class Standing:
    """Changes of CuPy's that are on; `undo` takes them off, last first."""

    module: Any
    on: list[tuple[Change, Patches]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)

    def put_on(self, items: Iterable[PlanItem]) -> None:
        """Put these on, in the order in which they have to be."""
        wanted = {item.transform for item in items}
        for name in wanted - set(CHANGES):
            self.left_out[name] = "it is for loops of PyTorch's"
        for name, make in CHANGES.items():
            if name not in wanted:
                continue
            change, patches = make(), Patches()
            try:
                change.apply(self.module, patches)
            except Unfit as error:
                patches.restore_all()
                self.left_out[name] = str(error)
            except Exception as error:
                patches.restore_all()
                self.left_out[name] = first_line(error)
            else:
                self.on.append((change, patches))

    @property
    def names(self) -> tuple[str, ...]:
        """Ids of what is on."""
        return tuple(change.id for change, _ in self.on)

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Inside, calls of CuPy's are advisor's own: no change takes them for the loop's."""
        with contextlib.ExitStack() as stack:
            for change, _ in self.on:
                stack.enter_context(change.unseen())
            yield

    @property
    def working(self) -> bool:
        """Whether a change makes calls of CuPy's right now that are none of the loop's."""
        return any(change.working for change, _ in self.on)

    @property
    def effects(self) -> dict[str, str]:
        """By id, what those have done so far, or why they do nothing."""
        return {change.id: told for change, _ in self.on if (told := change.effect())}

    @property
    def settling(self) -> bool:
        """Whether a change still finds out what it has to do: the loop's steps are not yet what they will be."""
        return any(change.settling for change, _ in self.on)

    def undo(self) -> None:
        """The process is as without them."""
        while self.on:
            self.on.pop()[1].restore_all()


def of_cupy(items: Iterable[PlanItem]) -> tuple[PlanItem, ...]:
    """Those of a plan's kept items that are for loops of CuPy alone."""
    return tuple(item for item in items if item.transform in ROWS and ROWS[item.transform].cupy)
