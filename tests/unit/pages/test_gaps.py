"""Goals, who reaches them, and what holds the others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from advisor.bench import goals, units
from advisor.ops import catalog
from advisor.ops.family import Case
from benchmark_pages import gaps, page

BUSY = {"memory": 0.5, "l1": 0.6, "issue": 0.4, "sms": 1.0, "warps": 0.48}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"l1": 0.75}, "L1, 75 % of its peak while SMs work"),
        ({"l1": 0.8, "memory": 0.81}, "memory, 81 % of its peak while SMs work"),
        ({"l1": 0.6, "sms": 0.8}, "L1, 75 % of its peak while SMs work; no work 20 % of the time"),
        (
            {"l1": 0.6, "sms": 0.81},
            "latency: nothing above 75 % while SMs work, 48 % of the warps; no work 19 % of the time",
        ),
        ({"sms": 0.9}, "latency: nothing above 67 % while SMs work, 48 % of the warps; no work 10 % of the time"),
        ({"sms": 0.91}, "latency: nothing above 66 % while SMs work, 48 % of the warps"),
        ({"l1": 0.749}, "latency: nothing above 75 % while SMs work, 48 % of the warps"),
        ({"l1": 0.55}, "latency: nothing above 55 % while SMs work, 48 % of the warps"),
        ({"l1": 0.551}, "latency: nothing above 56 % while SMs work, 48 % of the warps"),
        ({"warps": 0.99}, "latency: nothing above 60 % while SMs work, 99 % of the warps"),  # no unit that is full
    ],
)
def test_what_holds_a_kernel(change: dict[str, float], words: str) -> None:
    assert gaps.held_by({**BUSY, **change}) == words


def test_what_was_not_counted_is_not_told() -> None:
    assert gaps.held_by({"sms": 1.0}) == "latency: nothing above 0 % while SMs work"
    assert gaps.held_by({"l2": 0.3}) == "latency: nothing above 30 % while SMs work"


def case_of(family: str, name: str) -> Case:
    return next(c for c in catalog.get(family).benchmark if c.name == name and goals.large(c) and not c.wins())


def holders(case: Case, family: str) -> list[str]:
    return [goal.title for goal in goals.GOALS if goal.holds_for(family, case)]


@pytest.mark.parametrize(
    ("family", "name", "titles"),
    [
        ("batchnorm_act", "bn+add+relu", ["batch norm (+ add) (+ activation)"]),
        ("depthwise", "depthwise k3 s2", ["depthwise 3×3"]),
        ("depthwise", "depthwise k7 s1 bias", ["depthwise 7×7"]),
        ("depthwise", "depthwise k3 s1+bn+relu", []),  # its limit has the norm in it
        ("grouped", "grouped 3x3 of 4 s1", ["grouped 3×3"]),
        ("pooling", "max_pool k3s2", ["max-pool 3×3, stride 2"]),
        ("pooling", "max_pool k2s2", []),
        ("layer_norm", "layernorm to float32", ["layer norm"]),
        ("upsample", "bilinear corners to 128x128+cat128", ["bilinear upsampling × 2"]),
        ("upsample", "nearest to 128x128", []),
    ],
)
def test_who_is_to_reach_a_goal(family: str, name: str, titles: list[str]) -> None:
    case = case_of(family, name)
    assert holders(case, family) == titles
    for other in (
        replace(case, dtype="float16"), replace(case, shape=(8, 8, 8, 8)), replace(case, layout="nchw"),
        replace(case, wins=lambda: "slower"),
    ):  # fmt: skip
        assert holders(other, family) == []
    assert holders(case, "bias_act") == []


def test_what_is_bilinear_doubles_the_sides() -> None:
    for case in catalog.get("upsample").benchmark:
        if holders(case, "upsample"):
            assert f" to {2 * case.shape[2]}x{2 * case.shape[3]}" in case.name


def row(shape: list[int], way: str, share: float, **more: object) -> dict[str, object]:
    return {
        "name": "bn+relu", "pass": way, "shape": shape, "dtype": "bfloat16", "layout": "nhwc",
        "advisor_ms": 1.0, "eager_ms": 2.5, "compile_ms": None, "limit_ms": share, "spread": 0.01, "eager_spread": 0.0,
        "advisor_host_us": 4.0, "eager_host_us": 3.0, "n": 25, "error": 0.0, "baseline_error": 0.0, "kernel_sha": "",
        "torch": "2.11", "date": "2026-01-02", **more,
    }  # fmt: skip


def made(folder: Path, rows: list[dict[str, object]]) -> str:
    machine = folder / "some-gpu"
    machine.mkdir()
    document = {"gpu": "Some GPU", "cuda": "13.0", "copy_gbps": 4000.0, "rows": rows}
    (machine / "ops.json").write_text(json.dumps(document))
    return page.files(folder)[f"{machine.name}/{page.PAGE}"]


LARGE, LARGER = [256, 64, 112, 112], [256, 256, 56, 56]


def test_the_page_tells_who_reaches_a_goal_and_what_holds_the_others(tmp_path: Path) -> None:
    counted = {**BUSY, "l1": 0.88}
    text = made(
        tmp_path,
        [
            row(LARGE, "forward", 0.84),
            row(LARGE, "backward", 0.871),
            row(LARGER, "forward", 0.7, units=counted),
            row(LARGER, "backward", 0.849, units=None),
            row([128, 64, 32, 32], "forward", 0.1),  # small
        ],
    )
    section = text[text.index("## Goals") : text.index("### batchnorm_act")]
    assert "| batch norm (+ add) (+ activation) | forward | 0.85 | 2 | 0 | 0.770 | 0.700 |" in section
    assert "| batch norm (+ add) (+ activation) | backward | 0.85 | 2 | 1 | 0.860 | 0.849 |" in section
    assert "| layer norm | forward | 0.80 | 0 | 0 | – | – |" in section
    assert [line for line in section.splitlines() if line.startswith("| bn")] == [
        "| bn+relu | 256×256×56×56 | forward | 0.700 | 0.85 | 2.50 "
        "| L1 88 %, memory 50 %, issue 40 %; SMs 100 %, warps 48 % | L1, 88 % of its peak while SMs work |",
        "| bn+relu | 256×64×112×112 | forward | 0.840 | 0.85 | 2.50 | – | no counters on file |",
        "| bn+relu | 256×256×56×56 | backward | 0.849 | 0.85 | 2.50 | – | no counters on file |",
    ]
    assert text.index("| family | pass |") < text.index("## Goals")


def test_where_all_reach_their_goals_no_table_is_behind(tmp_path: Path) -> None:
    text = made(tmp_path, [row(LARGE, "forward", 0.85)])
    assert "| forward | 0.85 | 1 | 1 | 0.850 | 0.850 |" in text
    assert "short of its goal |" not in text


def test_the_rule_is_stated_as_it_is_applied() -> None:
    assert f"{gaps.FULL:.0%}".replace("%", " %") in gaps.TEXT
    assert f"{gaps.IDLE:.0%}".replace("%", " %") in gaps.TEXT
    assert set(units.THROUGHPUT).isdisjoint(units.OCCUPANCY)
