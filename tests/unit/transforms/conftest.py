from __future__ import annotations

import pytest

from advisor.core.environment import Environment
from advisor.core.profile import KernelRow, StepProfile
from advisor.transforms.base import Undo


@pytest.fixture
def profile():
    """`profile(*rows)`: a one-step trace with these kernel rows."""

    def make(*rows: KernelRow) -> StepProfile:
        return StepProfile(
            script="train.py",
            argv=(),
            created="",
            environment=Environment(),
            step_kind="optimizer",
            step_us=None,
            wall_us=None,
            kernels=rows,
            launches=sum(row.calls for row in rows),
        )

    return make


@pytest.fixture(autouse=True)
def _undo_what_the_test_applied(monkeypatch):
    """No patch survives its test."""
    applied: list[Undo] = []
    push = Undo.push

    def noting(self: Undo, step: object) -> None:
        if all(self is not other for other in applied):
            applied.append(self)
        push(self, step)

    monkeypatch.setattr(Undo, "push", noting)
    yield
    for undo in reversed(applied):
        undo.run()
