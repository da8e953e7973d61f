"""The table of a step's convolutions for a terminal, for programs and in Markdown."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from advisor.analysis.convolutions import Product, products, settings
from advisor.core.profile import StepProfile
from advisor.core.provenance import Provenance
from advisor.core.storage import to_plain
from advisor.core.units import counted, percent_text, shape_text, time_text
from advisor.reporting import wording
from advisor.reporting.machine import cell
from advisor.reporting.page import clip, clip_path, printable

CONV_SCHEMA_VERSION = 1
SHOWN = 20  # products, unless all are asked for
NONE = "No convolution was traced in this run."


def _tflops(value: float) -> str:
    """Two digits that say something on a processor too: `412`, `3.1`, `0.042`."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


_COLUMNS: tuple[tuple[str, Callable[[Product], str]], ...] = (
    ("module", lambda p: p.module or p.layer or "?"),
    ("product", lambda p: p.direction),
    ("algorithm", lambda p: p.algorithm),
    ("units", lambda p: p.units),
    ("dtype", lambda p: " ".join(filter(None, (p.dtype, p.layout.upper())))),
    ("time", lambda p: time_text(p.total_us)),
    ("TFLOP/s", lambda p: _tflops(p.tflops) if p.tflops else "–"),
    ("of limit", lambda p: "–" if p.of_limit is None else percent_text(p.of_limit)),
)
_RIGHT = {"time", "TFLOP/s", "of limit"}
_LEAST_MODULE = 12  # columns of a terminal, however narrow
_MOVED = ("units", "dtype")  # to the line below, where a terminal is too narrow for them


def conv_json(profile: StepProfile) -> dict[str, Any]:
    """All products as plain data: the fields of `advisor.analysis.convolutions.Product`, with `tflops` and `of_limit`."""
    rows = [
        {**to_plain(p), "total_us": p.total_us, "tflops": p.tflops, "of_limit": p.of_limit} for p in products(profile)
    ]
    return {
        "schema_version": CONV_SCHEMA_VERSION,
        "type": "convolutions",
        "script": profile.script,
        "settings": list(settings(profile)),
        "products": rows,
    }


def about(product: Product) -> str:
    """What stands below a row: the layer, its input, why it runs so, what it drags along, and what else could make it."""
    parts = [product.layer, f"input {shape_text(product.shape)}" if product.shape else "", *product.reasons]
    if product.conversion_us:
        parts.append(
            f"{time_text(product.conversion_us)} in {counted(len(product.conversions), 'kernel')} that convert"
        )
    for other in product.alternatives:
        measured = other.provenance is Provenance.MEASURED
        time = (
            f"{time_text(other.time_us)} by {other.like} on file"
            if measured
            else f"{time_text(other.time_us)} at least"
        )
        by = f", apply: {other.transform}" if other.transform else ""
        parts.append(f"{other.what}: {time}, error {other.error}{by}")
    if product.error:
        parts.append(f"ERROR: {product.error}")
    return " · ".join(filter(None, parts))


def conv_text(profile: StepProfile, width: int, *, everything: bool = False) -> str:
    """The products that take longest, or all, two lines each."""
    found = products(profile)
    if not found:
        return NONE
    shown = found if everything else found[:SHOWN]
    columns, below = list(_COLUMNS), []
    while True:
        table = [[of(product) for _, of in columns] for product in shown]
        sizes = [max(len(name), *(len(line[i]) for line in table)) for i, (name, _) in enumerate(columns)]
        room = width - sum(sizes[1:]) - 2 * len(sizes[1:])
        moved = next((column for column in columns if column[0] in _MOVED), None)
        if room >= min(sizes[0], _LEAST_MODULE) or moved is None:
            break
        columns.remove(moved)
        below.append(moved[1])
    sizes[0] = min(sizes[0], max(_LEAST_MODULE, room))
    names = [name for name, _ in columns]
    lines = [
        clip(wording.script(profile), max(width, 40)),
        clip(wording.machine(profile), max(width, 40)),
        "",
        _line(names, names, sizes),
    ]
    for product, line in zip(shown, table, strict=True):
        lines.append(_line(names, [clip_path(line[0], sizes[0]), *line[1:]], sizes))
        told = " · ".join(filter(None, [*(of(product) for of in below), about(product)]))
        lines += textwrap.wrap(printable(told), max(width, 40), initial_indent="    ", subsequent_indent="    ")
    total = sum(product.total_us for product in found)
    ending = [f"{counted(len(found), 'product')} of convolutions, {time_text(total)} a step."]
    if len(shown) < len(found):
        ending[-1] += f" Shown: the {len(shown)} longest; --all shows every one."
    ending += [f"{told}." for told in settings(profile)]
    wrong = [product for product in found if product.error]
    if wrong:
        where = wrong[0].module or wrong[0].layer
        ending.append(f"ERROR: {counted(len(wrong), 'product')} faster than this machine can be: {where}.")
    lines += ["", *(line for text in ending for line in textwrap.wrap(text, max(width, 40)))]
    return "\n".join(line.rstrip() for line in lines)


def _line(names: Sequence[str], cells: Sequence[str], sizes: Sequence[int]) -> str:
    padded = (
        text.rjust(size) if name in _RIGHT else text.ljust(size)
        for name, text, size in zip(names, cells, sizes, strict=True)
    )
    return "  ".join(padded)


def conv_markdown(profile: StepProfile, *, everything: bool = False) -> str:
    """The same as a table in Markdown."""
    found = products(profile)
    if not found:
        return NONE + "\n"
    head = [name for name, _ in _COLUMNS] + ["about"]
    lines = ["| " + " | ".join(head) + " |", "|" + "|".join("---:" if n in _RIGHT else "---" for n in head) + "|"]
    for product in found if everything else found[:SHOWN]:
        lines.append(
            "| " + " | ".join(cell(text) for text in (*(of(product) for _, of in _COLUMNS), about(product))) + " |"
        )
    return "\n".join(lines) + "\n"
