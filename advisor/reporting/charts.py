"""Geometry of the report's charts: numbers in, coordinates out. The templates draw what is here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.core.environment import Environment
from advisor.core.profile import StepProfile
from advisor.core.provenance import Provenance
from advisor.core.units import percent_text, rate_text, time_text
from advisor.core.verdict import Blocks, TrialLog
from advisor.reporting import breakdown, numbers

ROOFLINE_POINTS = 250
ROOFLINE_FRAC = 0.0005  # of the step; shorter operators would only stretch the axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Part of a horizontal bar, in thousandths of its length."""

    x: float
    width: float
    key: str
    title: str
    text: str  # its share, where it fits inside; may be empty
    label: str = ""
    idle: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartMark:
    """A tick or a named line: where, and what it says."""

    at: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """A roof of the roofline, from (x1, y1) to (x2, y2)."""

    x1: float
    y1: float
    x2: float
    y2: float
    text: str
    slope: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """A point with a radius."""

    x: float
    y: float
    r: float
    key: str
    title: str
    measured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The chart in its own units. `strip` is the right edge of the strip for work without floating-point count."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    strip: float
    x_ticks: tuple[ChartMark, ...]
    y_ticks: tuple[ChartMark, ...]
    ceilings: tuple[Ceiling, ...]
    dots: tuple[Dot, ...]
    kinds: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GainBar:
    """A trial's predicted and measured gain on the common axis, in thousandths; None where there is none."""

    predicted: tuple[float, float] | None
    measured: tuple[float, float] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GainAxis:
    """The axis that all trials share."""

    zero: float
    ticks: tuple[ChartMark, ...]
    bars: tuple[GainBar, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockPlot:
    """Pairs of block times: x of each pair, y without and with the change."""

    width: float
    height: float
    pairs: tuple[tuple[float, float, float], ...]
    ticks: tuple[ChartMark, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossPlot:
    """Two loss curves as SVG point lists."""

    width: float
    height: float
    plain: str
    stack: str
    ticks: tuple[ChartMark, ...]


def stacked(parts: Sequence[tuple[str, str, float, bool]]) -> tuple[Segment, ...]:
    """Parts (key, label, time in µs, idle) as segments of a bar in the given order."""
    total = sum(time for _, _, time, _ in parts)
    segments, x = [], 0.0
    for key, label, time, idle in parts:
        if total <= 0 or time <= 0:
            continue
        width = 1000 * time / total
        share = percent_text(time / total)
        segments.append(
            Segment(
                x=x,
                width=width,
                key=key,
                title=f"{label}: {time_text(time)}, {share}",
                text=share if width >= 45 else "",
                label=label,
                idle=idle,
            )
        )
        x += width
    return tuple(segments)


def _decades(low: float, high: float) -> list[int]:
    return list(range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scales:
    """Where a roofline's values lie on the drawing: both scales are logarithmic, FLOP/byte across and TFLOP/s up."""

    left: float = 64.0
    right: float = 872.0
    top: float = 14.0
    bottom: float = 382.0
    strip: float = 128.0  # right end of the strip for work without an intensity
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, value: float) -> float:
        span = math.log10(self.x_high) - math.log10(self.x_low)
        return self.strip + (self.right - self.strip) * (math.log10(value) - math.log10(self.x_low)) / span

    def y(self, value: float) -> float:
        span = math.log10(self.y_high) - math.log10(self.y_low)
        place = (math.log10(max(value, self.y_low)) - math.log10(self.y_low)) / span
        return self.bottom - (self.bottom - self.top) * min(1.0, place)


def roofline(profile: StepProfile) -> Roofline | None:
    """Achieved FLOP/s over FLOP per byte with this machine's measured ceilings; None where no bandwidth was measured.

    Work without floating-point operations (copies, pooling) has no intensity. It is drawn in a strip at the left whose
    height scale is bandwidth, placed so that a dot's distance from the roof means the same as everywhere else.
    """
    env = profile.environment
    points = [p for p in breakdown.roofline_points(profile, ROOFLINE_POINTS) if p.frac >= ROOFLINE_FRAC]
    if env.copy_gbps <= 0 or env.rates_doubt or not points:
        return None
    peak = max([*env.matrix_tflops.values(), *(p.tflops for p in points), env.copy_gbps / 1e3])
    counted = [p.intensity for p in points if p.intensity > 0]
    x_low = 10 ** math.floor(math.log10(max(1e-3, min([*counted, 0.5]))))
    x_high = 10 ** math.ceil(math.log10(max([*counted, 2 * peak / (env.copy_gbps / 1e3)])))
    lowest = min([p.tflops for p in points if p.intensity > 0] + [p.gbps / 1e3 * x_low for p in points])
    y_low, y_high = 10 ** math.floor(math.log10(max(lowest, peak * 1e-5))), peak * 1.6
    at = _Scales(x_low=x_low, x_high=x_high, y_low=y_low, y_high=y_high)
    dots = [_dot(point, at) for point in points]
    return Roofline(
        width=900.0, height=430.0, left=at.left, right=at.right, top=at.top, bottom=at.bottom, strip=at.strip,
        x_ticks=tuple(ChartMark(at=at.x(10.0**d), text=_power(d)) for d in _decades(x_low, x_high)),
        y_ticks=tuple(ChartMark(at=at.y(10.0**d), text=_power(d)) for d in _decades(y_low, y_high)),
        ceilings=_spread_labels(_ceilings(env, peak, at)),
        dots=tuple(sorted(dots, key=lambda d: (-d.r, d.title))),  # small dots over large ones
        kinds=tuple(dict.fromkeys(p.kind for p in points)),
    )  # fmt: skip


def _ceilings(env: Environment, peak: float, at: _Scales) -> list[Ceiling]:
    """The slope of the memory's bandwidth, through the strip too, and a level a dtype. peak: the most of all, TFLOP/s."""
    bandwidth = env.copy_gbps / 1e3  # TB/s, so that TB/s × FLOP/byte = TFLOP/s
    roof = max(env.matrix_tflops.values(), default=0.0) or peak
    knee = min(roof / bandwidth, at.x_high)
    low, high = at.y(bandwidth * at.x_low), at.y(bandwidth * knee)
    memory = f"memory {rate_text(env.copy_gbps)}"
    found = [
        Ceiling(x1=at.left, y1=low, x2=at.strip, y2=low, text="", slope=True),
        Ceiling(x1=at.x(at.x_low), y1=low, x2=at.x(knee), y2=high, text=memory, slope=True),
    ]
    for dtype, rate in sorted(env.matrix_tflops.items(), key=lambda item: item[1]):
        if rate > 0:
            start, level = at.x(min(max(rate / bandwidth, at.x_low), at.x_high)), at.y(rate)
            text = f"{dtype} {rate:.3g} TFLOP/s"
            found.append(Ceiling(x1=start, y1=level, x2=at.right, y2=level, text=text, slope=False))
    return found


def _dot(point: breakdown.RooflinePoint, at: _Scales) -> Dot:
    flops = f"{point.tflops:.3g} TFLOP/s, " if point.intensity > 0 else ""
    spent = f"{time_text(point.time_us)} ({percent_text(point.frac)} of the step)"
    return Dot(
        x=at.x(max(point.intensity, at.x_low)) if point.intensity > 0 else (at.left + at.strip) / 2,
        y=at.y(point.tflops if point.intensity > 0 else point.gbps / 1e3 * at.x_low),
        r=3 + 30 * math.sqrt(min(point.frac, 0.25)),
        key=point.kind,
        title=f"{point.label}\n{spent}, {flops}{rate_text(point.gbps)} ({point.provenance.value} bytes)",
        measured=point.provenance is Provenance.MEASURED,
    )


def _spread_labels(ceilings: list[Ceiling]) -> tuple[Ceiling, ...]:
    """Drop the label of a roof that another one's label would cover; its line stays."""
    kept: list[Ceiling] = []
    last = -math.inf
    for c in sorted(ceilings, key=lambda c: (c.slope, c.y1)):  # from the highest roof down
        if not c.slope and c.y1 - last < 15:
            c = Ceiling(x1=c.x1, y1=c.y1, x2=c.x2, y2=c.y2, text="", slope=False)
        elif not c.slope:
            last = c.y1
        kept.append(c)
    return tuple(kept)


def _power(exponent: int) -> str:
    if -2 <= exponent <= 4:
        return f"{10.0**exponent:,.2f}".rstrip("0").rstrip(".") if exponent < 0 else f"{10**exponent:,}"
    return "10" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def gain_axis(trials: TrialLog) -> GainAxis | None:
    """All trials' gains on one axis that holds every interval; None when there is no number to show."""
    intervals = [i for v in trials.verdicts for i in (v.predicted, v.gain) if i is not None]
    if not intervals:
        return None
    low = max(-1.0, min(0.0, *(i.low for i in intervals)))
    high = min(1.0, max(0.05, *(i.high for i in intervals)))
    step = next(s for s in (0.01, 0.02, 0.05, 0.1, 0.2, 0.25, 0.5, 1.0) if (high - low) / s <= 6)
    low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step

    def x(value: float) -> float:
        return 1000 * (min(max(value, low), high) - low) / (high - low)

    count = round((high - low) / step)
    ticks = tuple(ChartMark(at=x(low + i * step), text=numbers.share(low + i * step)) for i in range(count + 1))
    bars = tuple(
        GainBar(
            predicted=(x(v.predicted.low), x(v.predicted.high)) if v.predicted is not None else None,
            measured=(x(v.gain.low), x(v.gain.high)) if v.gain is not None else None,
        )
        for v in trials.verdicts
    )
    return GainAxis(zero=x(0.0), ticks=ticks, bars=bars)


def _axis(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    pad = (high - low) * 0.1 or abs(high) * 0.01 or 1.0
    return low - pad, high + pad


def block_plot(blocks: Blocks) -> BlockPlot | None:
    """Each pair of blocks as two dots on a line; None without blocks."""
    pairs = list(zip(blocks.off_us, blocks.on_us, strict=False))
    if not pairs:
        return None
    width, height, left, margin = 460.0, 130.0, 66.0, 12.0
    low, high = _axis([t for pair in pairs for t in pair])

    def y(value: float) -> float:
        return height - margin - (height - 2 * margin) * (value - low) / (high - low)

    gap = (width - left - margin) / len(pairs)
    ticks = sorted({min(blocks.off_us), max(blocks.off_us), min(blocks.on_us), max(blocks.on_us)})
    apart: list[float] = []
    for tick in ticks:
        if not apart or abs(y(tick) - y(apart[-1])) >= 14:
            apart.append(tick)
    return BlockPlot(
        width=width,
        height=height,
        pairs=tuple((left + gap * (i + 0.5), y(off), y(on)) for i, (off, on) in enumerate(pairs)),
        ticks=tuple(ChartMark(at=y(t), text=numbers.duration(t)) for t in apart),
    )


def loss_plot(plain: Sequence[float], stack: Sequence[float]) -> LossPlot | None:
    """Losses of the plain script and of the stack by step; None when either is missing or not finite."""
    values = [*plain, *stack]
    if len(plain) < 2 or len(stack) < 2 or not all(map(math.isfinite, values)):
        return None
    width, height, left, margin = 460.0, 150.0, 56.0, 12.0
    low, high = _axis(values)
    longest = max(len(plain), len(stack)) - 1

    def points(losses: Sequence[float]) -> str:
        return " ".join(
            f"{left + (width - left - margin) * i / longest:.1f},{_y(loss):.1f}" for i, loss in enumerate(losses)
        )

    def _y(value: float) -> float:
        return height - margin - (height - 2 * margin) * (value - low) / (high - low)

    return LossPlot(
        width=width,
        height=height,
        plain=points(plain),
        stack=points(stack),
        ticks=tuple(ChartMark(at=_y(t), text=f"{t:.4g}") for t in (min(values), max(values))),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlot:
    """A dot for each timed step, in order; `median` is the height of the dashed line."""

    width: float
    height: float
    median: float
    dots: tuple[Dot, ...]
    ticks: tuple[ChartMark, ...]
    legend: tuple[tuple[str, str], ...]  # class of a dot, what such a dot is


OUTLIER = 1.5  # medians, from which on a usual step is an outlier


def step_plot(profile: StepProfile) -> StepPlot | None:
    """Every timed step by wall clock, those that were left out of the median marked with why; None for too few."""
    spread = profile.wall_us or profile.step_us
    times = profile.every_us or (spread.raw if spread is not None else ())
    held = profile.held if len(profile.held) == len(times) else ("",) * len(times)
    if spread is None or len(times) < 4 or spread.median <= 0:
        return None
    width, height, left, top, bottom = 900.0, 190.0, 70.0, 10.0, 176.0
    # One long pause must not press all others flat: what is above the top is drawn at it.
    high = min(max(times), 4.0 * spread.median) * 1.06
    low = 0.9 * min(times)

    def y(value: float) -> float:
        return bottom - (bottom - top) * min(1.0, max(0.0, (value - low) / (high - low)))

    dots = []
    for i, (time, why) in enumerate(zip(times, held, strict=True)):
        outlier = not why and time > OUTLIER * spread.median
        key = "held" if why else "outlier" if outlier else "after"
        title = f"step {i + 1}: {time_text(time)}" + (f", left out: {why}" if why else "")
        x = left + 10 + (width - left - 20) * i / (len(times) - 1)
        dots.append(Dot(x=x, y=y(time), r=3.6 if key == "after" else 4.6, key=key, title=title))
    legend = []
    if any(dot.key == "outlier" for dot in dots):
        legend.append(("outlier", f"longer than {OUTLIER} medians"))
    if any(held):
        told = ", ".join(f"{sum(why == w for w in held)} × {why}" for why in dict.fromkeys(filter(None, held)))
        legend.append(("held", f"left out of the median: {told}"))
    ticks = tuple(ChartMark(at=y(value), text=time_text(value)) for value in (low, (low + high) / 2, high))
    return StepPlot(
        width=width, height=height, median=y(spread.median), dots=tuple(dots), ticks=ticks, legend=tuple(legend)
    )
