"""`advisor rules`, as people call it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from rule_files import CASES, RULE, spoiled, write

from advisor import pipeline
from advisor.cli.main import cli
from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.metrics import BY_NAME, SPECS
from advisor.core.profile import StepProfile
from advisor.resources import rules_dir
from advisor.rules.yaml_nodes import RuleError


def call(capsys, *words):
    """Exit code, stdout and stderr of `advisor rules WORDS`."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["rules", *[str(word) for word in words]])
    output = capsys.readouterr()
    return ended.value.code, output.out, output.err


def test_list_shows_areas_and_rules(capsys):
    code, out, _ = call(capsys, "list", "--area", "input")
    assert code == 0
    assert "input-starved" in out
    assert "launch-bound" not in out


def test_list_names_its_columns_and_says_what_semantics_are(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = call(capsys, "list", "--area", "input")
    assert out.split("\n")[0].split("  ")[1].strip() == "rule"
    assert all(name in out.split("\n")[0] for name in ("severity", "semantics", "asks for", "what"))
    assert "reassociated: same maths, other order" in out


@pytest.mark.parametrize("words", [("list",), ("show", "convolutions-in-nchw"), ("show", "launch-bound")])
def test_rules_fit_the_terminal_where_words_allow_it(capsys, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = call(capsys, *words)
    long = [line for line in out.splitlines() if len(line) > 80 and len(line.split()[-1]) < 60]
    assert not [line for line in long if not line.startswith("File: ")]


def test_an_address_stays_beside_the_mark_of_its_list(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = call(capsys, "show", "convolutions-in-nchw")
    assert "-" not in [line.strip() for line in out.splitlines()]


def test_list_as_json_is_json(capsys, tmp_path):
    write(tmp_path)
    code, out, _ = call(capsys, "list", "--format", "json", "--rules", tmp_path)
    rules = {rule["id"]: rule for rule in json.loads(out)["rules"]}
    assert code == 0
    assert rules["slow-thing"]["transform"] == "loader_workers"
    assert rules["slow-thing"]["gain"] is None
    assert (rules["slow-thing"]["cause"], rules["slow-thing"]["role"]) == ("slow-thing", "cause")
    assert len(rules) > 60


def test_show_tells_what_why_thresholds_counter_examples_and_cases(capsys):
    code, out, _ = call(capsys, "show", "launch-bound")
    assert code == 0
    for words in ("What it says:", "Why:", "`idle_launch_frac` above 15 %: the upper bound", "When it is wrong:", "pytorch/issues/181723", "References:", "not evaluated"):  # fmt: skip
        assert words in out


def test_show_of_no_rule_names_the_nearest(capsys):
    code, _, err = call(capsys, "show", "launch-bond")
    assert code == 2
    assert "Did you mean 'launch-bound'" in err
    assert len(err.strip().splitlines()) == 1


def test_test_passes_on_bundled_rules_and_says_how_many(capsys):
    code, out, _ = call(capsys, "test")
    assert code == 0
    assert "0 failed" in out


def test_test_fails_on_a_failing_case(capsys, tmp_path):
    write(tmp_path, cases=CASES.replace("expect: quiet", "expect: fired"))
    code, out, _ = call(capsys, "test", tmp_path)
    assert code == 1
    assert "FAILED slow-thing: just below: quiet, expected fired" in out
    assert "of 1 rule, " in out


def test_lint_shows_place_line_and_caret(capsys, tmp_path):
    write(tmp_path, spoiled(("above: 5 %", "above: 5"), ("severity: high", "severity: hihg")))
    code, out, _ = call(capsys, "lint", tmp_path)
    assert code == 1
    lines = out.splitlines()
    at = next(number for number, line in enumerate(lines) if "a number without a unit" in line)
    assert "slow-thing.yaml:12:14: " in lines[at]
    assert lines[at + 1].strip() == "above: 5"
    assert lines[at + 2].index("^") == lines[at + 1].index("5")
    assert "Did you mean 'high'" in out
    assert "0 sound rules, 2 faults" in out


def test_lint_tells_faults_in_the_order_of_lines(capsys, tmp_path):
    """Faults are found part by part (the message's, the gain's, unknown keys), and not as they stand in the file."""
    first = RULE.replace("schema: 1\n", "schema: 1\nunknown_key: 1\n").replace("input\n", "inptu\n")
    first = first.replace("high: idle_data_frac", "high: no_metric").replace("{idle_data_frac:pct}", "{no_metric}")
    write(tmp_path, first + "another_key: 2\n", name="b.yaml")
    write(tmp_path, RULE.replace("slow-thing", "other").replace("above: 5 %", "above: 5"), name="a.yaml", cases=CASES)
    code, out, _ = call(capsys, "lint", tmp_path)
    told = re.findall(r"^\S*/([\w.]+yaml):(\d+):(\d+): ", out, re.MULTILINE)
    places = [(name, int(line), int(column)) for name, line, column in told]
    assert code == 1
    assert len(places) >= 6
    assert places == sorted(places)


def test_metrics_are_listed_with_unit_meaning_and_where_they_come_from(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = call(capsys, "metrics")
    assert code == 0
    assert all(f"  {spec.name} " in out and spec.doc in out for spec in SPECS)
    assert all(f"\n{spec.section}: " in out for spec in SPECS)
    _, one, _ = call(capsys, "metrics", "IDLE_data")
    assert re.search(r"idle_data_frac +15 % +measured +needs a CUDA GPU +idle while", one)
    _, asked, _ = call(capsys, "metrics", "own_input_frac")
    assert "Asked by" in asked
    assert "starved-without-loader" in asked
    monkeypatch.setenv("COLUMNS", "80")
    _, narrow, _ = call(capsys, "metrics")
    assert max(map(len, narrow.splitlines())) <= 80


def test_metrics_are_found_by_name_or_glob_or_else_by_meaning(capsys):
    _, by_glob, _ = call(capsys, "metrics", "idle_*", "--format", "json")
    assert {fact["name"] for fact in json.loads(by_glob)["metrics"]} == {n for n in BY_NAME if n.startswith("idle_")}
    _, by_meaning, _ = call(capsys, "metrics", "GradScaler", "--json")
    assert [fact["name"] for fact in json.loads(by_meaning)["metrics"]] == ["grad_scaler"]
    fact = json.loads(by_meaning)["metrics"][0]
    assert (fact["kind"], fact["written"], fact["provenance"]) == ("flag", "true or false", ["measured"])
    assert fact["gathered"]
    code, out, err = call(capsys, "metrics", "loadr_frac")
    assert (code, out) == (2, "")
    assert "no metric 'loadr_frac'" in err
    assert "Did you mean 'loader_frac'?" in err


def test_lint_reads_the_cases_too(capsys, tmp_path):
    write(tmp_path, cases=CASES.replace("workers: 0}", "workerz: 0}", 1))
    code, out, _ = call(capsys, "lint", tmp_path)
    assert code == 1
    assert "unknown metric 'workerz'" in out


def test_rules_are_checked_beside_the_bundled_ones(capsys, tmp_path):
    text, cases = (text.replace("slow-thing", "input-starved") for text in (RULE, CASES))
    path = write(tmp_path, text, "input-starved.yaml", cases)
    code, out, _ = call(capsys, "lint", tmp_path)
    assert code == 1
    assert out.startswith(f"{path}:1:1: the id input-starved is taken by ")
    assert "0 sound rules, 1 fault" in out
    code, _, err = call(capsys, "test", tmp_path)
    assert code == 2
    assert "the id input-starved is taken by " in err


def test_lint_tells_of_the_rules_at_the_paths_alone(capsys, tmp_path):
    write(tmp_path)
    assert call(capsys, "lint", tmp_path)[:2] == (0, "1 sound rule, 0 faults\n")
    assert call(capsys, "lint", rules_dir() / "input")[0] == 0


def test_recommend_refuses_a_transform_that_nobody_has(tmp_path):
    write(tmp_path / "rules", spoiled(("transform: loader_workers", "transform: loader_worker")))
    profile = StepProfile(
        script="train.py", argv=(), created="", environment=Environment(device="cpu"), step_kind="optimizer",
        step_us=None, wall_us=None,
    )  # fmt: skip
    storage.save(tmp_path / "profile.json", profile)
    with pytest.raises(RuleError, match="loader_worker"):
        pipeline.recommend(tmp_path, rules_dirs=[tmp_path / "rules"])


def test_lint_of_nothing_is_wrong_usage(capsys, tmp_path):
    code, _, err = call(capsys, "lint", tmp_path)
    assert code == 2
    assert "no rules in" in err


def test_help_is_worth_reading(capsys):
    for words in (("--help",), ("lint", "--help"), ("test", "--help")):
        code, out, _ = call(capsys, *words)
        assert code == 0
        assert "advisor rules" in out or "Commands" in out


def test_the_commands_import_neither_torch_nor_cupy():
    program = (
        "import sys\nfrom advisor.cli.main import cli\n"
        "try:\n    cli.main(['rules', 'test'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert not {'torch', 'cupy', 'numpy'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
