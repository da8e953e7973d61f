"""What a program may change, from its words."""

import os
import sys
from pathlib import Path

import pytest

from advisor.resources import BOOTSTRAP
from advisor.userfiles import programs


@pytest.fixture
def work(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    for name in ("a.pt", "b.pt", "log.csv", "out/c.pt"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def named(arguments, executable=None, cwd=None, environment=None):
    found = programs.named(executable, arguments, cwd, environment)
    return sorted(os.path.relpath(path) for path in found)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["cp", "a.pt", "best.pt"], ["a.pt", "best.pt"]),
        (["cp", "-r", "out", "backup"], ["backup", "out"]),
        (["rm", "-rf", "out"], ["out"]),
        (["rm", "out/*.pt"], ["out/c.pt"]),
        (["/bin/sh", "-c", "rm -f *.pt"], ["a.pt", "b.pt"]),
        (["/bin/sh", "-c", "echo done >> log.csv && date > when.txt"], ["log.csv", "when.txt"]),
        (["/bin/bash", "-c", "(rm a.pt); mv b.pt $(pwd)"], ["a.pt", "b.pt", "pwd"]),
        (["env", "-i", "python3", "-c", "open('log.csv', 'w').write('x')"], [".write", "log.csv"]),
        (["tool", "--out=log.csv", "of=b.pt", "--verbose"], ["b.pt", "log.csv"]),
        (["mkdir", "-p", "fresh"], ["fresh"]),
        ("rm -f 'a.pt'; echo hello", ["a.pt", "echo", "hello"]),
        ("an 'open quotation a.pt", ["a.pt"]),
        # They read.
        (["du", "-sh", "out", "."], []),
        (["git", "rev-parse", "a.pt"], []),
        (["g++", "a.pt", "-o", "b.pt"], []),
        (["echo", "hello", "world"], []),
        # No words at all.
        ([], []),
        (None, []),
        ([b"rm", Path("a.pt")], ["a.pt"]),
    ],
)
def test_what_words_name(work, arguments, expected):
    assert named(arguments) == expected


def test_a_programs_own_folder_counts(work):
    assert named(["rm", "c.pt"], cwd=str(work / "out")) == ["out/c.pt"]
    assert named(["rm", "c.pt"]) == ["c.pt"]  # a name that is free here


def test_what_is_installed_is_left_alone(work):
    assert named(["rm", "/bin/sh", "/usr/lib/os-release", sys.executable]) == []


def test_a_python_guards_itself_only_where_it_finds_the_bootstrap(work, monkeypatch):
    command = [sys.executable, "tool.py", "a.pt"]
    monkeypatch.setenv("PYTHONPATH", f"{BOOTSTRAP}{os.pathsep}lib")
    assert named(command) == []
    assert named(command, environment={b"PYTHONPATH": os.fsencode(BOOTSTRAP)}) == []
    assert named(command, environment={"PATH": ""}) == ["a.pt", "tool.py"]
    assert named([command[0], "-I", *command[1:]]) == ["a.pt", "tool.py"]
    monkeypatch.delenv("PYTHONPATH")
    assert named(command) == ["a.pt", "tool.py"]
