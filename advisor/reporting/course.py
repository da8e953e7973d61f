"""Geometry of the chart of a step's memory: what holds it, over the step's time. Numbers in, coordinates out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from advisor.core.held import ACTIVATION, OTHERS, OUTSIDE, HeldRow, MemoryLook
from advisor.core.units import bytes_text, percent_text, time_text
from advisor.reporting.charts import ChartMark

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 900.0, 280.0, 76.0, 888.0, 12.0, 250.0
LABELS = {
    "parameter": "parameters",
    "buffer": "buffers",
    "optimizer": "optimizer state",
    "gradient": "gradients",
    "batch": "the batch",
}
COLOURS = 8  # of modules, in report.css
PLACES = 12  # of what is kept that are listed


@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """One layer of the chart, what it holds at the peak, and its share of that."""

    key: str  # of its colour
    label: str
    outline: str  # points of the SVG polygon
    at_peak: str
    share: str
    most: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CoursePlot:
    """Bands from below, the allocator's line (empty on a CPU), and what the page says of them."""

    width: float
    height: float
    bands: tuple[Band, ...]
    allocated: str
    backward_x: float | None
    x_ticks: tuple[ChartMark, ...]
    y_ticks: tuple[ChartMark, ...]
    peak: str
    peak_at: str
    places: tuple[HeldRow, ...]
    places_left: int
    on_gpu: bool


def course_plot(look: MemoryLook | None) -> CoursePlot | None:
    """The chart of what was seen; None where no step was watched."""
    course = look.course if look is not None else None
    if look is None or course is None or len(course.at_us) < 2 or not course.layers:
        return None
    totals: list[int] = [sum(values) for values in zip(*(layer.nbytes for layer in course.layers), strict=True)]
    top: int = max(*totals, *course.allocated_bytes, 1)
    peak = totals.index(max(totals))
    length: float = max(course.length_us, course.at_us[-1], 1.0)

    def x(at_us: float) -> float:
        return LEFT + (RIGHT - LEFT) * at_us / length

    def y(nbytes: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * nbytes / (1.05 * top)

    xs = [x(at) for at in course.at_us]
    below, bands, modules = [0] * len(xs), [], 0
    for layer in course.layers:
        above = [b + n for b, n in zip(below, layer.nbytes, strict=True)]
        key = {OTHERS: "other", OUTSIDE: "memset"}.get(layer.name, layer.kind)
        if key == ACTIVATION:
            key, modules = f"module-{modules % COLOURS}", modules + 1
        bands.append(
            Band(
                key=key,
                label=LABELS.get(layer.name, layer.name),
                outline=_stairs(xs, [y(v) for v in above]) + " " + _stairs(xs, [y(v) for v in below], back=True),
                at_peak=bytes_text(layer.nbytes[peak]),
                share=percent_text(layer.nbytes[peak] / totals[peak]) if totals[peak] else "",
                most=bytes_text(max(layer.nbytes)),
            )
        )
        below = above
    places = [row for row in look.rows if row.kind == ACTIVATION]
    return CoursePlot(
        width=WIDTH,
        height=HEIGHT,
        bands=tuple(bands),
        allocated=_stairs(xs, [y(v) for v in course.allocated_bytes]) if course.allocated_bytes else "",
        backward_x=x(course.backward_us) if course.backward_us else None,
        x_ticks=tuple(ChartMark(at=x(length * part), text=time_text(length * part)) for part in (0.25, 0.5, 0.75, 1.0)),
        y_ticks=tuple(ChartMark(at=y(top * part), text=bytes_text(top * part)) for part in (0.5, 1.0)),
        peak=bytes_text(max(totals)),
        peak_at=time_text(course.at_us[peak]),
        places=tuple(places[:PLACES]),
        places_left=len(places) - len(places[:PLACES]),
        on_gpu=look.device == "cuda",
    )


def _stairs(xs: Sequence[float], ys: Sequence[float], *, back: bool = False) -> str:
    """A line that stays at a value until the next time; from right to left for the lower edge of an area."""
    points = [(xs[0], ys[0])]
    for here, then, value in zip(xs[1:], ys[1:], ys, strict=False):
        points += [(here, value), (here, then)]
    return " ".join(f"{px:.1f},{py:.1f}" for px, py in (reversed(points) if back else points))
