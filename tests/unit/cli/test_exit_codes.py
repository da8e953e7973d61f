"""The table of exit codes in `advisor --help`: each holds for every command that can come to it."""

from __future__ import annotations

import re

import pytest
import samples

from advisor.cli.main import COMMANDS, INTERRUPTED
from advisor.core.errors import AdvisorError, ExitCode

# One call of each command that comes through, on what the fixtures put in place.
CALLS = {
    "profile": ("profile", "train.py"),
    "apply": ("apply", "--auto", "train.py"),
    "apply --plan": ("apply", "--plan", "plan.yaml", "train.py"),
    "try": ("try", "--patch", "idea.patch", "train.py"),
    "plan show": ("plan", "show", "plan.yaml"),
    "run": ("run", "train.py"),
    "recommend": ("recommend", "last"),
    "report": ("report", "last"),
    "conv": ("conv", "last"),
    "memory": ("memory", "train.py"),
    "scale": ("scale", "last"),
    "compare": ("compare", "a", "b"),
    "repro": ("repro", "last"),
    "explain": ("explain", "last"),
    "undo": ("undo", "plan.yaml"),
    "runs": ("runs",),
    "runs clean": ("runs", "clean", "--keep", "1"),
    "rules list": ("rules", "list"),
    "rules metrics": ("rules", "metrics"),
    "rules show": ("rules", "show", "launch-bound"),
    "rules lint": ("rules", "lint"),
    "rules test": ("rules", "test"),
    "kernels list": ("kernels", "list"),
    "kernels verify": ("kernels", "verify"),
    "bench": ("bench", "ops"),
    "doctor": ("doctor",),
}
# Where each command does its work: a fault planted there is the command's.
WORK = {
    "plan show": "advisor.runs.find_plan",
    "undo": "advisor.runs.find_plan",
    "runs": "advisor.runs.listing.listed",
    "runs clean": "advisor.runs.listing.listed",
    "rules list": "advisor.rules.load",
    "rules metrics": "advisor.rules.load",
    "rules show": "advisor.rules.load",
    "rules lint": "advisor.rules.check",
    "rules test": "advisor.rules.load",
    "bench": "advisor.bench.ops.run",
    "doctor": "advisor.cli.examination.checks",
}


@pytest.fixture
def sound(monkeypatch, tmp_path):
    """Every command of CALLS has what it needs, and none leaves this folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.yaml").write_text("schema_version: 1\nscript: train.py\nitems: []\n", encoding="utf-8")
    monkeypatch.setattr("advisor.bench.ops.run", lambda *_, **__: ExitCode.OK)
    monkeypatch.setattr("advisor.cli.examination.checks", lambda *, measure, say: ())
    monkeypatch.setattr("advisor.trials.ledger.told_here", lambda: "")


def plant(monkeypatch, pipeline, command: str, error: BaseException) -> None:
    def fail(*_, **__):
        raise error

    pipeline.error = error
    if command in WORK:
        monkeypatch.setattr(WORK[command], fail)
    if command == "kernels list":
        pipeline.kernels_list = fail
    if command == "apply --plan":
        pipeline.prove = fail


def test_every_command_is_called_here():
    assert {words[0] for words in CALLS.values()} == set(COMMANDS)


@pytest.mark.parametrize("command", CALLS)
def test_0_done(invoke, sound, command):
    result = invoke(*CALLS[command])
    assert result.exit_code == ExitCode.OK, result.stderr


@pytest.mark.parametrize("command", CALLS)
def test_2_wrong_usage_is_one_line(invoke, sound, command):
    words = command.split()[:2] if command.split()[0] in ("rules", "kernels", "plan") else command.split()[:1]
    result = invoke(*words, "--no-such-option")
    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert result.stderr.startswith("advisor: No such option '--no-such-option'")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (AdvisorError("no such thing"), ExitCode.USAGE),
        (PermissionError(13, "Permission denied", "x.json"), ExitCode.USAGE),
        (ValueError("planted"), ExitCode.OWN_FAULT),
        (FileNotFoundError(2, "No such file", "x.json"), ExitCode.OWN_FAULT),
        (AdvisorError("it was left open", exit_code=ExitCode.INCONCLUSIVE), ExitCode.INCONCLUSIVE),
        (AdvisorError("no GPU", exit_code=ExitCode.GPU_REQUIRED), ExitCode.GPU_REQUIRED),
        (KeyboardInterrupt(), INTERRUPTED),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else str(int(value)),
)
@pytest.mark.parametrize("command", CALLS)
def test_a_failure_is_one_line_and_its_code(invoke, pipeline, sound, monkeypatch, command, error, code):
    plant(monkeypatch, pipeline, command, error)
    result = invoke(*CALLS[command])
    assert (result.exit_code, result.stdout) == (code, "")
    told = [line for line in result.stderr.splitlines() if line.startswith("advisor: ")]
    assert len(told) == 1
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("code", [1, 7, 137])
@pytest.mark.parametrize("command", ["profile", "run", "apply", "apply --plan"])
def test_the_scripts_own_code_is_passed_on(invoke, pipeline, sound, command, code):
    pipeline.exit_code = code
    assert invoke(*CALLS[command]).exit_code == code


def test_1_is_what_was_asked_to_fail_on(invoke, pipeline, sound, tmp_path, monkeypatch):
    (tmp_path / "broken.yaml").write_text("a: 1\n")
    pipeline.runs = {"a": samples.resnet50(), "b": samples.resnet50(scale=1.1)}
    pipeline.kernel_rows = [{"family": "f", "case": "k", "passed": False, "detail": "two runs differ"}]
    for words in (
        ("profile", "--fail-on", "high", "train.py"),
        ("recommend", "--fail-on", "high", "last"),
        ("compare", "a", "b", "--fail-on-regression", "3%"),
        ("rules", "lint", "broken.yaml"),
        ("kernels", "verify"),
    ):
        assert invoke(*words).exit_code == ExitCode.FINDINGS, words


def test_4_is_what_was_left_open(invoke, pipeline, sound):
    pipeline.runs = {"a": samples.resnet50(), "b": samples.resnet50(environment=samples.LAPTOP)}
    assert invoke("compare", "a", "b", "--fail-on-regression", "3%").exit_code == ExitCode.INCONCLUSIVE
    pipeline.exit_code = 4
    assert invoke("apply", "--auto", "train.py").exit_code == ExitCode.INCONCLUSIVE
    assert invoke("apply", "--plan", "plan.yaml", "train.py").exit_code == ExitCode.INCONCLUSIVE


def test_the_help_names_every_code(invoke):
    told = dict(re.findall(r"^ +(\d+)  (.+)$", invoke("--help").stdout.split("Exit codes")[1], re.MULTILINE))
    assert {int(code) for code in told} == {*map(int, ExitCode), INTERRUPTED}
