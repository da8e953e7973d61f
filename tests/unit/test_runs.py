"""`advisor runs`: what lies there, and what may go."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from advisor.cli import ask
from advisor.cli.main import cli
from advisor.core import storage, use
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.core.profile import Spread, StepProfile
from advisor.core.verdict import StackVerdict, TrialLog, Verdict
from advisor.runs import cleaning, listing
from advisor.userfiles import journal, owners

HOUR, DAY = 3600.0, 86400.0


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(["runs", *words])
    told = capsys.readouterr()
    return int(str(ended.value.code)), told.out, told.err


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four runs of train.py, from a day to four days old, and a folder that is none; all below advisor-runs/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    runs = tmp_path / "advisor-runs"
    profile = StepProfile(
        script="train.py", argv=(), created="", environment=Environment(), step_kind="optimizer",
        step_us=Spread(median=5e4, p10=5e4, p90=5e4, n=9), wall_us=None,
    )  # fmt: skip
    storage.save(runs / "one" / "profile.json", profile)
    storage.save(runs / "two" / "trials.json", TrialLog(script="train.py", argv=(), complete=False))
    kept = Verdict(transform="tf32", status="kept", reason="")
    stack = StackVerdict(passed=True, detail="", speedup=1.34)
    storage.save(runs / "three" / "trials.json", TrialLog(script="train.py", argv=(), verdicts=(kept,), stack=stack))
    for name in ("three", "four"):
        storage.write_text(
            runs / name / "plan.yaml", "schema_version: 1\nscript: train.py\nitems: [{transform: tf32, status: kept}]"
        )
    storage.write_text(runs / "notes" / "mine.txt", "not a run")
    for days, name in enumerate(("one", "two", "three", "four"), 1):
        aged(runs / name, days * DAY)
    return runs


def aged(run: Path, seconds: float) -> None:
    when = time.time() - seconds
    for path in (*run.rglob("*"), run):
        os.utime(path, (when, when))


def left(runs: Path) -> set[str]:
    return {path.name for path in runs.iterdir()}


def test_runs_are_listed_with_what_they_hold_and_what_came_of_them(shelf, capsys):
    code, out, _ = call(capsys, "--format", "json")
    found = {Path(run["run"]).name: run for run in json.loads(out)["runs"]}
    assert code == 0
    assert list(found) == ["one", "two", "three", "four"]  # the newest first
    verdicts = [run["verdict"] for run in found.values()]
    assert verdicts == ["50.0 ms a step", "search not finished", "1.34 × as fast, proved", "trained with a plan"]
    assert [run["holds"] for run in found.values()] == [["profile"], ["trials"], ["trials", "plan"], ["plan"]]
    assert found["one"]["bytes"] == (shelf / "one" / "profile.json").stat().st_size
    _, text, _ = call(capsys)
    assert "4 runs, " in text
    assert "stays: the plan that `last` names" in text


def test_a_run_of_a_module_has_the_modules_name(shelf):
    found = storage.load(shelf / "one" / "profile.json", StepProfile)
    storage.save(shelf / "one" / "profile.json", replace(found, script="-m", argv=("pkg.train", "--lr", "1")))
    assert listing.listed()[0].script == "pkg.train"


def test_a_directory_without_runs_has_none(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(capsys)[:2] == (0, "\n0 runs, 0 B.\n")
    assert call(capsys, "clean", "--keep", "0", "--yes")[:2] == (0, "Nothing to remove of 0 runs.\n")


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (("--keep", "0"), {"one", "two", "four"}),
        (("--keep", "1"), {"two", "four"}),
        (("--older-than", "60h"), {"four"}),
        (("--older-than", "36h", "--keep", "2"), {"four"}),
        (("--older-than", "1w"), set()),
        (("--keep", "9"), set()),
    ],
)
def test_what_is_old_and_behind_the_newest_goes_but_the_plan_in_use(shelf, capsys, words, gone):
    before = left(shelf)
    code, out, _ = call(capsys, "clean", *words, "--dry-run")
    assert (code, left(shelf)) == (0, before)
    assert "Would remove" in out if gone else "Nothing to remove" in out
    assert call(capsys, "clean", *words, "--yes")[0] == 0
    assert left(shelf) == before - gone


@pytest.mark.parametrize(("answer", "goes"), [("y\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_a_person_is_asked_first(shelf, capsys, monkeypatch, answer, goes):
    questions = io.StringIO()
    monkeypatch.setattr(ask, "terminal", lambda *_: (io.StringIO(answer), questions))
    code, out, _ = call(capsys, "clean", "--older-than", "84h")
    assert (code, "four" not in left(shelf)) == (0, goes)
    assert ("Removed 1 run." in out) is goes
    assert ("Nothing was removed." in out) is not goes
    assert questions.getvalue().startswith("Remove 1 run, ")


def test_nothing_goes_where_nobody_can_be_asked(shelf, capsys, monkeypatch):
    def nobody(*_: object, **__: object) -> None:
        raise OSError

    monkeypatch.setattr(ask, "open", nobody, raising=False)
    code, _, err = call(capsys, "clean", "--keep", "0")
    assert code == 2
    assert "there is no terminal to answer. Use --yes" in err
    assert "one" in left(shelf)


@pytest.mark.parametrize("words", [(), ("--older-than", "soon"), ("--older-than", "5"), ("--keep", "-1")])
def test_what_is_to_go_must_be_said(shelf, capsys, words):
    code, out, err = call(capsys, "clean", *words)
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_what_a_living_process_uses_stays_and_may_go_when_it_has_ended(shelf, capsys):
    """A run, a plan that a script has enabled, and a search: each says so by a lock, or by its process."""
    code = "from advisor.core import use; import pathlib, sys; use.hold(pathlib.Path(sys.argv[1])); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(shelf / "one")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        owner = f"{child.pid} {owners.started(child.pid)}\n"
        storage.write_text(journal.root_of(shelf / "two") / owners.OWNERS, owner)
        aged(shelf / "two", 2 * DAY)
        needed = {run.folder.name: run.needed for run in listing.listed()}
        assert needed["one"] == needed["two"] == "in use by a running process"
        call(capsys, "clean", "--keep", "0", "--yes")
        assert left(shelf) == {"one", "two", "three", "notes"}
        child.communicate("\n")
    call(capsys, "clean", "--keep", "0", "--yes")
    assert left(shelf) == {"three", "notes"}


def test_a_run_that_is_taken_into_use_at_the_last_moment_stays(shelf, monkeypatch):
    (run,) = (run for run in listing.listed() if run.folder.name == "one")
    use.hold(run.folder)  # by another descriptor, as another process's
    assert cleaning.remove(run) is False
    assert (shelf / "one" / "profile.json").exists()


def test_files_of_the_users_that_a_killed_search_had_set_aside_stay(shelf, capsys):
    root = journal.root_of(shelf / "one")
    root.mkdir()
    journal.note(root, action="kept", path="/home/a/best.pt", aside="x")
    (run,) = (run for run in listing.listed() if run.folder.name == "one")
    assert "doctor --recover" in run.needed
    call(capsys, "clean", "--keep", "0", "--yes")
    assert "one" in left(shelf)


def test_a_run_that_a_script_here_names_stays(shelf, tmp_path, capsys):
    (tmp_path / "train.py").write_text('advisor.enable("advisor-runs/four/plan.yaml")\n')
    call(capsys, "clean", "--keep", "0", "--yes")
    assert left(shelf) == {"three", "four", "notes"}


def test_links_and_folders_that_are_no_runs_are_left_alone(shelf, tmp_path, capsys):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "profile.json").write_text("{}")
    (shelf / "link").symlink_to(tmp_path / "elsewhere")
    call(capsys, "clean", "--keep", "0", "--yes")
    assert left(shelf) == {"three", "notes", "link"}
    assert (tmp_path / "elsewhere" / "profile.json").exists()


def test_a_damaged_run_is_listed_and_may_go(shelf, capsys):
    (shelf / "one" / "profile.json").write_text("{")
    code, out, _ = call(capsys)
    assert code == 0
    assert "cannot be read" in out
    call(capsys, "clean", "--keep", "0", "--yes")
    assert "one" not in left(shelf)


def test_a_run_that_cannot_be_removed_is_told_and_the_others_go(shelf, capsys, monkeypatch):
    remove = cleaning.remove

    def refuse(run: listing.ListedRun) -> bool:
        if run.folder.name == "two":
            raise AdvisorError("cannot remove two (Permission denied)")
        return remove(run)

    monkeypatch.setattr(cleaning, "remove", refuse)
    code, out, err = call(capsys, "clean", "--keep", "0", "--yes")
    assert (code, err) == (2, "advisor: cannot remove two (Permission denied)\n")
    assert "Removed 2 runs." in out
    assert left(shelf) == {"two", "three", "notes"}
