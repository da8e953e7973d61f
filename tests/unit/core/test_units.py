from __future__ import annotations

import pytest

from advisor.core.units import counted, percent_text, samples_text, time_text, unbroken


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (0.3141, "31 %"),
        (0.0272, "2.7 %"),
        (0.0, "0 %"),
        (0.0004, "<0.1 %"),
        (-0.0004, "0 %"),
        (-0.025, "−2.5 %"),
        (float("nan"), "–"),
    ],
)
def test_percent(fraction: float, text: str) -> None:
    assert percent_text(fraction) == text


@pytest.mark.parametrize("text", ["took 7 s", "99.9 % of it", "10 pairs, 1.5 GiB/s", "n = 20"])
def test_a_number_and_its_unit_stay_together(text: str) -> None:
    assert unbroken(text).replace("\N{NO-BREAK SPACE}", " ") == text
    assert "\N{NO-BREAK SPACE}" in unbroken(text)


def test_words_after_a_number_may_go_to_the_next_line() -> None:
    assert unbroken("3 changes, 2 sites of 5 spare ones") == "3 changes, 2 sites of 5 spare ones"


def test_one_is_singular() -> None:
    assert (counted(0, "rule"), counted(1, "rule"), counted(1234, "rule")) == ("0 rules", "1 rule", "1,234 rules")


@pytest.mark.parametrize(
    ("rate", "text"), [(0.0412, "0.04"), (0.41, "0.41"), (0.997, "1.0"), (3.21, "3.2"), (9.97, "10"), (9783.6, "9,784")]
)
def test_few_samples_a_second_keep_their_digits(rate, text):
    assert samples_text(rate) == text


@pytest.mark.parametrize(
    ("value_us", "beside_us", "text"),
    [
        (6.23e6, 9.49e6, "6.23 s"),
        (62_400.0, 9.49e6, "0.062 s"),
        (480.0, 9.49e6, "480 µs"),  # less than a thousandth of a second
        (641.0, 54_800.0, "0.641 ms"),
        (54_800.0, 54_800.0, "54.8 ms"),
        (1.2e6, 870.0, "1.20 s"),  # what stands beside it is shorter
        (0.0, 54_800.0, "0 ms"),
    ],
)
def test_a_time_has_the_unit_of_what_it_stands_beside(value_us: float, beside_us: float, text: str) -> None:
    assert time_text(value_us, beside_us) == text
