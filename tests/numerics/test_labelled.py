"""The labelled set is whole, and a small part of it is judged rightly; `python tests/numerics/labelled.py` judges all of it."""

from __future__ import annotations

from numerics import faults, labelled
from numerics.loops import Loop
from numerics.nets import KINDS


def test_what_is_right_passes_and_what_is_not_is_refused() -> None:
    records = list(labelled.judged("chosen", "classifier, plain", ("fresh",)))
    assert {r["is"] for r in records} == {"right", "fault"}
    assert [f"{r['is']}, {r['change']}: {r['detail']}" for r in records if labelled.wrong(r)] == []


def test_the_halves_share_no_training_and_hold_all() -> None:
    chosen, held = ({kind.name for _, kind in labelled.half(name)} for name in ("chosen", "held"))
    assert not chosen & held
    assert chosen | held == {kind.name for kind in KINDS}
    assert len(KINDS) >= 25


def test_each_training_has_faults_of_its_own() -> None:
    loop = Loop(KINDS[0], 0, seed=0)
    assert len({change.name for change in faults.changes(loop, 0)}) >= 4
