"""What is dispatched and what docs/benchmarks holds agree: nothing runs our kernels that was not measured to win."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from advisor.bench import goals
from advisor.ops import catalog, dispatch, storage
from advisor.ops.family import Case, Family, kernel_sha
from advisor.ops.moments_cases import APART
from advisor.resources import kernels_dir

REPO = kernels_dir().parent
FILES = sorted((REPO / "docs" / "benchmarks").glob("*/ops.json"))
Row = dict[str, Any]

pytestmark = pytest.mark.skipif(
    not FILES and not (REPO / ".git").exists(), reason="no checkout: the results are not part of the distribution"
)


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return [row for file in FILES for row in json.loads(file.read_text())["rows"]]


def of(case: Case, rows: Iterable[Row]) -> list[Row]:
    return [r for r in rows if (r["name"], tuple(r["shape"]), r["dtype"]) == (case.name, case.shape, case.dtype)]


def time(rows: Iterable[Row]) -> float:
    """Both passes as a share of eager's in the same run: rows may be of two runs, and of two machines."""
    return float(sum(r["advisor_ms"] for r in rows) / sum(r["eager_ms"] for r in rows))


def faults(cases: Sequence[Case], rows: Sequence[Row]) -> list[str]:
    """Where dispatch contradicts the rows. A case is one call: its passes are dispatched together and judged together."""
    found = []
    if not any(of(case, rows) for case in cases):
        found += [f"{case.label}: dispatched without any measurement" for case in cases if not case.wins()]
    for case in cases:
        mine = of(case, rows)
        if mine and not case.wins() and time(mine) >= 1:
            found.append(f"{case.label}: dispatched, and not faster")
        other = next(
            (c for c in cases if (c.name, c.shape, c.dtype) == (case.name + APART, case.shape, case.dtype)), None
        )
        beside = of(other, rows) if other else []
        if mine and beside and not case.wins() and time(mine) >= time(beside):
            found.append(f"{case.label}: the norm takes the convolution's moments, and is not faster with them")
        for row in mine:
            if row["kernel_sha"] != kernel_sha(case.passes[row["pass"]]):
                found.append(f"{case.label} {row['pass']}: measured with other kernel sources")
    return found


@pytest.mark.parametrize("family", catalog.FAMILIES, ids=lambda family: family.id)
def test_dispatch_follows_the_results(family: Family, rows: list[Row]) -> None:
    """A kernel that changed after its last pass on a GPU has no valid results: run `advisor bench ops` again."""
    assert faults(family.benchmark, rows) == []
    if not any(of(case, rows) for case in family.benchmark):
        assert not [case.label for case in family.verification if not case.wins()]


def test_every_row_is_of_a_case(rows: list[Row]) -> None:
    cases = {(c.name, c.shape, c.dtype) for family in catalog.FAMILIES for c in family.benchmark}
    assert {(r["name"], tuple(r["shape"]), r["dtype"]) for r in rows} <= cases


@pytest.mark.parametrize("goal", goals.GOALS, ids=lambda goal: goal.title)
def test_every_goal_is_measured_on_a_case(goal: goals.Goal, rows: list[Row]) -> None:
    family = catalog.get(goal.family)
    cases = [case for case in family.benchmark if goal.holds_for(family.id, case)]
    for way in goal.shares:
        assert [row for case in cases for row in of(case, rows) if row["pass"] == way]


# What a pass may take beyond eager's peak: a byte for each vector of 16 bytes where the signs of a sum are kept, which PyTorch
# reads from the sum itself; and partial sums, whose size does not grow with the batch.
PARTIAL_SUMS = 8 << 20


def greedy(rows: Iterable[Row]) -> list[str]:
    """Rows whose pass takes more memory than PyTorch's own.

    Not those of a pair apart: there PyTorch's convolution hands its gradient to the norm, and autograd holds it until the norm is
    done (docs/decisions/0028).
    """
    return [
        f"{row['name']} {row['pass']} {row['dtype']} {row['shape']}"
        for row in rows
        if not row["name"].endswith(APART)
        and row["advisor_peak_bytes"]
        > row["eager_peak_bytes"] + math.prod(row["shape"]) // storage.vector_width(row["dtype"]) + PARTIAL_SUMS
    ]


def test_no_kernel_takes_more_memory_than_what_it_replaces(rows: list[Row]) -> None:
    assert greedy(row for row in rows if row["advisor_peak_bytes"] is not None) == []


def test_a_kept_activation_would_be_seen() -> None:
    plain = {"name": "bn", "pass": "forward", "dtype": "bfloat16", "shape": [256, 64, 112, 112]}
    tensor = 2 * math.prod(plain["shape"])
    assert greedy([{**plain, "advisor_peak_bytes": 2 * tensor, "eager_peak_bytes": 2 * tensor}]) == []
    assert greedy([{**plain, "advisor_peak_bytes": 3 * tensor, "eager_peak_bytes": 2 * tensor}])


CASE = catalog.get("batchnorm_act").benchmark[0]


def row(kind: str, ours: float, eager: float) -> Row:
    return {
        "name": CASE.name, "pass": kind, "shape": list(CASE.shape), "dtype": CASE.dtype,
        "advisor_ms": ours, "eager_ms": eager, "kernel_sha": kernel_sha(CASE.passes[kind]),
    }  # fmt: skip


def test_a_dispatched_loss_would_be_seen() -> None:
    loss = [row("forward", 1.0, 1.1), row("backward", 3.0, 2.5)]
    assert "not faster" in faults([CASE], loss)[0]
    assert faults([replace(CASE, wins=lambda: "slower here")], loss) == []
    assert faults([CASE], [row("forward", 1.1, 1.0), row("backward", 2.0, 3.0)]) == []


def test_dispatch_without_a_measurement_would_be_seen() -> None:
    assert "without any measurement" in faults([CASE], [])[0]
    assert faults([replace(CASE, wins=lambda: dispatch.UNMEASURED)], []) == []


def test_results_of_another_source_would_be_seen() -> None:
    stale = {**row("forward", 1.0, 2.0), "kernel_sha": "0" * 64}
    assert "other kernel sources" in faults([CASE], [stale])[0]


def test_moments_that_do_not_pay_would_be_seen() -> None:
    alone = replace(CASE, wins=lambda: "")
    apart = replace(alone, name=CASE.name + APART)
    rows = [row("forward", 1.0, 2.0), {**row("forward", 0.9, 2.0), "name": apart.name}]
    assert "not faster with them" in faults([alone, apart], rows)[0]
    slower = {**row("forward", 1.1, 2.6), "name": apart.name}  # of a machine that takes longer for eager's, too
    assert "not faster with them" in faults([alone, apart], [rows[0], slower])[0]
    assert faults([alone, apart], [rows[0], {**row("forward", 1.1, 2.0), "name": apart.name}]) == []
    assert faults([replace(alone, wins=lambda: "slower here"), apart], rows) == []
    assert faults([alone, apart], [rows[0], {**rows[1], "advisor_ms": 1.1}]) == []
