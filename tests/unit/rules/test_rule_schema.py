"""Every field is typed; a fault names the field, the place and the fix; no fault hides another."""

from __future__ import annotations

import re

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rule_files import GAIN, RULE, spoiled, write

from advisor.core.errors import AdvisorError
from advisor.rules import check, load
from advisor.rules.docs import rule_text
from advisor.rules.json_schema import schema


def faults(tmp_path, text, **options):
    path = write(tmp_path, text, cases=None, **options)
    rules, problems = check([path])
    return rules, [str(problem) for problem in problems]


def test_the_sound_rule_is_read(tmp_path):
    (rule,), problems = faults(tmp_path, RULE)
    assert not problems
    assert rule.id == "slow-thing"
    assert rule.parameters == {"workers": "4"}
    assert rule.requires == ("idle_data_frac", "workers")
    assert rule.metrics() == ("idle_data_frac", "workers")


def test_a_rule_is_a_cause_of_its_own_unless_it_names_one(tmp_path):
    (alone,), _ = faults(tmp_path, RULE)
    assert (alone.cause, alone.role) == ("slow-thing", "cause")
    (joined,), _ = faults(tmp_path, spoiled(("role: cause", "cause: loader-bound\nrole: description")))
    assert (joined.cause, joined.role) == ("loader-bound", "description")
    text = rule_text(joined)
    assert "cause `loader-bound`" in text
    assert "a description" in text
    assert "cause `" not in rule_text(alone)


# the schema for editors must refuse these too
STRUCTURAL = [
    ("severity: high", "sevrity: high", "unknown field 'sevrity'.*Did you mean 'severity'", 5),
    ("severity: high", "severity: urgent", "severity is 'urgent'", 5),
    ("area: input", "area: inptu", "Did you mean 'input'", 4),
    ("schema: 1", "schema: 2", "schema is '2'", 1),
    ("schema: 1", "schema: one", "schema is 'one'", 1),
    ("title: A thing is slow", "title: on", "YAML reads as bool", 3),
    ("title: A thing is slow", "title: 12:30", "YAML reads as int", 3),
    ("title: A thing is slow", "title:", "title is empty", 3),
    ("title: A thing is slow", "title: [a]", "title is a list", 3),
    ("semantics: exact", "semantics: close", "semantics is 'close'", 7),
    ("status: stable", "status: done", "status is 'done'", 6),
    ("semantics: exact\n", "", "no 'semantics'", 1),
    ("role: cause", "semantics: exact", "Take 'semantics' out", 7),
    ("role: cause", "cause: Host Bound", "cause is 'Host Bound'", 7),
    ("role: cause", "role: descriptoin", "Did you mean 'description'", 7),
    ("transform: loader_workers\n", "transform: loader_workers\nafter: [tf32]\n", "unknown field 'after'", 20),
    ("rationale: Because it does.\n", "", "no 'rationale'", 1),
    ("requires: [idle_data_frac, workers]", "requires: idle_data_frac", "requires is 'idle_data_frac'", 8),
    ("id: slow-thing", "id: Slow_Thing", "lower-case words", 2),
    ("      above: 5 %\n", "      above: 5 %\n      below: 9 %\n", "2 comparisons", 11),
    ("      above: 5 %\n", "", "0 comparisons", 11),
    ("    - metric: idle_data_frac\n", "    - metrik: idle_data_frac\n", "Did you mean 'metric'", 11),
    ("  all:\n", "  al:\n", "unknown field 'al'", 10),
    ('parameters: {workers: "4"}', "parameters: {workers: 4}", "YAML reads as int", 20),
    ("sites: loader", "sites: laoder", "Did you mean 'loader'", 21),
    ("transform: loader_workers\n", f"{GAIN}transform: loader_workers\n", "Take 'gain' out", 20),
    ("  basis: all of the wait\n", "", "gain has no 'basis'", 20),
    ("    source: https://example.org\n", "", "counter-example has no 'source'", 23),
]


@pytest.mark.parametrize(("old", "new", "words", "line"), STRUCTURAL)
def test_structural_faults(tmp_path, old, new, words, line):
    text = spoiled((old, new))
    _, problems = faults(tmp_path, text)
    joined = "\n".join(problems)
    assert re.search(words, joined), joined
    assert f"slow-thing.yaml:{line}:" in joined, joined
    jsonschema = pytest.importorskip("jsonschema")
    document = yaml.safe_load(text)
    assert list(jsonschema.Draft202012Validator(schema()).iter_errors(document)), "the schema for editors takes it"


def test_the_schema_for_editors_takes_the_sound_rule():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator(schema()).validate(yaml.safe_load(RULE))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("metric: workers", "metric: workerz", "unknown metric 'workerz'.*Did you mean 'workers'"),
        ("metric: workers", "metric: w\u043erkers", "unknown metric"),  # a Cyrillic o
        ("above: 5 %", "above: 1e3", "exponent"),
        ("above: 5 %", "above: 0.05", "a number without a unit where % fits"),
        ("above: 5 %", "above: 5 us", "the unit 'us' where % fits"),
        ("above: 5 %", "above: on", "'on' is no plain decimal number"),
        ("above: 5 %", "above: 12:30", "12:30"),
        ("above: 5 %", "above: 0x10", "0x10"),
        ("above: 5 %", "above: 1_000 %", "1_000"),
        ("above: 5 %", "above: 05 %", "05 %"),
        ("above: 5 %", "above: .inf", ".inf"),
        ("above: 5 %", "above: .nan", ".nan"),
        ("above: 5 %", "above: 99999999999999999999 %", "no plain decimal"),
        ("above: 5 %", "above: [5]", "compared with a list"),
        ("above: 5 %", "is: 5 %", "'is' on idle_data_frac, which is a number"),
        ("metric: workers\n      at_most: 0", "metric: on_gpu\n      is: yes", "'yes' for on_gpu, which is a flag"),
        ("metric: workers\n      at_most: 0", "metric: on_gpu\n      above: 3", "'above' on on_gpu, which is a flag"),
        ("metric: workers\n      at_most: 0", "metric: autocast\n      above: 3", "'above' on autocast, which is a text"),
        ("metric: workers\n      at_most: 0", "metric: autocast\n      is: no", "which is a text"),
        ("      because: a reason\n", "", "has no reason"),
        ("requires: [idle_data_frac, workers]", "requires: [idle_data_frac]", "reads workers, which 'requires' lacks"),
        ("requires: [idle_data_frac, workers]", "requires: [idle_data_frac, workers, arch]", "arch, which the rule never reads"),
        ("requires: [idle_data_frac, workers]", "requires: [workers, workers, idle_data_frac]", "twice"),
        ("{idle_data_frac:pct}", "{idle_data_frac.__class__}", "a brace that is no"),
        ("{idle_data_frac:pct}", "{0}", "unknown metric '0'"),
        ("{idle_data_frac:pct}", "{idle_data_frac!r}", "a brace"),
        ("{idle_data_frac:pct}", "{idle_data_frac:time}", "does not fit"),
        ("{idle_data_frac:pct}", "{idle_data_frac:hex}", "unknown form"),
        ("{idle_data_frac:pct}", "{idle_data", "a brace"),
        ("high: idle_data_frac", "high: 0.5", "upper bound is a constant"),
        ("high: idle_data_frac", "high: idle_data_frc", "Did you mean 'idle_data_frac'"),
        ("high: idle_data_frac", "high: step_us", "a value in us"),
        ("high: idle_data_frac", "high: __import__", "unknown metric '__import__'"),
        ("sites: loader", "gates: yes", "gates is 'yes'; expected true or false"),
        ("transform: loader_workers", "transform: loader_worker", "Did you mean 'loader_workers'"),
        ("id: slow-thing", "id: other-thing", "the name of the file"),
        ("  all:\n    - metric: idle_data_frac", "  all: []\n  any:\n    - metric: idle_data_frac", "all and any in one condition"),
        ("when:\n  all:", "when: true\nx:\n  all:", "a condition is 'true'"),
    ],
)  # fmt: skip
def test_faults_of_meaning(tmp_path, old, new, words):
    rules, problems = faults(tmp_path, spoiled((old, new)))
    assert not rules
    assert re.search(words, "\n".join(problems)), problems


def test_all_faults_of_a_file_are_told_at_once(tmp_path):
    _, problems = faults(
        tmp_path, spoiled(("severity: high", "severity: x"), ("above: 5 %", "above: 5"), ("area: input", "area: y"))
    )
    assert len(problems) == 3


def test_load_raises_the_first_and_counts_the_rest(tmp_path):
    path = write(tmp_path, spoiled(("severity: high", "severity: x"), ("above: 5 %", "above: 5")))
    with pytest.raises(AdvisorError, match=r"slow-thing.yaml:\d+:\d+: .*1 more"):
        load([path], shipped=False)


def test_conditions_nest_six_deep_and_no_further(tmp_path):
    inner = "{metric: workers, at_most: 0, because: x}"
    for _ in range(7):
        inner = f"{{not: {inner}}}"
    _, problems = faults(
        tmp_path,
        spoiled(("    - metric: workers\n      at_most: 0\n      because: another reason\n", f"    - {inner}\n")),
    )
    assert any("nested deeper than 6" in problem for problem in problems)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.integers(0, len(RULE)),
    length=st.integers(0, 40),
    inserted=st.text(alphabet="ab:-[]{},'\"#% \n01.x", max_size=12),
)
def test_a_damaged_rule_is_read_or_refused_never_worse(tmp_path, start, length, inserted):
    rules, problems = faults(tmp_path, RULE[:start] + inserted + RULE[start + length :])
    assert rules or problems
