from __future__ import annotations

import math

import pytest

from advisor.core.student import t_cdf, t_quantile


@pytest.mark.parametrize(
    ("degrees", "t95", "t99"),  # two-sided 95 % and 99 %: NIST/SEMATECH e-Handbook, 1.3.6.7.2
    [
        (1, 12.706, 63.657),
        (2, 4.303, 9.925),
        (3, 3.182, 5.841),
        (5, 2.571, 4.032),
        (11, 2.201, 3.106),
        (19, 2.093, 2.861),
        (30, 2.042, 2.750),
        (100, 1.984, 2.626),
    ],
)
def test_quantiles_are_those_of_the_tables(degrees: int, t95: float, t99: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(t95, abs=6e-4)
    assert t_quantile(0.995, degrees) == pytest.approx(t99, abs=6e-4)
    assert t_quantile(0.005, degrees) == pytest.approx(-t99, abs=6e-4)
    assert t_cdf(0.0, degrees) == pytest.approx(0.5)


def test_one_and_two_degrees_have_closed_forms() -> None:
    assert t_quantile(0.9, 1) == pytest.approx(math.tan(math.pi * 0.4), rel=1e-9)
    assert t_quantile(0.75, 2) == pytest.approx(math.sqrt(2 * 0.25 / (1 - 0.25)), rel=1e-9)


def test_between_whole_degrees_it_falls_steadily() -> None:
    assert t_quantile(0.975, 2) > t_quantile(0.975, 2.4) > t_quantile(0.975, 3)


@pytest.mark.parametrize("bad", [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_what_is_not_defined_is_refused(bad: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="not defined"):
        t_quantile(*bad)
