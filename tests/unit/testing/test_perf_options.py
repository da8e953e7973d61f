"""Limits for --perf-compare-fail, and flags that contradict each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor.core.errors import AdvisorError
from advisor.testing.options import Options, Threshold, limits_of


def test_limits_are_shares_or_amounts() -> None:
    assert limits_of("dram:5%, memory:10 MiB,kernels:0,half:2 %,h2d_bytes:0") == {
        "dram": Threshold(amount=pytest.approx(0.05), absolute=False),
        "memory": Threshold(amount=10 * 2**20, absolute=True),
        "kernels": Threshold(amount=0, absolute=True),
        "half": Threshold(amount=pytest.approx(0.02), absolute=False),
        "h2d_bytes": Threshold(amount=0, absolute=False),
    }


@pytest.mark.parametrize("text", ["dram", "drams:5%", "dram:5", "memory:fast", "kernels:-1", "", "dram:5%,,"])
def test_a_limit_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(AdvisorError, match="expected"):
        limits_of(text)


@pytest.mark.parametrize("key", ["step", "busy", "limit"])
def test_no_limit_is_set_on_times_of_another_day(key: str) -> None:
    with pytest.raises(AdvisorError, match="compare the two in one test"):
        limits_of(f"kernels:0,{key}:5%")


def test_a_run_that_writes_a_baseline_is_held_to_nothing_in_it() -> None:
    assert Options(storage=Path(), save="main").records("main")
    assert not Options(storage=Path(), save="main").records("other")
    assert Options(storage=Path(), compare="main", update=True).records("main")
    assert not Options(storage=Path(), compare="main").records("main")
    assert not Options(storage=Path()).records("")
