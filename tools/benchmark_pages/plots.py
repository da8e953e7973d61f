"""Dot plots of the benchmark page, as SVG: a row a measurement, a dot a contender. Readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

ROW, CHARACTER, PLOT, RIGHT, HEAD, FOOT = 18, 8, 440, 24, 54, 26  # pixels
# Colours that colour-blind readers can tell apart: Okabe and Ito, "Color Universal Design", 2008.
COLOURS = {"advisor": "#009e73", "eager": "#999999", "compile": "#0072b2"}
MOST_TICKS = 8

_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#444}.title{font-weight:600;fill:#222}line{stroke:#ddd}.one{stroke:#888}"
    "@media(prefers-color-scheme:dark){text{fill:#aaa}.title{fill:#ddd}line{stroke:#333}.one{stroke:#888}}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dots:
    """One row: what was measured, and each contender's number; a contender that was not measured is left out."""

    label: str
    values: Mapping[str, float]  # by key of COLOURS


def dots(title: str, one: str, names: Mapping[str, str], rows: Sequence[Dots]) -> str:
    """The plot as a self-contained SVG document. The axis begins at 0 and shows 1, which `one` names; `names` are the contenders'."""
    most = max(1.0, *(value for row in rows for value in row.values.values()))
    step = draw_step(most)
    end = step * math.ceil(most / step)
    left = CHARACTER * max(len(row.label) for row in rows) + 20

    def x(value: float) -> float:
        return round(left + PLOT * value / end, 1)

    width, height = left + PLOT + RIGHT, HEAD + ROW * len(rows) + FOOT
    bottom = height - FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{escape(title, {chr(34): "&quot;"})}">',
        f"<style>{_STYLE}</style>",
        f'<text class="title" x="8" y="18">{escape(title)}</text>',
        f'<text x="{width - 8}" y="18" text-anchor="end">1 = {escape(one)}</text>',
    ]
    shown = [key for key in COLOURS if any(key in row.values for row in rows)]
    for number, key in enumerate(shown):
        legend = left + 120 * number
        parts.append(f'<circle cx="{legend + 5}" cy="34" r="5" fill="{COLOURS[key]}"/>')
        parts.append(f'<text x="{legend + 15}" y="38">{escape(names[key])}</text>')
    for number in range(round(end / step) + 1):
        at = number * step
        parts.append(f'<line x1="{x(at)}" x2="{x(at)}" y1="{HEAD - 8}" y2="{bottom}"/>')
        parts.append(f'<text x="{x(at)}" y="{bottom + 16}" text-anchor="middle">{at:g}</text>')
    parts.append(f'<line class="one" x1="{x(1)}" x2="{x(1)}" y1="{HEAD - 8}" y2="{bottom}"/>')
    for number, row in enumerate(rows):
        y = HEAD + ROW * number + ROW // 2
        parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{escape(row.label)}</text>')
        parts += [
            f'<circle cx="{x(row.values[key])}" cy="{y}" r="5" fill="{COLOURS[key]}"/>'
            for key in reversed(shown)
            if key in row.values
        ]
    return "\n".join((*parts, "</svg>")) + "\n"


def draw_step(most: float) -> float:
    """The least of 1, 2 and 5 times a power of ten that needs no more than `MOST_TICKS` ticks."""
    power = 10.0 ** math.floor(math.log10(most / MOST_TICKS))
    return next(power * factor for factor in (1, 2, 5, 10) if most / (power * factor) <= MOST_TICKS)
