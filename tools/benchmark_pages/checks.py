"""What compute-sanitizer found in each family's kernels, as `make sanitize` writes it, and the page's section on it."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from advisor.ops import catalog, sources
from advisor.ops.family import Family
from benchmark_pages.gaps import Row

FILE = "sanitizer.json"  # in the machine's folder of docs/benchmarks
TOOLS = {
    "memcheck": "accesses outside a tensor",
    "racecheck": "threads that race for shared memory",
    "initcheck": "reads of what nobody has written",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """One tool over one family's verification cases. `told`: what it said, "clean" when that is all."""

    family: str
    tool: str
    clean: bool
    told: str
    kernel_sha: str  # of all sources of the family, with everything they include
    torch: str
    date: str


def row(family: Family, tool: str, clean: bool, told: str) -> CheckRow:
    """What a run that has just ended has found."""
    import torch

    return CheckRow(
        family=family.id,
        tool=tool,
        clean=clean,
        told=told,
        kernel_sha=sha(family),
        torch=torch.__version__,
        date=datetime.date.today().isoformat(),
    )


def sha(family: Family) -> str:
    """Of the kernels as they are."""
    return sources.sha256(*sorted(family.kernels))


def merged(on_file: Sequence[Row], found: CheckRow) -> list[Row]:
    """The rows with this one in its place: families in the catalogue's order, tools in that of `TOOLS`; families that are gone leave."""
    new = asdict(found)
    rows = {(known["family"], known["tool"]): known for known in (*on_file, new)}
    places = [(family.id, tool) for family in catalog.FAMILIES for tool in TOOLS]
    return [rows[place] for place in places if place in rows]


def section(rows: Sequence[Row]) -> str:
    """In Markdown: a line a family. What was found with other sources is told as older."""
    watched = "; ".join(f"{tool}: {what}" for tool, what in TOOLS.items())
    text = (
        "## Sanitized\n\ncompute-sanitizer over every family's verification cases, its own kernels alone (`make sanitize`): "
        f"{watched}.\n"
    )
    if not rows:
        return f"{text}Nothing is on file of these kernels.\n"
    lines = [
        f"{text}*Older*: the kernels have changed since. –: no result on file.\n",
        f"| family | {' | '.join(TOOLS)} |",
        f"|---|{'---|' * len(TOOLS)}",
    ]
    known = {(found["family"], found["tool"]): found for found in rows}
    for family in catalog.FAMILIES:
        now = sha(family)
        cells = (_cell(known.get((family.id, tool)), now) for tool in TOOLS)
        lines.append(f"| {family.id} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(found: Row | None, now: str) -> str:
    if found is None:
        return "–"
    said = "clean" if found["clean"] else f"**{found['told'].splitlines()[0]}**"
    return f"{said}, {found['date']}" + ("" if found["kernel_sha"] == now else ", *older*")
