"""Two recorded runs side by side. Times are compared only where that is fair; counts and bytes always are."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from enum import Enum

from advisor.analysis.machine import core_use
from advisor.core.profile import Spread, StepProfile
from advisor.core.provenance import Provenance
from advisor.core.student import block_logs, t_quantile
from advisor.core.units import percent_text
from advisor.reporting import breakdown, numbers, wording
from advisor.reporting.machine import cell

CONFIDENCE = 0.95
# Steps follow one another and are correlated; medians of blocks of steps are nearly independent (cluster means). With
# noise of autocorrelation 0.7 from step to step, 6 blocks of 5 or more steps give intervals that cover the truth in 90 to
# 97 % of runs; 10 blocks of 2 would in 75 %.
MAX_BLOCKS = 6
MIN_BLOCK_STEPS = 5
MIN_BLOCKS = 3
BUSY_FRAC = 0.2  # of the cores: from here the rule cores-taken-by-others says so, too
SHOWN_FRAC = 0.001  # kinds below this share of both steps are left out of the table


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """One number of both runs. `comparable` is False for times of different machines."""

    label: str
    unit: str
    a: float | None
    b: float | None
    comparable: bool = True
    more_is_better: bool = False

    @property
    def ratio(self) -> float | None:
        """B over A, None where either is missing or A is zero."""
        if self.a is None or self.b is None or not self.a > 0:
            return None
        return self.b / self.a

    @property
    def change_text(self) -> str:
        """The relative change, with its sign."""
        if self.ratio is None:
            return "–"
        change = self.ratio - 1
        if abs(change) < 5e-4:
            return "same"
        if self.ratio >= 2:
            return f"×{self.ratio:.3g}"
        if -1 < change < -0.995:  # not nothing, though it rounds to it
            return f"−{100 * -change:.3g} %" if change > -0.9995 else f"1/{1 / self.ratio:,.0f}"
        return ("+" if change > 0 else "−") + percent_text(abs(change))


class Regression(str, Enum):
    """Whether B's step is slower than A's by more than a tolerance."""

    NO = "no regression"
    YES = "regression"
    UNDECIDED = "inconclusive"


@dataclass(frozen=True, slots=True, kw_only=True)
class RegressionVerdict:
    """An outcome and the sentence that goes with it."""

    outcome: Regression
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunComparison:
    """Run B beside run A.

    `ratio` is B's step time over A's, with `low` and `high` at `CONFIDENCE` where both runs keep raw step times.
    `comparable` is False between machines; `differences` says what differs.
    """

    a: str
    b: str
    comparable: bool
    differences: tuple[str, ...]
    ratio: float | None
    low: float | None
    high: float | None
    sentence: str
    totals: tuple[Delta, ...]
    kinds: tuple[Delta, ...]

    def regression(self, tolerance: float) -> RegressionVerdict:
        """Decide whether B is slower than A by more than `tolerance` (a fraction), beyond noise."""
        limit = f"more than {percent_text(tolerance)} slower"
        if not self.comparable:
            return RegressionVerdict(
                outcome=Regression.UNDECIDED, detail="the runs are from different machines; their times decide nothing"
            )
        if self.ratio is None or self.low is None or self.high is None:
            return RegressionVerdict(
                outcome=Regression.UNDECIDED, detail="too few step times were recorded to decide on a regression"
            )
        measured = f"B is {_ratio_text(self.ratio, self.low, self.high)}"
        if self.low > 1 + tolerance:
            return RegressionVerdict(
                outcome=Regression.YES, detail=f"regression: {measured}; the limit is {percent_text(tolerance)}"
            )
        if self.high <= 1 + tolerance:
            return RegressionVerdict(
                outcome=Regression.NO, detail=f"no regression: {measured}; the limit is {percent_text(tolerance)}"
            )
        return RegressionVerdict(
            outcome=Regression.UNDECIDED,
            detail=f"inconclusive: {measured}; too noisy to tell whether B is {limit}. Record more steps",
        )


def equal_blocks(raw: tuple[float, ...]) -> list[list[float]]:
    """Equal blocks of successive steps; empty when there are too few for an interval."""
    times = [t for t in raw if t > 0 and math.isfinite(t)]
    blocks = min(MAX_BLOCKS, len(times) // MIN_BLOCK_STEPS)
    if blocks < MIN_BLOCKS:
        return []
    size = len(times) // blocks
    return [times[i * size : (i + 1) * size] for i in range(blocks)]


def ratio_interval(
    a: Spread, b: Spread, confidence: float = CONFIDENCE, *, means: bool = False
) -> tuple[float, float] | None:
    """Interval of b's step time over a's: Welch's t on the log medians of blocks of steps, or on `means`. None with too few steps.

    Sources: Welch, "The generalization of 'Student's' problem", Biometrika 34, 1947; degrees of freedom rounded down.
    """
    blocks = equal_blocks(a.raw), equal_blocks(b.raw)
    if not all(blocks):
        return None
    x, y = (block_logs(of_one, means=means) for of_one in blocks)
    vx, vy = statistics.variance(x) / len(x), statistics.variance(y) / len(y)
    centre, error = statistics.fmean(y) - statistics.fmean(x), math.sqrt(vx + vy)
    if error == 0:
        return math.exp(centre), math.exp(centre)
    degrees = (vx + vy) ** 2 / (vx**2 / (len(x) - 1) + vy**2 / (len(y) - 1))
    half = t_quantile(0.5 + confidence / 2, max(1, math.floor(degrees))) * error
    return math.exp(centre - half), math.exp(centre + half)


def _label(profile: StepProfile) -> str:
    return f"{wording.script(profile)} · {wording.machine(profile)} · {profile.created}"


def _differences(a: StepProfile, b: StepProfile) -> tuple[bool, list[str]]:
    """Whether times may be compared, and everything that differs between the runs' conditions."""
    x, y = a.environment, b.environment
    hardware = [
        ("device", x.device, y.device),
        ("GPU", x.gpu_name, y.gpu_name),
        ("board", x.gpu_uuid, y.gpu_uuid),
        ("CPU", f"{x.cpu_name} ({x.cpu_count} cores)", f"{y.cpu_name} ({y.cpu_count} cores)"),
    ]
    conditions = [
        ("torch", x.torch, y.torch),
        ("CUDA", x.cuda, y.cuda),
        ("cuDNN", x.cudnn, y.cudnn),
        ("driver", x.driver, y.driver),
        ("batch size", str(a.model.batch_size), str(b.model.batch_size)),
        ("scripts" if a.script != b.script else "arguments", wording.script(a), wording.script(b)),
    ]
    other = [f"Different {what}: {p} and {q}." for what, p, q in hardware if p != q and (p and q)]
    texts = other + [f"Different {what}: {p} and {q}." for what, p, q in conditions if p != q and (p and q)]
    for name, profile in (("A", a), ("B", b)):
        if profile.environment.shared_gpu:
            texts.append(f"Another process used the GPU during run {name}.")
        others = core_use(profile, "cpu_others_frac")
        if others is not None and others > BUSY_FRAC and profile.environment.device == "cpu":
            texts.append(
                f"Other processes took {percent_text(others)} of the cores during run {name}: its times are in doubt."
            )
        if not profile.complete:
            texts.append(f"Run {name} is incomplete.")
    return not other, texts


TIMES = 2.0  # as long, from which on a difference is told as a factor


def _apart(ratio: float) -> str:
    """How much slower or faster a step is that takes `ratio` times as long: `3.0 % slower`, `12.2× slower`."""
    slower, factor = ratio >= 1, max(ratio, 1 / ratio)
    word = "slower" if slower else "faster"
    return f"{factor:.3g}× {word}" if factor >= TIMES else f"{100 * abs(ratio - 1):.1f} % {word}"


def _ratio_text(ratio: float, low: float, high: float) -> str:
    """B beside A in words, with the interval: `3.0 % slower (2.6 % to 3.4 %, 99 % interval)`."""
    (first, word), (second, other) = (_apart(bound).rsplit(" ", 1) for bound in (low, high))
    if word == other:  # both on one side: the smaller difference first
        interval = f"{second} to {first}" if word == "faster" else f"{first} to {second}"
    else:
        interval = f"{first} {word} to {second} {other}"
    return f"{_apart(ratio)} ({interval}, {100 * CONFIDENCE:g} % interval)"


def _sentence(ratio: float | None, bounds: tuple[float, float] | None, comparable: bool) -> str:
    if ratio is None:
        return "Step times cannot be compared: one run has none."
    if not comparable:
        return "The machines differ: times are shown, and not compared."
    if bounds is None:
        return f"B is {_apart(ratio)}; too few steps were recorded for an interval."
    measured = f"B is {_ratio_text(ratio, *bounds)}"
    return f"{measured}." if bounds[1] < 1 or bounds[0] > 1 else f"No difference beyond noise: {measured}."


def compare_profiles(a: StepProfile, b: StepProfile) -> RunComparison:
    """Put run `b` beside run `a`."""
    comparable, differences = _differences(a, b)
    ratio = bounds = None
    means = a.in_bursts or b.in_bursts
    steps = _step_us(a, means), _step_us(b, means)
    if a.step_us is not None and b.step_us is not None and steps[0] and steps[1]:
        ratio = steps[1] / steps[0]
        if comparable:
            bounds = ratio_interval(a.step_us, b.step_us, means=means)
    # Every kind by itself: what is small in one run may not be in the other, and what is not in a trace takes no time there.
    kinds_a, kinds_b = ({c.key: c for c in breakdown.causes(p, small_frac=0.0)} for p in (a, b))
    absent_a, absent_b = (0.0 if p.kernels else None for p in (a, b))
    kinds = [
        Delta(
            label=(kinds_a.get(key) or kinds_b[key]).label,
            unit="us",
            a=kinds_a[key].time_us if key in kinds_a else absent_a,
            b=kinds_b[key].time_us if key in kinds_b else absent_b,
            comparable=comparable,
        )
        for key in dict.fromkeys([*kinds_a, *kinds_b])
        if max(kinds[key].frac for kinds in (kinds_a, kinds_b) if key in kinds) >= SHOWN_FRAC
    ]
    return RunComparison(
        a=_label(a),
        b=_label(b),
        comparable=comparable,
        differences=tuple(differences),
        ratio=ratio,
        low=bounds[0] if bounds else None,
        high=bounds[1] if bounds else None,
        sentence=_sentence(ratio, bounds, comparable),
        totals=_totals(a, b, comparable, steps),
        kinds=tuple(kinds),
    )


def _step_us(profile: StepProfile, means: bool) -> float | None:
    """The median step, or the mean one of those kept: where batches come in bursts a median says nothing of what a step takes."""
    spread = profile.step_us
    if spread is None:
        return None
    return statistics.fmean(spread.raw) if means and spread.raw else spread.median


def _totals(
    a: StepProfile, b: StepProfile, comparable: bool, steps: tuple[float | None, float | None]
) -> tuple[Delta, ...]:
    def pair(
        label: str, unit: str, values: tuple[float | None, float | None], *, time: bool = False, alike: bool = True
    ) -> Delta:
        rate = unit == "count" and time
        comparing = alike and (comparable or not time)
        return Delta(label=label, unit=unit, a=values[0], b=values[1], comparable=comparing, more_is_better=rate)

    told: set[Provenance] = set()  # how the runs' traffic is known: counted and modelled bytes are two quantities

    def per_step(profile: StepProfile) -> dict[str, float | None]:
        nbytes, how = breakdown.dram_bytes(profile)
        told.add(how)
        return {
            "kernels": sum(r.calls for r in profile.kernels) if profile.kernels else None,
            "launches": profile.launches or None,
            "bytes": nbytes or None,
            "syncs": sum(s.calls for s in profile.syncs) if profile.kernels else None,
            "copied": sum(c.bytes for c in profile.copies) if profile.kernels else None,
            "allocated": float(profile.memory.peak_allocated_bytes) or None,
            "reserved": float(profile.memory.peak_reserved_bytes) or None,
        }

    x, y = per_step(a), per_step(b)
    rates = (breakdown.samples_per_s(a), breakdown.samples_per_s(b))
    counted = "operators" if a.environment.device == b.environment.device == "cpu" else "kernels"
    rows = [
        pair("step time", "us", steps, time=True),
        pair("samples per second", "count", rates, time=True),
        pair(f"{counted} per step", "count", (x["kernels"], y["kernels"])),
        pair("launches per step", "count", (x["launches"], y["launches"])),
        pair("memory traffic per step", "bytes", (x["bytes"], y["bytes"]), alike=len(told) < 2),
        pair("host waits per step", "count", (x["syncs"], y["syncs"])),
        pair("copied host/device per step", "bytes", (x["copied"], y["copied"])),
        pair("peak memory allocated", "bytes", (x["allocated"], y["allocated"])),
        pair("peak memory reserved", "bytes", (x["reserved"], y["reserved"])),
    ]
    return tuple(r for r in rows if r.a is not None or r.b is not None)


def compare_markdown(comparison: RunComparison) -> str:
    """The comparison as Markdown, for CI summaries."""
    lines = ["## advisor compare", "", f"**{cell(comparison.sentence)}**", ""]
    lines += [f"- A: {cell(comparison.a)}", f"- B: {cell(comparison.b)}"]
    lines += [f"- {cell(text)}" for text in comparison.differences]
    lines += ["", "| | A | B | change |", "|---|---:|---:|---:|"]
    for d in (*comparison.totals, *comparison.kinds):
        change = d.change_text if d.comparable else "not comparable"
        lines.append(f"| {cell(d.label)} | {numbers.value(d.a, d.unit)} | {numbers.value(d.b, d.unit)} | {change} |")
    return "\n".join(lines) + "\n"
