"""What Tab completes, asked as a shell asks."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from advisor.cli.main import cli


@pytest.mark.parametrize(
    ("typed", "begun", "offers"),
    [
        (["pro"], "", "profile"),
        (["apply", "--auto", "--max"], "", "--max-time"),
        (["try", "--change"], "amp", "amp_bf16"),
        (["apply", "--skip"], "comp", "compile"),
        (["explain"], "conv", "convolutions-in-nchw"),
        (["explain"], "chan", "channels_last"),
        (["rules", "show"], "launch", "launch-bound"),
        (["report"], "la", "last"),
        (["compare", "last"], "advisor-runs/tr", "advisor-runs/train-1"),
    ],
)
def test_names_are_completed(tmp_path, monkeypatch, typed, begun, offers):
    monkeypatch.chdir(tmp_path)
    run = Path("advisor-runs/train-1")
    run.mkdir(parents=True)
    (run / "session.json").write_text("{}")
    if not begun:
        *typed, begun = typed
    found = BashComplete(cli, {}, "advisor", "_ADVISOR_COMPLETE").get_completions(typed, begun)
    assert offers in [item.value for item in found]


@pytest.mark.parametrize(
    "typed", [["profile"], ["apply", "--auto"], ["run"], ["try", "--change", "compile"], ["memory"]]
)
def test_scripts_are_the_shells_files(typed):
    """Click offered nothing for them, and bash then offers no file either."""
    found = BashComplete(cli, {}, "advisor", "_ADVISOR_COMPLETE").get_completions(typed, "tr")
    assert [(item.type, item.value) for item in found] == [("file", "tr")]
