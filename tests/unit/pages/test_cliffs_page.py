"""The page of cuDNN's cliffs: the steepest first, each with what is faster."""

from __future__ import annotations

from benchmark_pages import cliffs_page


def row(
    value: int, ms: float, faster: int | None, faster_ms: float | None, sweep: str = "channels"
) -> dict[str, object]:
    return {
        "sweep": sweep, "value": value, "dtype": "float32", "layout": "nhwc", "product": "forward", "ms": ms, "flops": 1.0, "tf32": True,
        "faster": faster, "faster_ms": faster_ms, "cudnn": 91900, "torch": "2.11.0", "date": "2026-11-27",
    }  # fmt: skip


def test_cliffs_stand_by_sweep_the_steepest_first() -> None:
    rows = [row(30, 0.3, 32, 0.2), row(31, 0.4, 32, 0.1), row(32, 0.1, None, None), row(3, 0.1, None, None, "taps")]
    text = cliffs_page.page({"gpu": "NVIDIA H200", "rows": rows})
    assert "2 of 4 products are off a cliff: 2 by channels." in text
    assert text.index("| 31 | tf32 | NHWC | forward | 0.400 | 32 | 0.100 | 25 % |") < text.index("| 30 | tf32")
    assert "No cliff." in text[text.index("## taps") :]
    assert cliffs_page.summary(rows[2:]) == "None of 2 products is off a cliff."
