"""The first command of the README, and what holds it to having shown something."""

from __future__ import annotations

import re
import runpy
import subprocess
from pathlib import Path

import pytest

from advisor.core import storage
from advisor.core.verdict import Blocks, StackVerdict, TrialLog, Verdict

REPO = Path(__file__).resolve().parents[2]
GAINED = runpy.run_path(str(REPO / ".ci" / "gained.py"))
PROVED = StackVerdict(passed=True, detail="", speedup=2.1, speedup_low=2.0, speedup_high=2.2)


def log(status: str, reason: str = "as told", *, timed: bool = True, **more: object) -> TrialLog:
    blocks = Blocks(off_us=(2.0,), on_us=(1.0,)) if timed else Blocks()
    verdict = Verdict(transform="fused_optimizer", title="fused optimizer", status=status, reason=reason, blocks=blocks)
    return TrialLog(script="train.py", argv=(), verdicts=(verdict,), **more)


@pytest.mark.parametrize(
    ("code", "found", "line", "shown"),
    [
        (
            0,
            log("kept", stack=PROVED),
            "Gained: 2.10× (2.00 to 2.20) the plain script's speed, by fused optimizer.",
            True,
        ),
        (4, log("unconfirmed"), "Gained nothing. fused optimizer: unconfirmed, as told.", True),
        (0, log("reverted"), "Gained nothing. fused optimizer: reverted, as told.", True),
        (
            4,
            log("inconclusive", "noise hides it"),
            "Gained nothing. fused optimizer: inconclusive, noise hides it.",
            True,
        ),
        (4, log("inconclusive", timed=False), "No change was tried to a verdict of its own (exit code 4).", False),
        (0, log("not applicable", timed=False), "No change was tried to a verdict of its own (exit code 0).", False),
        (4, log("skipped", "out of time", timed=False), "(exit code 4). fused optimizer: skipped, out of time", False),
        (
            3,
            log("skipped", timed=False, fault="No module named 'numpy'"),
            "(exit code 3). No module named 'numpy'",
            False,
        ),
        (143, log("kept", stack=PROVED), "(exit code 143)", False),
        (4, TrialLog(script="train.py", argv=()), "nothing was recommended", False),
    ],
)
def test_the_demo_has_shown_something_or_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], code: int, found: TrialLog, line: str, shown: bool
) -> None:
    folder = tmp_path / "train-1"
    folder.mkdir()
    storage.save(folder / "trials.json", found)
    assert GAINED["main"](code, tmp_path) == (0 if shown else 1)
    said = capsys.readouterr().out.splitlines()
    assert line in said[-1]
    assert str(folder / "report.html") in said[-2]


def test_a_demo_without_a_search_fails(tmp_path: Path) -> None:
    assert GAINED["main"](0, tmp_path) == 1


def test_make_lets_no_failure_of_the_demo_pass() -> None:
    """What make would run: the search's own exit code goes to the judge, whose exit code is the recipe's."""
    shown = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "--always-make", "demo", "VENV=none"],
        cwd=REPO,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    *_, last = shown.strip().splitlines()
    assert re.fullmatch(
        r"code=0; (?:\w+=\w+ )?(\S+)/advisor apply --auto .+ \|\| code=\$\?; \1/python \.ci/gained\.py \$code advisor-runs",
        last,
    )
    assert "|| true" not in shown
    assert "test $?" not in shown


def test_ci_runs_the_demo_first_and_where_nothing_is_installed() -> None:
    lines = (REPO / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    steps = [line for line in lines if line.startswith(("git ", "make "))]
    assert steps == ['git clone --quiet . "$empty/clone"', 'make -C "$empty/clone" demo', "make lint", "make test"]
    assert "set -euo pipefail" in lines
