"""Input that cannot be used (numbers in catalogue.yaml): one line that says what is wrong, before anything runs or is written."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from advisor.cli.main import cli

CASES = {
    # launch
    "no such script": (("profile", "trian.py"), 2, "no script trian.py; expected a file that exists. Did you mean train.py?"),
    "no such script to search": (("apply", "--auto", "trian.py"), 2, "Did you mean train.py?"),
    "a folder as script": (("profile", "empty"), 2, "empty is a folder; expected a Python script"),
    "an empty name": (("profile", ""), 2, "no script given"),
    "a module without a name": (("profile", "-m", ""), 2, "no script given"),
    "nothing to profile": (("profile",), 2, "no script to profile"),
    "a program that is not there": (("profile", "--", "nosuchprogram", "train.py"), 2, "neither a script nor a command"),
    "a syntax error": (("profile", "broken.py"), 1, "SyntaxError"),
    "a syntax error in a search": (("apply", "--auto", "broken.py"), 1, "SyntaxError"),
    "bytes as script": (("profile", "bytes.py"), 1, "Error: source code string cannot contain null bytes"),
    "an option of nobody's": (("profile", "--nosuch", "train.py"), 2, "No such option '--nosuch'"),
    "a negative number": (("profile", "--steps", "-3", "train.py"), 2, "-3 is not in the range"),
    "no steps": (("profile", "--steps", "0", "train.py"), 2, "0 is not in the range"),
    "more steps than an integer holds": (("profile", "--steps", "9" * 24, "train.py"), 2, "is not in the range"),
    "a word for a number": (("profile", "--detail-steps", "many", "train.py"), 2, "'many' is not a valid integer"),
    # output
    "a folder where none can be": (("profile", "-o", "/proc/nowhere", "train.py"), 2, "cannot make /proc/nowhere"),
    "a file as folder": (("profile", "-o", "train.py", "train.py"), 2, "'train.py' is a file"),
    "a folder that is not empty": (("apply", "--auto", "-o", "full", "train.py"), 2, "full is not empty; expected a new folder"),
    "a report where none can be": (("report", "--html", "/proc/x.html", "sound"), 2, "cannot write /proc/x.html"),
    "a folder as report": (("report", "--html", "empty", "sound"), 2, "'empty' is a directory"),
    "results where none can be": (("bench", "ops", "--out", "/proc/x.json"), 2, "cannot write /proc/x.json"),
    # search
    "no script and nothing profiled": (("apply", "--auto"), 2, "no run in advisor-runs/ here. Run `advisor profile train.py` first."),
    "a change of nobody's": (("apply", "--auto", "--only", "warp_drive", "train.py"), 2, "no transform 'warp_drive'; expected one of"),
    "in and out": (("apply", "--auto", "--only", "tf32", "--skip", "tf32", "train.py"), 2, "tf32 is in both --only and --skip"),
    "a gain of 5": (("apply", "--auto", "--min-gain", "5", "train.py"), 2, "could mean 5% or a factor"),
    "a negative gain": (("apply", "--auto", "--min-gain", "-1%", "train.py"), 2, "is outside 0% to 100%"),
    "no time": (("apply", "--auto", "--max-time", "0", "train.py"), 2, "is not a time span above zero"),
    "a century": (("apply", "--auto", "--max-time", "900000h", "train.py"), 2, "is more than 720 h"),
    "nobody to ask": (("apply", "train.py"), 2, "there is no terminal to answer. Use --auto"),
    # plans
    "no plan": (("run", "train.py"), 2, "no plan in advisor-runs/ here"),
    "no such plan": (("run", "--plan", "none.yaml", "train.py"), 2, "no plan none.yaml"),
    "no plan in a folder": (("run", "--plan", "empty", "train.py"), 2, "no plan empty/plan.yaml. `advisor apply` writes one"),
    "no plan to prove": (("apply", "--plan", "last"), 2, "no plan in advisor-runs/ here"),
    "bytes as plan": (("run", "--plan", "bytes.py", "train.py"), 2, "bytes.py"),
    "half a plan": (("run", "--plan", "half.yaml", "train.py"), 2, "half.yaml:2: not YAML"),
    "another file as plan": (("run", "--plan", "other.yaml", "train.py"), 2, "other.yaml:1: the plan has no key 'a'"),
    # rules
    "no such rules": (("profile", "--rules", "nowhere", "train.py"), 2, "'nowhere' does not exist"),
    "no rule in a folder": (("profile", "--rules", "empty", "train.py"), 2, "no rules in empty"),
    "no rule in a file": (("profile", "--rules", "other.yaml", "train.py"), 2, "other.yaml:1:1: unknown field 'a' in the rule"),
    "no rule for a search": (("apply", "--auto", "--rules", "other.yaml", "train.py"), 2, "other.yaml:1:1"),
    "a threshold of nobody's": (("recommend", "sound", "--set", "launch-bound.x=1"), 2, "has no threshold on 'x'"),
    "a rule of nobody's": (("recommend", "sound", "--select", "nope"), 2, "--select 'nope' names no rule"),
    "no such rule": (("rules", "show", "nope"), 2, "no rule 'nope'"),
    # run folders
    "no such run": (("report", "nowhere"), 2, "no folder nowhere; expected a run folder, or `last`"),
    "no such run to judge": (("recommend", "nowhere"), 2, "no folder nowhere; expected a run folder, or `last`"),
    "no such run to compare": (("compare", "sound", "nowhere"), 2, "no folder nowhere"),
    "a run by its name alone, which holds nothing": (("report", "train-1"), 2, "no profile.json in "),
    "a run by half its name": (("recommend", "trai"), 2, "Did you mean advisor-runs/train-1?"),
    "a run without a name": (("report", ""), 2, "an empty name for a run"),
    "a name that is too long": (("report", "x" * 300), 2, "cannot be read (File name too long)"),
    "a plan's name that is too long": (("run", "--plan", "x" * 300, "train.py"), 2, "(File name too long)"),
    "a script's name that is too long": (("profile", "x" * 300), 2, "cannot be used (File name too long)"),
    "a file as run": (("report", "train.py"), 2, "train.py is a file; expected a run folder, or `last`"),
    "a file of a run": (("compare", "sound", "sound/profile.json"), 2, "profile.json is a file; expected a run folder, or `last`. Name its folder: sound"),
    "a run without results": (("report", "empty"), 2, "no profile.json in empty"),
    "a run of another version": (("report", "newer"), 2, "schema_version 99, of a newer advisor; expected 1. Update advisor"),
    "half a run": (("report", "torn"), 2, "torn/profile.json:1:23: cut off, or no JSON"),
    "half a run to judge": (("recommend", "torn"), 2, "cut off, or no JSON"),
    "half a run to compare": (("compare", "sound", "torn"), 2, "cut off, or no JSON"),
    "a newer run to compare": (("compare", "newer", "sound"), 2, "of a newer advisor"),
    "half of what was found": (("report", "half-found"), 2, "findings.json:1:1: cut off, or no JSON (Expecting value); expected what advisor wrote. `advisor recommend half-found` applies the rules"),
    "a list as run": (("report", "listed"), 2, "profile.json holds a list; expected what advisor wrote"),
    "bytes as run": (("report", "bytes"), 2, "bytes/profile.json is no JSON"),
    "findings as profile": (("report", "swapped"), 2, "profile.json holds a Findings; expected a StepProfile"),
    "text for a time": (("report", "texts"), 2, "texts/profile.json: $.step_us is text 'long'; expected an object (Spread)"),
    "a folder as profile": (("report", "folders"), 2, "profile.json cannot be read (Is a directory)"),
    "one run to compare": (("compare", "sound"), 2, "Missing argument 'B'"),
    "a regression of 3": (("compare", "sound", "sound", "--fail-on-regression", "3"), 2, "write 3% or a fraction below 1"),
    "no search to recover": (("doctor", "--recover", "empty"), 2, "no run was interrupted in empty"),
    # the rest
    "no such command": (("profil", "train.py"), 2, "Did you mean `advisor profile`?"),
    "no such family": (("kernels", "verify", "nope"), 2, "no kernel family 'nope'; expected one of"),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise SystemExit('it was run')\n")
    (tmp_path / "broken.py").write_text("def f(:\n")
    (tmp_path / "bytes.py").write_bytes(b"\x00\x01\xff\xfe")
    (tmp_path / "half.yaml").write_text("items: [\n")
    (tmp_path / "other.yaml").write_text("a: 1\n")
    profile = (
        '{"schema_version": 1, "script": "t.py", "argv": [], "created": "", "environment": {}, "step_kind": "none", '
    )
    sound = profile + '"step_us": null, "wall_us": null}'
    for name, text in {"sound": sound, "newer": '{"schema_version": 99}', "torn": '{"schema_version": 1, "da'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "profile.json").write_text(text)
    spoiled = {
        "half-found": sound, "listed": "[]", "swapped": '{"schema_version": 1, "type": "Findings"}',
        "texts": sound.replace('"step_us": null', '"step_us": "long"'),
    }  # fmt: skip
    for name, text in spoiled.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "profile.json").write_text(text)
    (tmp_path / "half-found" / "findings.json").touch()
    (tmp_path / "bytes").mkdir()
    (tmp_path / "bytes" / "profile.json").write_bytes(b"\x00\xff\xfe")
    (tmp_path / "folders" / "profile.json").mkdir(parents=True)
    (tmp_path / "advisor-runs" / "train-1").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    return tmp_path


def tree(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("case", CASES)
def test_input_that_cannot_be_used_is_one_line(folder: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    words, code, said = CASES[case]
    before = tree(folder)
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (code, "")
    assert told.err.startswith("advisor: ")
    assert said in told.err
    assert len(told.err.strip().splitlines()) == (4 if "broken.py" in words else 1), (
        told.err
    )  # Python's own message has four
    assert tree(folder) == before


OTHERS = {
    "report": ("report", "closed"),
    "report of a file": ("report", "shut"),
    "page": ("report", "sound", "--html", "closed/x.html"),
    "recommend": ("recommend", "closed"),
    "compare": ("compare", "sound", "closed"),
    "recover": ("doctor", "--recover", "closed"),
    "plan": ("run", "--plan", "closed", "train.py"),
    "a plan's file": ("run", "--plan", "closed/plan.yaml", "train.py"),
    "rules": ("recommend", "sound", "--rules", "closed"),
    "lint": ("rules", "lint", "closed"),
    "script": ("profile", "closed/train.py"),
    "a folder as script": ("profile", "closed"),
    "run folder": ("profile", "-o", "closed/run", "train.py"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_belongs_to_another_user_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    for name in ("closed", "shut"):
        (folder / name).mkdir()
        (folder / name / "profile.json").write_text("{}")
    (folder / "shut" / "profile.json").chmod(0)
    (folder / "closed").chmod(0)
    try:
        with without_privileges(), pytest.raises(SystemExit) as ended:
            cli.main(list(OTHERS[case]))
    finally:
        (folder / "closed").chmod(0o700)
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    assert told.err.startswith("advisor: ")
    assert len(told.err.strip().splitlines()) == 1
    assert "closed" in told.err or "shut" in told.err
    assert "Permission denied" in told.err or "is not readable" in told.err


@contextlib.contextmanager
def without_privileges() -> Iterator[None]:
    """Inside, root is refused what other users are (Linux): files are opened without the capabilities to override their mode."""
    if os.geteuid():
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    head = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this thread
    held = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable of the first 32, then of the rest
    assert libc.capget(head, held) == 0
    less = (ctypes.c_uint32 * 6)(*held)
    less[0] &= ~0b110  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(head, less) == 0
    try:
        yield
    finally:
        assert libc.capset(head, held) == 0


@pytest.mark.parametrize("words", [(), ("rules",), ("kernels",)])
def test_a_command_without_its_subcommand_shows_its_help(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(list(words))
    lines = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert lines[0].startswith("Usage: advisor")
    assert "Commands:" in lines


def test_a_search_while_advisor_is_switched_off_is_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADVISOR_DISABLE", "1")
    with pytest.raises(SystemExit) as ended:
        cli.main(["apply", "--auto", "train.py"])
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "advisor: ADVISOR_DISABLE is set, so nothing can be tried. Unset it for this command.\n"
    )
    assert not list((folder / "advisor-runs" / "train-1").iterdir())


def test_the_report_of_a_sound_run_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["report", "sound", "--html", f"new{os.sep}x.html"])
    assert ended.value.code == 0, capsys.readouterr().err
    assert (folder / "new" / "x.html").is_file()
