"""What the gate says where no step could be recorded for it to replay."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from advisor.loop.interval import BACKWARDS
from advisor.trials.live.step_to_replay import CAPTURE_TRIES, step_to_replay


def _captured(reasons: list[str], *, called: bool) -> str:
    gate = SimpleNamespace(arm=lambda guides: None, captured=lambda: called)
    course = step_to_replay(cast(Any, gate), guides=False)
    try:
        next(course)
        for reason in reasons:
            course.send(cast(Any, SimpleNamespace(reason=reason)))
    except StopIteration as end:
        return str(end.value)
    raise AssertionError("it waits for more steps")


@pytest.mark.parametrize(
    ("reasons", "called", "says"),
    [
        ([""], True, ""),
        ([BACKWARDS, ""], True, ""),
        ([BACKWARDS] * CAPTURE_TRIES, True, f"none like most others: the last had {BACKWARDS}"),
        ([""] * CAPTURE_TRIES, False, "no model call with gradients was seen to replay"),
    ],
)
def test_the_reason_is_the_one_that_holds(reasons: list[str], called: bool, says: str) -> None:
    said = _captured(reasons, called=called)
    assert said.endswith(says)
    assert bool(said) == bool(says)
