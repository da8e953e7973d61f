"""Limits for --perf-compare-fail, and flags that contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor.core.errors import AdvisorError
from advisor.testing.options import Options, Threshold, limits_of


def test_limits_are_shares_or_amounts() -> None:
    assert limits_of("step:5%, memory:10 MiB,kernels:0,busy:2 %,dram:0") == {
        "step": Threshold(amount=pytest.approx(0.05), absolute=False),
        "memory": Threshold(amount=10 * 2**20, absolute=True),
        "kernels": Threshold(amount=0, absolute=True),
        "busy": Threshold(amount=pytest.approx(0.02), absolute=False),
        "dram": Threshold(amount=0, absolute=False),
    }


@pytest.mark.parametrize("text", ["step", "steps:5%", "step:5", "memory:fast", "kernels:-1", "", "step:5%,,"])
def test_a_limit_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(AdvisorError, match="expected"):
        limits_of(text)


def test_a_run_that_writes_a_baseline_is_held_to_nothing_in_it() -> None:
    assert Options(storage=Path(), save="main").records("main")
    assert not Options(storage=Path(), save="main").records("other")
    assert Options(storage=Path(), compare="main", update=True).records("main")
    assert not Options(storage=Path(), compare="main").records("main")
    assert not Options(storage=Path()).records("")
