"""What `apply` makes of a first profile, before anything is tried."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from advisor import pipeline, rules, runs
from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.core.findings import Finding, Findings, Outcome, Recommendation
from advisor.core.profile import ModelFacts, Spread, StepProfile
from advisor.loop.session import Session
from advisor.pipeline import applying, shared
from advisor.trials import in_ranks, planfile, search


def test_a_training_in_several_processes_is_searched_in_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one by itself each rank would decide for itself, and replay its step in collectives that the others are not in."""
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.chdir(tmp_path)
    profile = StepProfile(
        script="train.py", argv=(), created="", environment=Environment(device="cpu"), step_kind="optimizer",
        step_us=None, wall_us=None, model=ModelFacts(world_size=2),
    )  # fmt: skip
    measured = SimpleNamespace(
        profile=profile, findings=Findings(run="", findings=(), cards=(), recommendations=()), exit_code=0
    )
    monkeypatch.setattr(applying, "profile_script", lambda *_, **__: measured)
    searched: list[object] = []

    def begin(*given: object, **_: object) -> object:
        searched.append(given)
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "begin", begin)
    tried: list[object] = []

    def in_all(command: object, candidates: Sequence[Recommendation], *_: object, **__: object) -> in_ranks.Searched:
        tried.extend(candidate.transform for candidate in candidates)
        return in_ranks.Searched()

    monkeypatch.setattr(in_ranks, "search", in_all)
    said: list[str] = []
    result = pipeline.apply([str(script)], out=tmp_path / "run", say=said.append)
    assert result.profile is profile
    assert "ddp_buckets" in tried
    assert not searched
    with pytest.raises(AdvisorError, match="2 processes"):
        pipeline.apply([str(script)], ask=lambda *_: "yes", out=tmp_path / "asked", say=said.append)
    measured.profile = replace(profile, model=ModelFacts(), complete=True)
    with pytest.raises(KeyboardInterrupt):
        pipeline.apply([str(script)], out=tmp_path / "other", say=said.append)
    assert searched


def test_a_recommendation_is_called_after_what_it_does_and_says_what_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fired = Finding(rule="nchw", title="Convolutions run in NCHW layout", area="layout", severity="high", outcome=Outcome.FIRED,
                    message="They take 60 %.", transform="channels_last")  # fmt: skip
    monkeypatch.setattr(rules, "evaluate", lambda *_: (fired,))
    profile = StepProfile(
        script="train.py", argv=(), created="", environment=Environment(), step_kind="none", step_us=None, wall_us=None
    )
    found = shared.evaluate_run(profile, tmp_path)
    (recommended,), (card,) = found.recommendations, found.cards
    assert recommended.title == "channels_last (NHWC) memory layout"
    assert recommended.reason == "Convolutions run in NCHW layout. They take 60 %."
    assert (card.rule, card.transform) == ("nchw", "channels_last")


def test_a_plan_is_named_by_its_file_its_run_or_as_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdvisorError, match="no plan in advisor-runs/ here"):
        named(Path("last"))
    for age, name in enumerate(("newer", "older")):
        run = tmp_path / "advisor-runs" / name
        _plan_in(run, "kept", age)
    newest = tmp_path / "advisor-runs" / "newer" / "plan.yaml"
    assert named(Path("last")) == newest
    assert named(newest.parent) == newest
    _plan_in(tmp_path / "mine", "kept", age=3)
    assert named(Path("mine/plan.yaml")) == Path("mine/plan.yaml")


@pytest.mark.parametrize(
    ("of_the_newest", "last"),
    [
        ("kept", "newest"),
        ("reverted", "newest"),
        ("inconclusive", "proved"),
        ("unconfirmed", "proved"),
        ("declined", "proved"),
        ("skipped", "proved"),  # of what was interrupted before anything was tried
    ],
)
def test_a_search_that_was_left_open_takes_no_earlier_plans_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_the_newest: str, last: str
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "advisor-runs"
    _plan_in(runs / "newest", of_the_newest, age=0)
    assert named(Path("last")) == runs / "newest" / "plan.yaml"  # there is none other
    _plan_in(runs / "proved", "kept", age=1)
    assert named(Path("last")) == runs / last / "plan.yaml"


def test_the_last_plan_is_the_one_that_the_user_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """README: set a status in plan.yaml to skipped, then `advisor run train.py`. The run's own copy took its place."""
    monkeypatch.chdir(tmp_path)
    _plan_in(tmp_path / "advisor-runs" / "search", "kept", age=5)
    _plan_in(tmp_path, "skipped", age=0)
    found, plan = runs.find_plan(Path("last"), lambda known: True, "train.py")
    assert (found, plan.items[0].status) == (tmp_path / "plan.yaml", "skipped")
    _plan_in(tmp_path / "advisor-runs" / "later", "kept", age=-1)  # a search behind the edit
    assert runs.find_plan(Path("last"), lambda known: True, "train.py")[0].parent.name == "later"


def test_a_committed_plan_needs_no_run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _plan_in(tmp_path, "kept", age=0)
    assert named(Path("last")) == tmp_path / "plan.yaml"


def test_a_plan_of_another_program_is_none_and_one_with_a_slip_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _plan_in(tmp_path / "advisor-runs" / "search", "kept", age=5)
    (tmp_path / "plan.yaml").write_text("stages: [build]\n")
    assert named(Path("last")).parent.name == "search"
    (tmp_path / "plan.yaml").write_text("schema_version: 1\nitems: [{transform: tf32, status: skiped}]\n")
    with pytest.raises(AdvisorError, match="skiped"):
        named(Path("last"))


def named(plan: Path) -> Path:
    return runs.find_plan(plan, lambda known: not planfile.left_open(known))[0]


def _plan_in(run: Path, status: str, age: int, script: str = "train.py") -> None:
    run.mkdir(parents=True, exist_ok=True)
    plan = run / "plan.yaml"
    plan.write_text(f"schema_version: 1\nscript: {script}\nitems: [{{transform: tf32, status: {status}}}]")
    os.utime(plan, (1000 - age, 1000 - age))


def test_modules_of_one_package_have_folders_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = ("pkg.train", "pkg.eval", "lib/train.py", "torchrun", ".")
    found = [runs.new_run_dir(name).name.rsplit("-", 3)[0] for name in names]
    assert found == ["pkg.train", "pkg.eval", "train", "torchrun", "script"]


def test_the_last_plan_is_of_the_script_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "advisor-runs"
    _plan_in(folder / "other", "kept", age=0, script="other.py")
    _plan_in(folder / "own", "kept", age=1)
    _plan_in(folder / "open", "inconclusive", age=0, script="open.py")

    def last(script: str) -> str:
        return runs.find_plan(Path("last"), lambda known: not planfile.left_open(known), script)[0].parent.name

    assert [last(script) for script in ("", "train.py", "open.py", "third.py")] == ["other", "own", "open", "other"]


def test_the_last_run_is_one_in_which_something_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    empty = StepProfile(
        script="train.py", argv=(), created="", environment=Environment(), step_kind="none", step_us=None, wall_us=None
    )
    measured = replace(empty, step_us=Spread(median=1.0, p10=1.0, p90=1.0, n=1))
    for age, (name, profile) in enumerate({"empty": empty, "measured": measured, "older": measured}.items()):
        file = tmp_path / "advisor-runs" / name / "profile.json"
        storage.save(file, profile)
        os.utime(file, (1000 - age, 1000 - age))
        if name == "empty":
            assert runs.load_run("last").run_dir == file.parent  # there is none other
            assert runs.existing(file.parent.name).samefile(file.parent)  # as `advisor runs` names it
    assert runs.load_run("last").run_dir.name == "measured"


def test_time_that_counts_from_the_first_step_leaves_a_script_time_to_come_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--max-time 3s` a script that took five to import torch was told to have no steps."""
    script = tmp_path / "train.py"
    script.write_text("")
    monkeypatch.chdir(tmp_path)
    given: list[float] = []

    def profile_script(command: object, session: Session, **_: object) -> object:
        given.append(session.first_step_s)
        raise KeyboardInterrupt

    monkeypatch.setattr(applying, "profile_script", profile_script)
    for time_s in (3.0, 600.0):
        with pytest.raises(KeyboardInterrupt):
            pipeline.apply(
                [str(script)], options=search.SearchOptions(time_s=time_s), out=tmp_path / "run", say=lambda text: None
            )
    assert given == [applying.FIRST_STEP_LEAST_S, 600.0]


def test_a_search_that_gives_the_profiled_process_nothing_to_do_is_the_one_that_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was begun anew, and what it had said was said twice."""
    (tmp_path / "train.py").write_text("")
    monkeypatch.chdir(tmp_path)
    profile = StepProfile(
        script="train.py", argv=(), created="", environment=Environment(device="cpu"), step_kind="optimizer",
        step_us=None, wall_us=None,
    )  # fmt: skip
    asked = (Recommendation(transform="channels_last"),)
    found = Findings(run="", findings=(), cards=(), recommendations=asked)
    begun: list[object] = []

    def begin(*_: object, **__: object) -> object:
        begun.append(SimpleNamespace(first_orders=lambda candidates: None, finish=finish))
        return begun[-1]

    def finish(candidates: object) -> object:
        raise KeyboardInterrupt

    def profile_script(command: object, session: object, *, handover: Any, **_: object) -> object:
        handover.give(profile, found)
        return SimpleNamespace(profile=profile, findings=found, exit_code=0)

    monkeypatch.setattr(search, "begin", begin)
    monkeypatch.setattr(applying, "profile_script", profile_script)
    with pytest.raises(KeyboardInterrupt):
        pipeline.apply(["train.py"], out=tmp_path / "run", say=lambda text: None)
    assert len(begun) == 1
