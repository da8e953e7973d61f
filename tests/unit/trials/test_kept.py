"""Kept changes are taken back, all of them, whatever one of them says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from advisor.core.plan import PlanItem
from advisor.transforms.base import Match, Undo
from advisor.trials.kept import KeptChanges


def changes(back: list[str]) -> KeptChanges:
    def change(name: str) -> SimpleNamespace:
        def take_back() -> None:
            back.append(name)
            if name == "stuck":
                raise ValueError("stuck")

        def apply(training: object, parameters: object) -> Undo:
            undo = Undo()
            undo.push(take_back)
            return undo

        return SimpleNamespace(id=name, title=name, live=True, match=lambda *_: Match(applies=True), apply=apply)

    names = ("first", "stuck", "last")
    return KeptChanges(None, [PlanItem(transform=name, status="kept") for name in names], change)


def test_one_that_cannot_be_taken_back_does_not_leave_the_others_on() -> None:
    back: list[str] = []
    kept = changes(back)
    assert kept.settle()
    assert [standing.transform.id for standing in kept.standing] == ["first", "stuck", "last"]
    with pytest.raises(ValueError, match="stuck"):
        kept.undo()
    assert back == ["last", "stuck", "first"]
    assert kept.standing == []
    kept.undo()
    assert len(back) == 3
