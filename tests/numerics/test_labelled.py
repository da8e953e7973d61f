"""The gate's word on the labelled set: a small part always, all of it where there is time (docs/numerics.md has the whole)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import torch

from advisor.core.findings import Semantics
from advisor.core.verdict import Check
from advisor.trials.numerics import gate
from numerics import faults, labelled, right
from numerics.loops import Change, Loop
from numerics.nets import KINDS


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def told(name: str, only: str, states: tuple[str, ...]) -> list[str]:
    records = list(labelled.judged(name, only, states))
    assert {r["is"] for r in records} == {"right", "fault"}
    return [f"{r['is']}, {r['state']}, {r['change']}: {r['detail']}" for r in records if labelled.wrong(r)]


def test_what_is_right_passes_and_what_is_not_is_refused() -> None:
    assert told("chosen", "classifier, plain", ("fresh",)) == []


def test_half_precision_of_a_deep_net_is_judged_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradients are turned away by bf16 alone, and a fault among them is seen where it is."""
    deep = next(kind for kind in KINDS if kind.name == "segmentation, atrous, deep")

    def judged(name: str = "") -> Check:
        loop = Loop(deep, 2)
        parts = next(change.parts for change in right.changes(loop) if change.name == "bf16")
        if name:
            where, make = faults.IN_LAYERS[name]
            module = where(loop)[-2]
            parts = (right.patched(module, lambda forward: make(module, forward)), *parts)
        return loop.judge(Change(name, parts, Semantics.PRECISION))

    check = judged()
    assert check.passed, check
    assert "right by itself" in check.detail
    for name in ("gradient of the input too large", "weight's gradient negated"):
        check = judged(name)
        assert check.passed is False, check
        assert "by itself" in check.detail
    monkeypatch.setattr(gate, "by_layers", lambda plain, finding, semantics, on, off: finding)
    assert judged().passed is False


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind.name for kind in KINDS])
def test_every_training(kind: str) -> None:
    """Of single trainings more may be told wrongly than of all: at most one right change in twenty, and no fault."""
    name = "chosen" if kind in labelled.CHOSEN else "held"
    wrong = told(name, kind, ("fresh",))
    assert [line for line in wrong if line.startswith("fault")] == []
    assert len(wrong) <= 1


def test_the_page_is_what_is_recorded() -> None:
    recorded = json.loads(labelled.RECORD.read_text(encoding="utf-8"))
    assert labelled.PAGE.read_text(encoding="utf-8") == labelled.page(recorded)
