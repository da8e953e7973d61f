"""What every registered family owes, and that listing them needs no torch."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from advisor.core.errors import AdvisorError
from advisor.core.transform_table import ROWS
from advisor.ops import catalog, dispatch
from advisor.ops.family import Case, Family
from advisor.ops.operation import Operation

EACH = pytest.mark.parametrize("family", catalog.FAMILIES, ids=lambda family: family.id)


@EACH
def test_its_folder_has_all_that_the_framework_reads(family: Family) -> None:
    assert family.kernels
    assert not family.captured or callable(family.rewrite)
    api = vars(family.module("api"))
    if not any(
        isinstance(value, Operation) and (value.family or value.name) == family.id for value in api.values()
    ):  # which counts itself
        assert api["engaged"] is family.engaged
        assert api["fell_back"] is family.fell_back
    for name, values in family.spec.TUNABLE.items():
        assert getattr(family.spec, name) in values, name
    for source in family.kernels:
        assert family.spec.variants(source)


@EACH
def test_its_cases_are_told_apart_and_complete(family: Family) -> None:
    for cases in (family.benchmark, family.verification):
        assert cases
        identities = [(case.name, case.shape, case.dtype) for case in cases]
        assert len(set(identities)) == len(identities)
    sources = {name for case in family.benchmark for work in case.passes.values() for name in work.kernels}
    assert sources <= {name for each in catalog.FAMILIES for name in each.kernels}
    for case in (*family.benchmark, *family.verification):
        assert list(case.passes) in (["forward"], ["forward", "backward"])
        assert all(work.nbytes > 0 and work.unit in ("matrix", "vector", "float16") for work in case.passes.values())


def test_every_source_is_run_by_some_familys_cases() -> None:
    run = {
        name
        for family in catalog.FAMILIES
        for case in (*family.benchmark, *family.verification)
        for work in case.passes.values()
        for name in work.kernels
    }
    assert run == {name for family in catalog.FAMILIES for name in family.kernels}


def test_case_names_belong_to_one_family() -> None:
    owners: dict[str, set[str]] = {}
    for family in catalog.FAMILIES:
        for case in family.benchmark:
            owners.setdefault(case.name, set()).add(family.id)
    assert all(len(families) == 1 for families in owners.values()), owners


def test_each_family_has_a_transform() -> None:
    assert len({family.transform for family in catalog.FAMILIES}) == len(catalog.FAMILIES)
    assert {family.transform for family in catalog.FAMILIES} <= ROWS.keys()
    assert [name for name, row in ROWS.items() if row.family] == [f.transform for f in catalog.FAMILIES if f.captured]


def test_listing_imports_neither_torch_nor_cupy() -> None:
    code = (
        "import sys; from advisor.ops import catalog; rows = catalog.listing()\n"
        "print(len(rows), 'torch' in sys.modules, 'cupy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[1:] == ["False", "False"]
    assert int(done.stdout.split()[0]) == sum(len(family.kernels) for family in catalog.FAMILIES)


def test_an_unknown_family_is_told() -> None:
    with pytest.raises(AdvisorError, match="no kernel family 'norm'") as caught:
        catalog.get("norm")
    assert all(family.id in str(caught.value) for family in catalog.FAMILIES)


def toy(monkeypatch: pytest.MonkeyPatch, *reasons: str) -> Family:
    cases = tuple(
        Case(name="toy", shape=(n + 1,), dtype="float32", passes={}, inputs=None, ours=None, eager=None, reference=None,
             wins=lambda reason=reason: reason)
        for n, reason in enumerate(reasons)
    )  # fmt: skip
    monkeypatch.setattr(Family, "module", lambda self, name: SimpleNamespace(BENCHMARK=cases))
    return Family(id="toy", replaces="", transform="toy", modules=())


def test_dispatched_where_one_case_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    assert toy(monkeypatch, "slower", "", "slower").not_dispatched() == ""
    assert toy(monkeypatch, "slower", "larger", "slower").not_dispatched() == "slower"
    assert toy(monkeypatch).not_dispatched() == dispatch.UNMEASURED
