"""Every transform is there, under its own id, and what its row names is."""

from __future__ import annotations

import dataclasses

import pytest
from loops import make_loop

from advisor.analysis.predict import predictor
from advisor.core import transform_table
from advisor.core.errors import AdvisorError
from advisor.core.transform_table import ROWS
from advisor.transforms import registry

OF_TORCH = [name for name, row in ROWS.items() if not row.cupy]


@pytest.mark.parametrize("identifier", OF_TORCH)
def test_each_id_leads_to_its_transform(identifier: str) -> None:
    transform, row = registry.get(identifier), ROWS[identifier]
    assert transform.id == identifier
    assert (transform.title, transform.semantics, transform.live) == (row.title, row.semantics, row.live)
    assert (transform.conflicts, transform.waits_for) == (row.conflicts, row.waits_for)
    assert transform.__doc__
    assert not row.predictor or callable(predictor(row.predictor))


@pytest.mark.parametrize("identifier", OF_TORCH)
def test_each_says_on_a_cpu_whether_it_applies(identifier: str) -> None:
    match = registry.get(identifier).match(make_loop(steps=1).training, {})
    assert match.sites if match.applies else match.reason


def test_an_unknown_id_is_told() -> None:
    with pytest.raises(AdvisorError, match=r"no transform 'chanels_last'\. Did you mean 'channels_last'\?"):
        transform_table.row("chanels_last")
    with pytest.raises(AdvisorError, match="no transform 'amp'"):
        registry.get("amp")


def test_one_for_loops_of_cupy_is_none_of_these() -> None:
    with pytest.raises(AdvisorError, match="cupy_graphs is for loops of CuPy alone"):
        registry.get("cupy_graphs")


@pytest.mark.parametrize(
    ("identifier", "change", "words"),
    [
        ("tf32", {"id": "prefetch"}, "two rows for the transform 'prefetch'"),
        ("conv_bias", {"after": ("amp",)}, "the row of conv_bias names 'amp'"),
        ("conv_bias", {"after": ("conv_bias",)}, "the row of conv_bias names 'conv_bias'"),
        ("cudnn_benchmark", {"waits_for": ("nhwc",)}, "the row of cudnn_benchmark names 'nhwc'"),
        ("compile", {"conflicts": ()}, "compile_max_autotune conflicts with compile, whose row does not say so"),
        ("loader_workers", {"live": True}, "loader_workers changes how loaders are made and is live"),
    ],
)
def test_a_row_that_does_not_fit_the_others_is_refused(identifier: str, change: dict[str, object], words: str) -> None:
    rows = [dataclasses.replace(row, **change) if row.id == identifier else row for row in ROWS.values()]
    with pytest.raises(AdvisorError, match=words):
        transform_table.table(rows)


def test_kernels_that_were_measured_in_nchw_bring_no_layout() -> None:
    """The row of each family says whether its kernels run in NHWC alone; a family with cases in NCHW does not."""
    from advisor.core.transform_table import row
    from advisor.ops import catalog

    for family in catalog.FAMILIES:
        if family.captured and any(case.layout != "nhwc" for case in family.benchmark):
            assert not row(family.transform).nhwc, family.id
