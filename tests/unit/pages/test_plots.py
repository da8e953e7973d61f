"""The benchmark page's plots: well-formed, and where the numbers say."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from benchmark_pages import plots

SVG = "{http://www.w3.org/2000/svg}"
NAMES = {"advisor": "ours & mine", "eager": "theirs", "compile": "compiled"}


def circles(document: str) -> dict[str, list[float]]:
    """Horizontal places of the dots of each colour, the legend's first."""
    found: dict[str, list[float]] = {}
    for circle in ElementTree.fromstring(document).iter(f"{SVG}circle"):
        found.setdefault(circle.attrib["fill"], []).append(float(circle.attrib["cx"]))
    return found


def test_a_dot_lies_where_its_number_does() -> None:
    rows = [
        plots.Dots(label="bn <fast>", values={"advisor": 0.9, "eager": 0.45}),
        plots.Dots(label="pool", values={"advisor": 1.1}),
    ]
    document = plots.dots("limit / time", "at the limit", NAMES, rows)
    (_, fast, beyond), (_, slow) = (circles(document)[plots.COLOURS[key]] for key in ("advisor", "eager"))
    one = next(
        float(line.attrib["x1"])
        for line in ElementTree.fromstring(document).iter(f"{SVG}line")
        if line.attrib.get("class") == "one"
    )
    zero = 2 * slow - fast
    assert fast - zero == pytest.approx(0.9 * (one - zero), abs=0.3)
    assert beyond - zero == pytest.approx(1.1 * (one - zero), abs=0.3)
    texts = [text.text for text in ElementTree.fromstring(document).iter(f"{SVG}text")]
    assert {"bn <fast>", "ours & mine", "1 = at the limit"} <= set(texts)
    assert "compiled" not in texts  # not measured: no legend either


def test_slow_contenders_leave_one_on_the_axis() -> None:
    document = plots.dots("t", "as written", NAMES, [plots.Dots(label="net", values={"eager": 0.02})])
    ticks = [text.text for text in ElementTree.fromstring(document).iter(f"{SVG}text")]
    assert {"0", "1"} <= set(ticks)


@pytest.mark.parametrize(("most", "step"), [(1.0, 0.2), (1.2, 0.2), (10.6, 2.0), (100.0, 20.0), (0.5, 0.1)])
def test_ticks_are_round_numbers(most: float, step: float) -> None:
    assert plots.draw_step(most) == pytest.approx(step)
