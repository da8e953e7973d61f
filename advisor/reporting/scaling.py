"""What several GPUs are predicted to do, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.analysis.scaling import Foretold
from advisor.core.units import percent_text, time_text
from advisor.reporting.page import MIN_WIDTH, Page

_RIGHT = "{:>6} {:>15} {:>7} {:>6} {:>5} {:>13} {:>16}"


def text(
    rows: Sequence[Foretold],
    width: int = 100,
    *,
    one_us: float,
    links: Sequence[str],
    samples: float | None = None,
    device: str = "cuda",
) -> str:
    """A line a number of GPUs; `samples` of a whole training, whose GPU-hours are told then. Of a run without a GPU it counts processes."""
    page = Page(max(width, MIN_WIDTH), False)
    one, many = ("GPU", "GPUs") if device == "cuda" else ("process", "procs")
    lines = [f"Predicted from the profile of one {one}"]
    if device != "cuda":
        lines += page.wrap(
            "The run was on a CPU: each process is taken to have as many cores. For GPUs, profile on one.", 2
        )
    for told in (f"one {one}: {time_text(one_us)} a step", *links):
        lines += page.wrap(told, 4, first=2)
    titles = _RIGHT.format(many, "step, ms", "exposed", "norms", "input", "efficiency", "samples/s")
    lines += ["", titles + (f"  {one}-hours" if samples else "")]
    for row in rows:
        low, high = (us / 1e3 for us in row.step_us)
        least, most = (percent_text(share) for share in row.efficiency)
        fewest, largest = row.samples_per_s
        line = _RIGHT.format(
            row.ranks,
            f"{_digits(low)} to {_digits(high)}",
            _digits(row.exposed_us / 1e3),
            _digits(row.norms_us / 1e3),
            _digits(row.supply_us / 1e3) if row.supply_us else "–",
            f"{least} to {most}",
            f"{_rate(fewest)} to {_rate(largest)}",
        )
        if samples:
            shortest, longest = row.gpu_hours(samples)
            line += f"  {shortest:,.1f} to {longest:,.1f}"
        lines.append(line)
    lines.append("")
    lines += page.wrap(
        "exposed: communication that does not overlap with the backward pass, in ms. "
        "norms: batch norms that share their statistics, in ms. "
        "input: the least that a step takes for its samples to be read and made, in ms.",
        0,
    )
    return "\n".join(lines) + "\n"


def _digits(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _rate(value: float) -> str:
    """In thousands or millions from ten of them on: `1,908`, `39.6k`, `26.2M`."""
    unit, letter = next(((u, name) for u, name in ((1e6, "M"), (1e3, "k")) if value >= 10 * u), (1, ""))
    return f"{value / unit:,.1f}{letter}" if letter else f"{value:,.0f}"
