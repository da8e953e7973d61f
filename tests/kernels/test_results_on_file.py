"""What is dispatched and what docs/benchmarks holds agree: nothing runs our kernels that was not measured to win."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from advisor.analysis import measured_convs
from advisor.bench import conv_rows, dispatch_rows, goals
from advisor.bench.dispatch_rows import TIE
from advisor.core.errors import AdvisorError
from advisor.ops import catalog, dispatch, dispatch_table, storage
from advisor.ops.dispatch import Inferred
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
    """Both passes as a share of eager's in the same run: rows may be of two runs."""
    return float(sum(r["advisor_ms"] for r in rows) / sum(r["eager_ms"] for r in rows))


def faults(cases: Sequence[Case], rows: Sequence[Row], tie: float = 0.0) -> list[str]:
    """Where dispatch contradicts the rows of a GPU. A case is one call: its passes are dispatched together and judged together."""
    found = []
    if not any(of(case, rows) for case in cases):
        found += [f"{case.label}: dispatched without any measurement" for case in cases if not case.wins()]
    for case in cases:
        mine = of(case, rows)
        if mine and not case.wins() and time(mine) >= 1 + tie:
            found.append(f"{case.label}: dispatched, and not faster")
        other = next(
            (c for c in cases if (c.name, c.shape, c.dtype) == (case.name + APART, case.shape, case.dtype)), None
        )
        beside = of(other, rows) if other else []
        if mine and beside and not case.wins() and time(mine) >= time(beside) * (1 + tie):
            found.append(f"{case.label}: the norm takes the convolution's moments, and is not faster with them")
        for row in mine:
            if row["kernel_sha"] != kernel_sha(case.passes[row["pass"]]):
                found.append(f"{case.label} {row['pass']}: measured with other kernel sources")
    return found


@pytest.mark.parametrize("family", catalog.FAMILIES, ids=lambda family: family.id)
def test_dispatch_follows_the_results(family: Family, rows: list[Row]) -> None:
    """A kernel that changed after its last pass on a GPU has no valid results: run `advisor bench ops` again."""
    on_each = [json.loads(file.read_text())["rows"] for file in FILES]
    # A GPU on which nothing of the family was ever measured says nothing of it, where another one does.
    on_each = [one for one in on_each if any(of(case, one) for case in family.benchmark)] or on_each
    assert set.intersection(*(set(faults(family.benchmark, one)) for one in on_each)) == set()
    assert [faults(family.benchmark, one, TIE) for one in on_each] == [[] for _ in on_each]
    if not any(of(case, rows) for case in family.benchmark):
        assert not [case.label for case in family.verification if not case.wins()]


def unaccounted(family: Family, cases: Sequence[Case], rows: Sequence[Row], inferred: Sequence[Inferred]) -> list[str]:
    """Kinds that are dispatched with neither a row of each pass nor a word of what they are taken to do as; and words that do not hold."""
    won = [case for case in cases if not case.wins()]
    measured = {(c.kind, c.dtype) for c in won if {row["pass"] for row in of(c, rows)} == set(c.passes)}
    pairs = [pair for entry in inferred for pair in entry.pairs if pair[0] in family.kinds]
    found = [
        f"{name} {dtype}: dispatched without a row, or a word of why"
        for name, dtype in sorted(family.kinds - measured - dict(pairs).keys())
    ]
    found += [
        f"{' '.join(kind)}: taken to do as {' '.join(like)}, which has no row"
        for kind, like in pairs
        if like not in measured
    ]
    found += [f"{' '.join(kind)}: inferred, though measured" for kind, _ in pairs if kind in measured]
    found += [
        f"{' '.join(kind)}: inferred twice" for kind, times in Counter(kind for kind, _ in pairs).items() if times > 1
    ]
    stale = {name for entry in inferred for name in entry.names} - {name for (name, _), _ in pairs}
    found += [f"{name}: inferred, and not dispatched" for name in sorted(stale)]
    return found


@pytest.mark.parametrize("family", catalog.FAMILIES, ids=lambda family: family.id)
def test_what_is_dispatched_is_measured_or_said_to_be_inferred(family: Family, rows: list[Row]) -> None:
    """A kind without a row goes into `like` of the family in dispatch_table.json, with what it is taken to do as and why."""
    assert unaccounted(family, family.benchmark, rows, family.inferred) == []


@pytest.mark.parametrize("family", catalog.FAMILIES, ids=lambda family: family.id)
def test_the_spec_names_every_kind_that_a_case_finds_dispatched(family: Family) -> None:
    cases = [case for case in (*family.benchmark, *family.verification) if not case.wins()]
    assert {(c.kind, c.dtype) for c in cases if not c.name.endswith(APART)} <= family.kinds


@pytest.mark.parametrize("family", catalog.FAMILIES, ids=lambda family: family.id)
def test_the_page_says_what_is_asked_of_sizes(family: Family) -> None:
    asked = [bound for entry in family.sizes for bounds in entry.any_of for bound in bounds]
    assert not asked or any(entry.text for entry in family.sizes)


def test_the_table_is_what_the_rows_make_of_it(tmp_path: Path) -> None:
    """`advisor bench ops` writes it; by hand `python -m advisor.bench.dispatch_rows`."""
    made = tmp_path / "table.json"
    made.write_text(dispatch_table.FILE.read_text())
    dispatch_rows.write(FILES, made)
    assert made.read_text() == dispatch_table.FILE.read_text()


def test_what_conv_says_of_measured_convolutions_is_what_the_rows_say(tmp_path: Path) -> None:
    """`advisor bench ops` writes it, too."""
    made = tmp_path / "convolutions.json"
    conv_rows.write(FILES, made)
    assert made.read_text() == measured_convs.FILE.read_text()


def changed(table: Path, *gpus: tuple[str, int, Callable[[Row], Row | None]]) -> dict[str, Any]:
    """The table that is made of the H200's rows as these GPUs, each of an architecture, have them."""
    files = []
    for gpu, arch, change in gpus:
        file = table.parent / gpu / "ops.json"
        file.parent.mkdir()
        document = json.loads(next(f for f in FILES if "h200" in f.parent.name).read_text())
        rows = [new for row in document["rows"] if (new := change(row)) is not None]
        file.write_text(json.dumps({**document, "arch": arch, "rows": rows}))
        files.append(file)
    table.write_text(dispatch_table.FILE.read_text())
    before = dispatch_table.read()
    kept = dict(before)
    try:
        dispatch_rows.write(files, table)
    finally:
        for family, of in kept.items():
            dispatch_table.put(family, of)
    return dict(json.loads(table.read_text()))


def slowed(row: Row) -> Row:
    slow = (row["name"], row["dtype"]) == ("bn+gelu", "bfloat16")
    return {**row, "advisor_ms": 3.0 * row["eager_ms"]} if slow else row


def test_a_kind_that_becomes_slower_is_left_to_pytorch(tmp_path: Path) -> None:
    made = changed(tmp_path / "table.json", ("h200", 90, slowed))["families"]["batchnorm_act"]
    assert "bfloat16" not in made["measured"]["bn+gelu"]
    assert made["slower"]["bn+gelu"] == {"bfloat16": [3.0, 3.0]}
    of = dispatch_table.entries(made)
    with dispatch_table.instead("batchnorm_act", of):
        assert dispatch_table.refusal("batchnorm_act", "bn+gelu", "bfloat16") == dispatch.UNMEASURED
        assert not dispatch_table.refusal("batchnorm_act", "bn+gelu", "float16")


def test_what_stands_for_others_may_not_become_slower(tmp_path: Path) -> None:
    with pytest.raises(AdvisorError, match=r"cat\+bn .* is taken to do as cat\+bn\+relu .*, which no row shows"):
        changed(
            tmp_path / "table.json",
            ("h200", 90, lambda row: None if "cat+bn+relu" in row["name"] else row),
        )


def test_an_architecture_with_rows_has_a_layer_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slower there is left to PyTorch there alone; what has no row there goes as it does where it has."""
    table = tmp_path / "table.json"
    made = changed(
        table, ("h200", 90, lambda row: row), ("rtx", 89, lambda row: slowed(row) if "bn+" in row["name"] else None)
    )
    assert made["layers"]["89"] == "measured: rtx"
    assert dispatch_table.layers(table)[120].startswith("like sm_90: no GPU of it was measured")
    kinds = {sm: dispatch_table.read(sm, table)["batchnorm_act"].kinds for sm in (80, 89, 90)}
    assert kinds[90] == kinds[80] == dispatch_table.read()["batchnorm_act"].kinds
    assert kinds[90] - kinds[89] == {("bn+gelu", "bfloat16")}
    layer = dispatch_table.read(89, table)
    monkeypatch.setattr(dispatch_table, "read", lambda sm=90: layer if sm == 89 else dispatch_table.read(sm, table))
    monkeypatch.setattr(dispatch_table, "present", lambda: 89)
    assert dispatch_table.refusal("batchnorm_act", "bn+gelu", "bfloat16") == dispatch.UNMEASURED
    assert not dispatch_table.refusal("pooling", "max_pool", "bfloat16")


def test_every_architecture_says_whose_rows_it_goes_by() -> None:
    assert set(dispatch_table.layers()) >= {80, 86, 89, 90, 100, 120}


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
    done (docs/notes/kernels/convolutions-1x1.md#a-norms-gradient-from-the-convolution-behind-it).
    """
    return [
        f"{row['name']} {row['pass']} {row['dtype']} {row['shape']}"
        for row in rows
        if not row["name"].endswith(APART)
        and row["advisor_peak_bytes"]
        > row["eager_peak_bytes"] + math.prod(row["shape"]) // storage.vector_width(row["dtype"]) + PARTIAL_SUMS
    ]


def test_no_kernel_takes_more_memory_than_what_it_replaces(rows: list[Row]) -> None:
    said = {case.name for family in catalog.FAMILIES if family.holds for case in family.benchmark}
    assert greedy(r for r in rows if r["advisor_peak_bytes"] is not None and r["name"] not in said) == []


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


def test_a_tie_on_one_gpu_is_no_loss() -> None:
    slower = [row("forward", 1.005, 1.0), row("backward", 2.0, 2.0)]
    assert "not faster" in faults([CASE], slower)[0]
    assert faults([CASE], slower, TIE) == []
    assert "not faster" in faults([CASE], [row("forward", 1.03, 1.0), row("backward", 2.05, 2.0)], TIE)[0]


def test_dispatch_without_a_measurement_would_be_seen() -> None:
    assert "without any measurement" in faults([CASE], [])[0]
    assert faults([replace(CASE, wins=lambda: dispatch.UNMEASURED)], []) == []


def test_an_inference_that_is_not_told_would_be_seen(rows: list[Row]) -> None:
    norms = catalog.get("batchnorm_act")
    untold = [entry for entry in norms.inferred if "bn+relu6" not in entry.names]
    assert unaccounted(norms, norms.benchmark, rows, untold) == [
        f"bn+relu6 {dtype}: dispatched without a row, or a word of why" for dtype in ("float16", "float32")
    ]


@pytest.mark.parametrize("family", catalog.FAMILIES, ids=lambda family: family.id)
def test_no_inference_could_be_left_out(family: Family, rows: list[Row]) -> None:
    for number in range(len(family.inferred)):
        left = family.inferred[:number] + family.inferred[number + 1 :]
        assert unaccounted(family, family.benchmark, rows, left) != []


def test_a_row_that_is_gone_would_be_seen(rows: list[Row]) -> None:
    norms = catalog.get("batchnorm_act")
    left = [r for r in rows if (r["name"], r["dtype"]) != ("bn+silu", "float16")]
    assert unaccounted(norms, norms.benchmark, left, norms.inferred) == [
        "bn+silu float16: dispatched without a row, or a word of why"
    ]
    left = [r for r in rows if r["name"] != "bn+relu frozen"]
    assert "taken to do as bn+relu frozen bfloat16, which has no row" in str(
        unaccounted(norms, norms.benchmark, left, norms.inferred)
    )
    forwards = [r for r in rows if (r["name"], r["dtype"], r["pass"]) != ("bn+silu", "float16", "backward")]
    assert len(unaccounted(norms, norms.benchmark, forwards, norms.inferred)) == 1


def test_an_inference_that_has_been_overtaken_would_be_seen(rows: list[Row]) -> None:
    norms = catalog.get("batchnorm_act")
    measured = Inferred(names=("bn+relu",), dtypes=("bfloat16",), like="bn+silu", because="")
    refused = Inferred(names=("bn+hardswish forked",), dtypes=("bfloat16",), like="bn+silu forked", because="")
    assert unaccounted(norms, norms.benchmark, rows, (*norms.inferred, measured, refused, norms.inferred[0])) == [
        "bn+relu bfloat16: inferred, though measured",
        *(f"bn+relu6 {dtype}: inferred twice" for dtype in ("float32", "float16")),
        "bn+hardswish forked: inferred, and not dispatched",
    ]


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
