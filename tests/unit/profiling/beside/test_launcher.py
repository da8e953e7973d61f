"""Commands as users write them, bad input, and the environment of the child."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from advisor.core.errors import AdvisorError
from advisor.loop.session import Session
from advisor.profiling.beside.command import BrokenScript, ScriptCommand
from advisor.profiling.beside.launcher import child_environment
from advisor.profiling.beside.progress import Progress
from advisor.resources import BOOTSTRAP


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_script_runs_with_this_interpreter(here: Path) -> None:
    (here / "train.py").write_text("print(1)")
    command = ScriptCommand.parse(["train.py", "--lr", "0.1", "--", "-x"])
    assert command.argv == (sys.executable, "train.py", "--lr", "0.1", "--", "-x")
    assert (command.name, command.arguments, command.literal) == ("train.py", ("--lr", "0.1", "--", "-x"), False)


def test_a_module(here: Path) -> None:
    (here / "pkg").mkdir()
    (here / "pkg" / "train.py").write_text("x = 1")
    command = ScriptCommand.parse(["pkg.train", "--lr", "0.1"], module=True)
    assert command.argv == (sys.executable, "-m", "pkg.train", "--lr", "0.1")
    (here / "pkg" / "train.py").write_text("x = = 1")
    with pytest.raises(BrokenScript, match="SyntaxError"):
        ScriptCommand.parse(["pkg.train"], module=True)


def test_a_command_is_run_as_given(here: Path) -> None:
    command = ScriptCommand.parse(["sh", "-c", "true", "train.py"])
    assert command.argv == ("sh", "-c", "true", "train.py")
    assert command.literal
    assert command.name == "train.py"


def test_a_program_of_pythons_keeps_its_own_interpreter(here: Path) -> None:
    (here / "launcher").write_text("#!/some/other/python\n")
    (here / "launcher").chmod(0o755)
    command = ScriptCommand.parse(["./launcher", "train.py", "--lr", "1"])
    assert command.argv == ("./launcher", "train.py", "--lr", "1")
    assert (command.literal, command.name) == (True, "train.py")


@pytest.mark.parametrize("words", [("train.py", "--lr", "1"), ("-m", "train", "-m"), ("sh", "x.sh", "train.py")])
def test_the_recorded_words_make_the_same_command(here: Path, words: tuple[str, ...]) -> None:
    (here / "train.py").write_text("x = 1")
    command = ScriptCommand.parse(words)
    assert command.words == words
    assert ScriptCommand.parse(command.words) == command


def test_a_script_without_suffix_is_known_by_its_first_line(here: Path) -> None:
    (here / "train").write_text("#!/usr/bin/env python3\nprint(1)\n")
    assert ScriptCommand.parse(["./train"]).argv == (sys.executable, "./train")


def test_a_folder_with_a_main_is_a_script(here: Path) -> None:
    (here / "app").mkdir()
    with pytest.raises(AdvisorError, match="is a folder"):
        ScriptCommand.parse(["app"])
    (here / "app" / "__main__.py").write_text("print(1)")
    assert ScriptCommand.parse(["app"]).argv == (sys.executable, "app")


def test_a_missing_script_names_the_nearest(here: Path) -> None:
    (here / "train.py").write_text("")
    with pytest.raises(AdvisorError, match=r"no script trian\.py.*Did you mean train\.py\?") as caught:
        ScriptCommand.parse(["trian.py"])
    assert caught.value.exit_code == 2


def test_a_missing_module_is_told_before_anything_runs(here: Path) -> None:
    """Seen: the machine was measured and a run folder made, then Python's own message, then "exit code 1 is the script's own"."""
    with pytest.raises(
        AdvisorError, match=r"no module birds\.train; expected a package birds below this folder"
    ) as caught:
        ScriptCommand.parse(["birds.train"], module=True)
    assert caught.value.exit_code == 2
    (here / "birds").mkdir()  # without an __init__.py it is a package too
    assert ScriptCommand.parse(["birds.train"], module=True).name == "birds.train"
    assert ScriptCommand.parse(["timeit"], module=True).name == "timeit"


def test_neither_script_nor_command(here: Path) -> None:
    (here / "train.py").write_text("")
    with pytest.raises(AdvisorError, match="neither a script nor a command"):
        ScriptCommand.parse(["trayn"])
    with pytest.raises(AdvisorError, match="no script given"):
        ScriptCommand.parse([])


def test_the_word_for_the_newest_run_is_no_program_to_start(here: Path) -> None:
    """`last` is on most machines, and was started by `advisor memory last`."""
    (here / "train.py").write_text("")
    with pytest.raises(AdvisorError, match=r"`last` names a run.*train\.py"):
        ScriptCommand.parse(["last"])


def test_a_program_is_the_shells_or_else_that_beside_the_interpreter(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`.venv/bin/advisor … -- torchrun` without `activate`."""
    for folder in ("bin", "usr"):
        (here / folder).mkdir()
        program = here / folder / "torchrun"
        program.write_text("#!/bin/sh")
        program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(here / "bin" / "python"))
    monkeypatch.setenv("PATH", str(here))
    command = ScriptCommand.parse(["torchrun", "train.py"])
    assert (command.argv, command.name) == ((str(here / "bin" / "torchrun"), "train.py"), "train.py")
    monkeypatch.setenv("PATH", str(here / "usr"))
    assert ScriptCommand.parse(["torchrun", "train.py"]).argv == ("torchrun", "train.py")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (b"def f(:\n", "SyntaxError"),
        (b"if True:\nx = 1\n", "IndentationError"),
        (b"x = '\xff'\n", "SyntaxError"),
        (b"x = 1\x00\n", "null bytes"),
    ],
)
def test_a_broken_script_is_told_in_pythons_words(here: Path, source: bytes, message: str) -> None:
    (here / "train.py").write_bytes(source)
    with pytest.raises(BrokenScript, match=message) as caught:
        ScriptCommand.parse(["train.py"])
    assert caught.value.exit_code == 1


def test_a_script_in_another_encoding_is_not_broken(here: Path) -> None:
    (here / "train.py").write_bytes(b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    ScriptCommand.parse(["train.py"])


def test_a_warning_of_the_compiler_is_left_to_the_script(here: Path, recwarn: pytest.WarningsRecorder) -> None:
    (here / "train.py").write_text("x = '\\d'\nassert (x, 'always')\n")
    ScriptCommand.parse(["train.py"])
    assert not recwarn.list


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_script(here: Path) -> None:
    path = here / "train.py"
    path.write_text("")
    path.chmod(0)
    with pytest.raises(AdvisorError, match="cannot be read"):
        ScriptCommand.parse(["train.py"])


def environment(literal: bool = False, **extra: str) -> dict[str, str]:
    command = ScriptCommand(argv=("x",), name="x", literal=literal)
    return child_environment(command, Session(mode="profile", run_dir="run", script="x"), extra)


def test_the_childs_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setenv("ADVISOR_ATTACHED", "1")
    told = environment()
    assert told["PYTHONPATH"] == str(BOOTSTRAP)  # no empty entry: that would be the working directory
    assert told["ADVISOR_SUPERVISOR"] == str(os.getpid())
    assert told["ADVISOR_SESSION"] == str(Path("run/session.json").resolve())
    assert "ADVISOR_ATTACHED" not in told
    assert environment(PYTHONPATH="/a")["PYTHONPATH"] == f"{BOOTSTRAP}{os.pathsep}/a"
    assert environment(literal=True)["ADVISOR_SUPERVISOR"] == "0"


def test_in_a_search_every_python_below_is_told_where_to_set_files_aside(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ADVISOR_FILES", "an outer run's")
    assert environment()["ADVISOR_FILES"] == "an outer run's"  # whatever that starts is thrown away too
    session = Session(
        mode="search", run_dir=str(tmp_path / "round-2"), files_dir=str(tmp_path), script="x", protect_files=True
    )
    command = ScriptCommand(argv=("x",), name="x", literal=False)
    monkeypatch.setenv("COMET_MODE", "disabled")
    told = child_environment(command, session, {})
    assert told["ADVISOR_FILES"] == str(tmp_path)
    assert (told["WANDB_MODE"], told["WANDB_DIR"]) == ("offline", str(tmp_path / "trackers"))
    assert told["COMET_MODE"] == "disabled"  # what is switched off stays off
    assert "WANDB_MODE" not in environment()


def test_disabled_the_environment_is_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADVISOR_DISABLE", "1")
    assert environment() == dict(os.environ)


def test_progress_is_read_in_whole_lines_and_from_this_child_only(tmp_path: Path) -> None:
    path = tmp_path / "progress.jsonl"
    path.write_text('{"event": "old"}\n')
    progress = Progress(path)
    with open(path, "a") as stream:
        stream.write('{"event": "one"}\nnot json\n[1]\n{"event": ')
    assert [event["event"] for event in progress.read()] == ["one"]
    with open(path, "a") as stream:
        stream.write('"two"}\n')
    assert [event["event"] for event in progress.read()] == ["two"]
    assert list(progress.read()) == []


def test_no_torch_is_imported_by_the_supervisor_side() -> None:
    import subprocess

    code = "import advisor.profiling.beside.launcher, advisor.loop.records, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[4]).returncode == 0
