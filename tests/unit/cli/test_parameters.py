from __future__ import annotations

import click
import pytest

from advisor.cli.parameters import Duration, Percent


@pytest.mark.parametrize(("text", "value"), [("1%", 0.01), ("0.5 %", 0.005), ("0.03", 0.03), ("0", 0.0), ("99%", 0.99)])
def test_percent(text, value):
    assert Percent().convert(text, None, None) == pytest.approx(value)


@pytest.mark.parametrize("text", ["3", "1", "-1%", "100%", "abc", "", "nan", "inf%"])
def test_percent_refuses_what_is_ambiguous_or_out_of_range(text):
    with pytest.raises(click.BadParameter):
        Percent().convert(text, None, None)


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1h30m", 5400), ("45", 45), ("1.5m", 90)])
def test_duration(text, seconds):
    assert Duration().convert(text, None, None) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "0", "ten minutes", "-5s", "10x", "5m3h"])
def test_duration_refuses(text):
    with pytest.raises(click.BadParameter, match="10m"):
        Duration().convert(text, None, None)
