"""The example in docs/guides/add-a-rule.md is a sound rule, and its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from advisor.cli.rules_commands import rules as group
from advisor.rules import load, run_cases
from advisor.rules.json_schema import schema

GUIDE = (Path(__file__).parents[2] / "docs/guides/add-a-rule.md").read_text(encoding="utf-8")
RULE, GAIN, CASES = re.findall(r"```yaml\n(.*?)```", GUIDE, flags=re.DOTALL)


def test_the_example_loads_and_its_cases_pass(tmp_path):
    (tmp_path / "loader-late.yaml").write_text(RULE, encoding="utf-8")
    (tmp_path / "loader-late.cases.yaml").write_text(CASES, encoding="utf-8")
    advice = RULE.replace('transform: loader_workers\nparameters: {workers: "6"}\n', GAIN).replace(
        "loader-late", "advice"
    )
    (tmp_path / "advice.yaml").write_text(advice, encoding="utf-8")
    (tmp_path / "advice.cases.yaml").write_text(CASES.replace("loader-late", "advice"), encoding="utf-8")
    results = run_cases(load([tmp_path], shipped=False))
    assert len(results) == 6
    assert all(result.passed for result in results), results


def test_the_example_fits_the_schema_for_editors():
    import jsonschema

    jsonschema.Draft202012Validator(schema()).validate(yaml.safe_load(RULE))


def test_the_commands_of_the_guide_exist():
    for name in re.findall(r"advisor rules (\w+)", GUIDE):
        assert name in group.commands
