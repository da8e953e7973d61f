"""Folders of rules: found, checked against each other, never followed in circles; and the cases beside them."""

from __future__ import annotations

import os

import pytest
from rule_files import CASES, RULE, spoiled, write

from advisor.core import architectures
from advisor.core.errors import AdvisorError
from advisor.ops import catalog, dispatch_table
from advisor.rules import check, load, run_cases


def test_shipped_rules_and_a_users_rule_load_together(tmp_path):
    write(tmp_path)
    both, shipped = load([tmp_path]), load()
    assert len(both) == len(shipped) + 1
    assert "slow-thing" in {rule.id for rule in both}


def test_a_file_named_twice_is_read_once(tmp_path):
    path = write(tmp_path)
    assert len(load([path, tmp_path, path], shipped=False)) == 1


def test_a_second_rule_of_the_same_id_is_refused(tmp_path):
    write(tmp_path)
    other = write(tmp_path / "other")
    _, problems = check([tmp_path])
    assert len(problems) == 1
    assert "the id slow-thing is taken by" in str(problems[0])
    assert str(other) in str(problems[0]) or "input/slow-thing.yaml" in str(problems[0])


def test_a_users_rule_cannot_silently_replace_a_shipped_one(tmp_path):
    write(tmp_path, RULE.replace("id: slow-thing", "id: launch-bound"), name="launch-bound.yaml")
    with pytest.raises(AdvisorError, match="the id launch-bound is taken by"):
        load([tmp_path])


def test_yml_is_read_as_well(tmp_path):
    write(tmp_path, name="slow-thing.yml", cases=None)
    assert len(load([tmp_path], shipped=False)) == 1


@pytest.mark.parametrize("make", ["missing", "empty", "only cases", "other files"])
def test_a_folder_without_rules_is_one_clear_line(tmp_path, make):
    folder = tmp_path / "rules"
    if make != "missing":
        folder.mkdir()
    if make == "only cases":
        (folder / "x.cases.yaml").write_text(CASES)
    if make == "other files":
        (folder / "x.txt").write_text("x")
    with pytest.raises(AdvisorError, match=r"no rules (at|in)"):
        load([folder], shipped=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_folder_is_one_clear_line(tmp_path):
    write(tmp_path)
    (tmp_path / "input").chmod(0)
    try:
        with pytest.raises(AdvisorError, match="cannot be read"):
            load([tmp_path], shipped=False)
    finally:
        (tmp_path / "input").chmod(0o755)


def test_loops_of_links_end(tmp_path):
    write(tmp_path)
    (tmp_path / "input" / "again").symlink_to(tmp_path)
    assert len(load([tmp_path], shipped=False)) == 1
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(AdvisorError):
        load([loop], shipped=False)


def test_a_dead_link_to_a_rule_is_told(tmp_path):
    write(tmp_path)
    (tmp_path / "input" / "gone.yaml").symlink_to(tmp_path / "nowhere.yaml")
    with pytest.raises(AdvisorError, match=r"gone\.yaml cannot be read"):
        load([tmp_path], shipped=False)


def results(tmp_path, rule=RULE, cases=CASES):
    return run_cases(load([write(tmp_path, rule, cases=cases)], shipped=False))


def test_the_sound_cases_pass(tmp_path):
    assert all(result.passed for result in results(tmp_path))


@pytest.mark.parametrize(
    ("cases", "words"),
    [
        (None, "no cases in slow-thing.cases.yaml"),
        (CASES.replace("expect: quiet", "expect: fired"), "quiet, expected fired"),
        (CASES.replace("idle_data_frac: 4.9 %", "idle_data_frac: 1 %"), "within 20 % of its threshold"),
        (CASES.replace("expect: not evaluated\n    missing: [idle_data_frac]", "expect: quiet"), "not evaluated, expected quiet"),
        (CASES[: CASES.index("  - name: no data")], "no case expects 'not evaluated'"),
        (CASES.replace("waits 20 %", "waits 30 %"), "the message is 'The GPU waits 20 %.'"),
        (CASES.replace("missing: [idle_data_frac]", "missing: [workers]"), "missing idle_data_frac, expected workers"),
        (CASES.replace("workers: 0}", "workerz: 0}", 1), "Did you mean 'workers'"),
        (CASES.replace("20 %, workers", "20, workers"), "a number without a unit"),
        (CASES.replace("rule: slow-thing", "rule: other"), "cases of 'other' beside"),
        (CASES.replace("expect: quiet", "expect: silent"), "expect is 'silent'"),
        ("schema: 1\nrule: slow-thing\ncases: []\n", "no cases in"),
    ],
)  # fmt: skip
def test_faulty_cases_fail_and_say_why(tmp_path, cases, words):
    failed = [result.detail for result in results(tmp_path, cases=cases) if not result.passed]
    assert any(words in detail for detail in failed), failed


def test_a_rule_that_promises_more_than_the_step_fails_its_cases(tmp_path):
    failed = [
        r.detail
        for r in results(tmp_path, spoiled(("high: idle_data_frac", "high: 9 * idle_data_frac")))
        if not r.passed
    ]
    assert any("fault in the rule" in detail for detail in failed)


def test_a_rule_whose_threshold_was_turned_round_fails_its_cases(tmp_path):
    failed = [r for r in results(tmp_path, spoiled(("above: 5 %", "below: 5 %"))) if not r.passed]
    assert failed


def test_no_rule_asks_for_kernels_where_none_is_dispatched():
    """Of a family that runs on some architectures alone, at any size: the rules of its transform are quiet on all others."""
    table = dispatch_table.read()
    alone = {f.transform: table[f.id].only[""] for f in catalog.FAMILIES if f.id in table and "" in table[f.id].only}
    assert set(alone) >= {"winograd_conv", "exact_conv"}
    asking = [rule for rule in load() if rule.transform in alone]
    assert {rule.transform for rule in asking} == set(alone)
    for rule in asking:
        of_arch = [part for part in getattr(rule.when, "parts", ()) if getattr(part, "metric", "") == "arch"]
        quiet = {row.sm for row in architectures.ROWS if not all(part.judge(float(row.sm)) for part in of_arch)}
        assert quiet == {row.sm for row in architectures.ROWS} - set(alone[rule.transform]), rule.id
