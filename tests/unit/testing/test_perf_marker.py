"""The perf marker: every keyword means something, and what means nothing is an error."""

from __future__ import annotations

import re
from typing import Any

import pytest

from advisor.core.errors import AdvisorError
from advisor.testing import marker


def test_every_keyword_has_its_effect() -> None:
    marked = marker.parse(
        (),
        {
            "max_step_ms": 12,
            "max_memory": "2 GiB",
            "max_kernels": 180,
            "no_sync": True,
            "baseline": "main",
            "tolerance": "5%",
            "min_arch": "sm_80",
            "gpus": 1,
        },
    )
    assert marked.maxima == {"step": 12_000, "memory": 2 * 2**30, "kernels": 180}
    assert (marked.no_sync, marked.baseline, marked.min_arch, marked.gpus) == (True, "main", 80, 1)
    assert marked.tolerance == pytest.approx(0.05)
    assert marked.judges
    assert marked.needs_gpu


@pytest.mark.parametrize("keyword", marker.KEYWORDS)
def test_the_plugin_documents_every_keyword(keyword: str, pytestconfig: pytest.Config) -> None:
    (line,) = [text for text in pytestconfig.getini("markers") if text.startswith("perf(")]
    assert keyword in line


def test_without_keywords_nothing_is_judged() -> None:
    marked = marker.parse((), {})
    assert not marked.judges
    assert not marked.needs_gpu
    assert not marker.parse((), {"gpus": 0}).needs_gpu


@pytest.mark.parametrize(
    ("keywords", "told"),
    [
        ({"max_kernel": 1}, "Did you mean 'max_kernels'"),
        ({"frobnicate": 1}, "no keyword 'frobnicate'"),
        ({"max_memory": "2 GB/s"}, "max_memory"),
        ({"max_step_ms": True}, "max_step_ms"),
        ({"max_kernels": "many"}, "max_kernels"),
        ({"no_sync": 1}, "no_sync=1"),
        ({"baseline": ""}, "baseline=''"),
        ({"baseline": True}, "baseline=True"),
        ({"tolerance": "5%"}, "without a baseline"),
        ({"baseline": "main", "tolerance": 5}, "tolerance"),
        ({"min_arch": 80}, "min_arch=80"),
        ({"min_arch": "hopper"}, "sm_80"),
        ({"gpus": -1}, "gpus=-1"),
        ({"gpus": True}, "gpus=True"),
    ],
)
def test_what_has_no_effect_is_an_error(keywords: dict[str, Any], told: str) -> None:
    with pytest.raises(AdvisorError, match=re.escape(told)):
        marker.parse((), keywords)


def test_a_positional_argument_is_an_error() -> None:
    with pytest.raises(AdvisorError, match="keywords only"):
        marker.parse(("2 GiB",), {})
