"""How a second, shorter run is ordered from what the first has seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.core.profile import StepProfile
from advisor.loop.records import STEPS_FILE, StepsRecord
from advisor.loop.session import Session
from advisor.loop.waiting import OTHERS_WORKED, WaitStage
from advisor.pipeline.profiling import check_measured, nothing_measured, shorter_session
from advisor.profiling.beside.launcher import Exit
from advisor.profiling.inside.driver import MIN_WARMUP


def ordered(folder: Path, **record: object) -> Session | None:
    storage.save(folder / STEPS_FILE, StepsRecord(**{"kind": "optimizer", **record}))
    return shorter_session(Session(mode="profile", run_dir=str(folder), script="train.py"), 0)


@pytest.mark.parametrize("seen", range(4, 40))
def test_warm_up_timed_and_traced_steps_fit_into_those_there_are(tmp_path: Path, seen: int) -> None:
    again = ordered(tmp_path, steps_seen=seen)
    assert again is not None
    assert again.brief
    assert (again.warmup < MIN_WARMUP) == (seen < 8)
    assert min(again.warmup, again.steps, again.detail_steps) >= 1
    assert again.warmup + again.steps + again.detail_steps + 1 <= seen  # 1: the profiler's start


def test_three_steps_are_too_few_for_a_trace(tmp_path: Path) -> None:
    assert ordered(tmp_path, steps_seen=3) is None


def test_model_calls_are_the_steps_of_a_script_that_trains_nothing(tmp_path: Path) -> None:
    again = ordered(tmp_path, kind="none", forward_steps=40)
    assert again is not None
    assert (again.infers, again.warmup, again.steps) == (True, 9, 20)
    few = ordered(tmp_path, kind="none", forward_steps=5)
    assert few is not None
    assert (few.infers, few.warmup, few.steps) == (True, 1, 1)
    assert ordered(tmp_path, kind="none") is None


def test_a_complete_run_is_not_repeated(tmp_path: Path) -> None:
    assert ordered(tmp_path, steps_seen=40, complete=True) is None


def test_a_run_that_was_ended_for_want_of_steps_says_why_first() -> None:
    off, stepless = Exit(code=143, fault="KeyError: 1"), Exit(code=143, gave_up="the script has not imported torch")
    with pytest.raises(AdvisorError, match="advisor switched itself off in the script: KeyError: 1") as caught:
        check_measured(off, thrown_away=True)
    assert caught.value.exit_code == 3
    check_measured(off, thrown_away=False)  # the user's own training has gone on to its end
    with pytest.raises(AdvisorError, match="the script has not imported torch") as caught:
        check_measured(stepless, thrown_away=True)
    assert caught.value.exit_code == 4


def test_why_nothing_was_measured_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = StepProfile(
        script="t.py", argv=(), created="", environment=Environment(), step_kind="none", step_us=None, wall_us=None
    )
    monkeypatch.delenv("ADVISOR_DISABLE", raising=False)
    for ended, told in (
        (Exit(code=0), "no training step was seen"),
        (Exit(code=137, signal=9), "the script was ended by SIGKILL; the machine may have run out of memory, before"),
        (Exit(code=0, reached=WaitStage.PYTHON), "nothing was measured: the script has imported neither torch"),
        (Exit(code=0, fault="KeyError: 1"), "advisor switched itself off in the script, which went on: KeyError: 1"),
    ):
        assert nothing_measured(empty, ended).startswith(told)
    elsewhere = replace(empty, notes=(OTHERS_WORKED,))
    assert "joined no process group" in nothing_measured(elsewhere, Exit(code=0))
    monkeypatch.setenv("ADVISOR_DISABLE", "1")
    assert (
        nothing_measured(empty, Exit(code=0))
        == "ADVISOR_DISABLE is set: the script ran by itself, and nothing was measured"
    )
