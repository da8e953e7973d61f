"""What the page says of compute-sanitizer's results."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from advisor.ops import catalog, sources
from advisor.resources import kernels_dir
from benchmark_pages import checks

FOLDER = kernels_dir().parent / "docs" / "benchmarks"
POOLING, UPSAMPLE = catalog.get("pooling"), catalog.get("upsample")


def line(text: str, family: str) -> list[str]:
    (found,) = (line for line in text.splitlines() if line.startswith(f"| {family} |"))
    return [cell.strip() for cell in found.strip("|").split("|")[1:]]


def test_a_row_takes_the_place_of_the_earlier_one_and_others_stay() -> None:
    first = checks.merged([], checks.row(UPSAMPLE, "racecheck", True, "clean"))
    both = checks.merged(first, checks.row(POOLING, "memcheck", False, "3 errors"))
    assert [(row["family"], row["tool"]) for row in both] == [("pooling", "memcheck"), ("upsample", "racecheck")]
    again = checks.merged(both, checks.row(POOLING, "memcheck", True, "clean"))
    assert [row["clean"] for row in again] == [True, True]


def test_a_family_that_is_gone_leaves() -> None:
    gone = {**asdict(checks.row(POOLING, "memcheck", True, "clean")), "family": "gone"}
    assert [row["family"] for row in checks.merged([gone], checks.row(POOLING, "memcheck", True, "clean"))] == [
        "pooling"
    ]


def test_clean_found_older_and_missing_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clean = asdict(checks.row(POOLING, "memcheck", True, "clean"))
    found = asdict(checks.row(POOLING, "racecheck", False, "ERROR SUMMARY: 3 errors\n========= Invalid"))
    told = checks.section([clean, found])
    assert line(told, "pooling") == [
        f"clean, {clean['date']}", f"**ERROR SUMMARY: 3 errors**, {clean['date']}", "–",
    ]  # fmt: skip
    assert line(told, "upsample") == ["–", "–", "–"]
    plain = sources.sha256
    monkeypatch.setattr(sources, "sha256", lambda *names: plain(*names) + "changed")
    assert line(checks.section([clean]), "pooling")[0] == f"clean, {clean['date']}, *older*"


def test_where_nothing_is_on_file_that_is_said() -> None:
    told = checks.section([])
    assert "Nothing is on file" in told
    assert "|" not in told


@pytest.mark.skipif(not FOLDER.is_dir(), reason="no checkout: the results are not part of the distribution")
def test_no_family_stands_on_file_with_something_found() -> None:
    for file in FOLDER.glob(f"*/{checks.FILE}"):
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
            assert row["clean"], f"{row['family']} {row['tool']}: {row['told']}"
