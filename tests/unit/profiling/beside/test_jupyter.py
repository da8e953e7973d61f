"""Notebooks: cells as scripts, and the magic over a cell."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

import advisor
from advisor.core.errors import AdvisorError
from advisor.loop import sources
from advisor.profiling.beside import jupyter, notebooks
from advisor.profiling.beside.command import ScriptCommand


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def cell(kind, *lines):
    return {"cell_type": kind, "source": [f"{line}\n" for line in lines]}


def test_a_notebooks_code_cells_run_as_a_script(own_cache):
    (own_cache / "beside.py").write_text("VALUE = 4\n")
    cells = [
        cell("markdown", "# Title"),
        cell("code", "%matplotlib inline", "import beside"),
        cell("code", "x = beside.VALUE"),
    ]
    (own_cache / "train.ipynb").write_text(json.dumps({"cells": cells}))
    command = ScriptCommand.parse(["train.ipynb", "--lr", "1"])
    assert (command.name, command.arguments) == ("train.ipynb", ("--lr", "1"))
    assert command.words == ("train.ipynb", "--lr", "1")  # what a later command takes
    assert ScriptCommand.parse(command.words) == command
    assert runpy.run_path(command.argv[1])["x"] == 4
    # Places are told by the cell and the line in it, of the file that the user has.
    lines = Path(command.argv[1]).read_text().splitlines()
    assert sources.place(command.argv[1], lines.index("x = beside.VALUE") + 1) == "train.ipynb cell 2:1"
    assert sources.place(command.argv[1], lines.index("import beside") + 1) == "train.ipynb cell 1:2"
    assert sources.place(str(own_cache / "train.py"), 7).endswith("train.py:7")


@pytest.mark.parametrize("text", ["", "[]", '{"cells": [{}]}', "{"])
def test_what_is_no_notebook_is_one_clear_line(own_cache, text):
    (own_cache / "bad.ipynb").write_text(text)
    with pytest.raises(AdvisorError, match="no notebook"):
        notebooks.as_script(own_cache / "bad.ipynb")


def test_of_earlier_cells_only_definitions_are_kept():
    text = "import math\nx = 1\ndef f():\n    return x\n%time f()\nfor i in range(3):\n    f()\nf()\nclass A: pass"
    assert notebooks.definitions(text) == "import math\nx = 1\ndef f():\n    return x\nclass A: pass"
    assert notebooks.definitions("this is no python") == ""


def test_the_magic_runs_the_cell_with_what_was_defined_before_and_shows_the_report(own_cache, monkeypatch, capsys):
    report = own_cache / "advisor-runs" / "cell-1" / "report.html"

    class Process:
        def __init__(self, command, **_):
            if command[3:] == ["runs"]:
                self.stdout = ("two runs\n",)
                return
            self.stdout = (f"[advisor] running {command[-1]}; step 1\n",)
            assert command[2:5] == ["advisor", "profile", "--steps"]
            assert runpy.run_path(command[-1])["y"] == 6
            report.parent.mkdir(parents=True)
            report.write_text('<p title="x">step</p>')

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    monkeypatch.setattr(jupyter.subprocess, "Popen", Process)
    shell = SimpleNamespace(user_ns={"In": ["", "x = 2\nprint(x)", "%%advisor profile"]}, magics={})
    shell.register_magic_function = lambda function, magic_kind, magic_name: shell.magics.update({magic_kind: function})
    advisor.load_ipython_extension(shell)
    shown = shell.magics["cell"]("profile --steps 5", "y = 3 * x")
    assert "&lt;p title=&quot;x&quot;&gt;step" in shown._repr_html_()
    assert "[advisor] running this cell; step 1" in capsys.readouterr().out
    assert shell.magics["cell"]("bench", "y = 1") is None
    shell.magics["line"]("runs")
    assert capsys.readouterr().out == "two runs\n"
    shell.magics["line"]("profile")
    assert "%%advisor profile" in capsys.readouterr().err
