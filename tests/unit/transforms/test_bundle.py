"""Several transforms as one: all of them or none, and each answers for itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from loops import check_undo_is_exact, twins

from advisor.core.findings import Semantics
from advisor.core.verdict import Check
from advisor.ops import weight_casts
from advisor.transforms import capture, registry
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.bundle import Bundle


class Member(Transform):
    semantics = Semantics.EXACT

    def __init__(self, name, log, *, semantics=Semantics.EXACT, applies=True, effect=True, raises=False):
        self.id = name
        self.semantics, self.traced = semantics, False
        self.log, self.applies, self.passed, self.raises = log, applies, effect, raises

    def match(self, training, parameters):
        return Match(applies=self.applies, reason="" if self.applies else "not here", sites=(f"{self.id}.site",))

    def apply(self, training, parameters):
        if self.raises:
            raise RuntimeError("no")
        self.log.append(f"{self.id} on")
        undo = Undo()
        undo.push(lambda: self.log.append(f"{self.id} off"))
        return undo

    def release(self, training):
        self.log.append(f"{self.id} released")

    def effect(self, training, before, after):
        return Check(passed=self.passed, detail=f"of {self.id}")


def test_members_go_on_in_order_and_off_in_the_other(declare: Callable[..., None]) -> None:
    declare("a")
    declare("b")
    log: list[str] = []
    bundle = Bundle("a + b", [Member("a", log), Member("b", log, semantics=Semantics.REASSOCIATED)])
    assert (bundle.id, bundle.title, bundle.semantics) == ("a + b", "a and b", Semantics.REASSOCIATED)
    assert bundle.live
    assert not bundle.traced
    assert bundle.match(None, {}).sites == ("a.site", "b.site")
    undo = bundle.apply(None, {})
    undo.run()
    bundle.release(None)
    assert log == ["a on", "b on", "b off", "a off", "a released", "b released"]
    assert bundle.effect(None, None, None) == Check(passed=True, detail="a: of a; b: of b")


def test_one_that_fails_fails_for_all_and_leaves_nothing_on(declare: Callable[..., None]) -> None:
    declare("a")
    declare("b")
    log: list[str] = []
    bundle = Bundle(
        "a + b", [Member("a", log, effect=None), Member("b", log, applies=False, effect=False, raises=True)]
    )
    assert not bundle.match(None, {}).applies
    assert bundle.match(None, {}).reason == "b: not here"
    with pytest.raises(RuntimeError):
        bundle.apply(None, {})
    assert log == ["a on", "a off"]


def test_an_effect_of_any_member_is_one() -> None:
    def effect(*members: bool | None) -> Check:
        return Bundle("x", [Member(str(i), [], effect=m) for i, m in enumerate(members)]).effect(None, None, None)

    assert effect(False, True) == Check(passed=True, detail="0: of 0; 1: of 1")
    assert effect(False, None).passed is None
    assert effect(False, False).passed is False


@pytest.fixture
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh")
def test_kernel_families_share_one_capture_and_leave_nothing() -> None:
    loop, plain = twins()
    bundle = Bundle("both", [registry.get("fused_bn_act"), registry.get("fused_casts")])
    undo = bundle.apply(loop.training, {})
    assert capture.current(loop.model).families == {"batchnorm_act", weight_casts.ID}
    undo.run()
    assert capture.current(loop.model) is None
    check_undo_is_exact(bundle, loop, plain)
