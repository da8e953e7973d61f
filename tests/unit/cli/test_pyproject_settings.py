"""Defaults from [tool.advisor] of pyproject.toml: what is typed wins, and what is no option is one clear line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from advisor.core.errors import ExitCode

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib")


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / ".git").mkdir()
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    return tmp_path / "pyproject.toml"


def test_options_come_from_the_file_unless_they_are_typed(invoke, pipeline, project):
    project.write_text(
        '[tool.advisor]\nsteps = 33\n[tool.advisor.profile]\nwarmup = 4\nno-counters = true\nout = "runs/x"\n'
    )
    assert invoke("profile", "train.py").exit_code == 0
    kwargs = pipeline.calls["profile"][1]
    assert (kwargs["steps"], kwargs["warmup"], kwargs["counters"], kwargs["out"]) == (33, 4, False, Path("runs/x"))
    assert invoke("profile", "--steps", "5", "train.py").exit_code == 0
    assert pipeline.calls["profile"][1]["steps"] == 5
    assert invoke("recommend", "last").exit_code == 0  # has no option `steps`


def test_repeatable_options_are_lists(invoke, pipeline, project):
    project.write_text('[tool.advisor.apply]\nskip = ["tf32", "compile"]\nmax-time = "90s"\nmin-gain = "2%"\n')
    assert invoke("apply", "--auto", "train.py").exit_code == 0
    options = pipeline.calls["apply"][1]["options"]
    assert (options.skip, options.time_s, options.min_gain) == (("tf32", "compile"), 90.0, 0.02)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tool.advisor.profile]\nstepps = 3\n", "Did you mean 'steps'?"),
        ("[tool.advisor]\nnothing = 3\n", "is no option"),
        ("[tool.advisor]\nprofile = 3\n", "a table of options"),
        ("[tool.advisor\n", "is not TOML"),
        ('[tool.advisor.profile]\nsteps = "many"\n', "'many' is not a valid integer"),
    ],
)
def test_what_is_wrong_there_is_one_clear_line(invoke, pipeline, project, text, says):
    project.write_text(text)
    result = invoke("profile", "train.py")
    assert (result.exit_code, result.stderr.count("\n")) == (ExitCode.USAGE, 1)
    assert says in result.stderr


def test_help_is_the_same_everywhere_and_other_projects_files_do_not_matter(invoke, pipeline, project):
    plain = invoke("profile", "--help").stdout
    project.write_text("[tool.other]\nx = 1\n")
    assert invoke("profile", "train.py").exit_code == 0
    assert invoke("profile", "--help").stdout == plain
