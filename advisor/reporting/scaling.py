"""What several GPUs are foretold to do, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.analysis.scaling import Foretold
from advisor.core.units import percent_text, time_text


def text(
    rows: Sequence[Foretold], *, one_us: float, links: Sequence[str], samples: float | None = None, device: str = "cuda"
) -> str:
    """A line a number of GPUs; `samples` of a whole training, whose GPU-hours are told then. Of a run without a GPU it counts processes."""
    one = "GPU" if device == "cuda" else "process"
    head = f"{'GPUs' if device == 'cuda' else 'procs':>6}  {'step, ms':>15}  {'of it exposed':>13}  {'norms':>6}  {'efficiency':>11}  {'samples/s':>19}"
    lines = [
        f"Foretold from one {one}",
        f"  one {one}: {time_text(one_us)} a step",
        *(f"  {link}" for link in links),
        "",
    ]
    if device != "cuda":
        lines[1:1] = ["  The run was on a CPU: each process has cores of its own, as many. For GPUs, profile on one."]
    lines.append(head + (f"  {one}-hours" if samples else ""))
    for row in rows:
        low, high = (us / 1e3 for us in row.step_us)
        least, most = (percent_text(share) for share in row.efficiency)
        line = (
            f"{row.ranks:>6}  {f'{low:.2f} to {high:.2f}':>15}  {f'{row.exposed_us / 1e3:.2f}':>13}  "
            f"{f'{row.norms_us / 1e3:.2f}':>6}  {f'{least} to {most}':>11}  "
            f"{f'{row.samples_per_s[0]:,.0f} to {row.samples_per_s[1]:,.0f}':>19}"
        )
        if samples:
            fewest, largest = row.gpu_hours(samples)
            line += f"  {fewest:,.1f} to {largest:,.1f}"
        lines.append(line)
    return "\n".join(lines) + "\n"
