"""The group: lazy, quick, and one line for every failure."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from advisor import __version__
from advisor.cli.main import COMMANDS, MEANT
from advisor.core.errors import AdvisorError, ExitCode


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (AdvisorError("no such run 'x'", fix="Run `advisor profile`."), 2, "advisor: no such run 'x'. Run `advisor profile`.\n"),
        (AdvisorError("no GPU", exit_code=ExitCode.GPU_REQUIRED), 5, "advisor: no GPU\n"),
        (AdvisorError("undecided", exit_code=ExitCode.INCONCLUSIVE), 4, "advisor: undecided\n"),
        (ValueError("planted\nfault"), 3, "advisor: internal error: ValueError: planted. Set ADVISOR_LOG=debug to see the traceback.\n"),
        (KeyboardInterrupt(), 130, "advisor: interrupted\n"),
    ],
)  # fmt: skip
def test_errors_are_one_line_with_their_exit_code(invoke, pipeline, error, code, line):
    pipeline.error = error
    result = invoke("report", "x")
    assert result.exit_code == code
    assert result.stderr.strip() + "\n" == line
    assert "Traceback" not in result.stderr


def test_debug_shows_the_traceback(invoke, pipeline, monkeypatch):
    monkeypatch.setenv("ADVISOR_LOG", "debug")
    pipeline.error = ValueError("planted")
    result = invoke("report", "x")
    assert result.exit_code == ExitCode.OWN_FAULT
    assert "Traceback" in result.stderr


def test_unknown_command_suggests(invoke):
    result = invoke("profil", "train.py")
    assert result.exit_code == ExitCode.USAGE
    assert "Did you mean `advisor profile`?" in result.stderr
    assert "advisor profile train.py" in invoke("train.py").stderr


@pytest.mark.parametrize("word", MEANT)
def test_what_people_try_in_place_of_a_command_is_answered(invoke, word):
    """Each answer names commands that there are."""
    result = invoke(word)
    assert result.exit_code == 2
    named = re.findall(r"`advisor (\w+)", result.stderr)
    assert named
    assert set(named) <= set(COMMANDS)
    assert MEANT[word] in result.stderr


def test_version_and_help(invoke):
    assert invoke("--version").stdout == f"advisor {__version__}\n"
    text = invoke("--help").stdout
    for name in COMMANDS:
        assert f"\n  {name} " in text
    for code in ("1 findings", "2 wrong usage", "3 a fault", "4 inconclusive", "5 a GPU"):
        assert code in " ".join(text.split())


@pytest.mark.parametrize("name", [n for n in COMMANDS if n != "rules"])
def test_every_help_has_an_example(invoke, name):
    text = invoke(name, "--help").stdout
    if name == "kernels":
        text = invoke("kernels", "list", "--help").stdout
    assert f"advisor {name}" in text
    assert "Example" in text


@pytest.mark.parametrize(
    "words", [["--help"], ["profile", "--help"], ["report", "/nowhere"], ["apply", "--min-gain", "5"]]
)
def test_no_command_imports_torch_on_the_way(words):
    code = (
        "import sys\n"
        "from advisor.cli.main import cli\n"
        "try:\n    cli.main(sys.argv[1:])\n"
        "except SystemExit:\n    pass\n"
        "bad = {'torch', 'cupy', 'numpy', 'jinja2'} & set(sys.modules)\n"
        "assert not bad, bad\n"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_imports_no_command():
    code = (
        "import sys\nfrom advisor.cli.main import cli\n"
        "try:\n    cli.main(['--help'])\nexcept SystemExit:\n    pass\n"
        "assert not [m for m in sys.modules if m in ('advisor.cli.profile', 'advisor.reporting', 'advisor.core.profile')]\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_closed_pipe_is_silent():
    code = "import sys; from advisor.cli.main import main; sys.argv = ['advisor', '--help']; main()"
    shell = f'"{sys.executable}" -c "{code}" | true; echo "${{PIPESTATUS[0]}}"'
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True)
    assert done.stdout.strip() in ("0", "141")  # 0 when the text was written before the reader left
    assert done.stderr == ""
