"""docs/networks.md: which places of well-known networks the kernels take. Generated, never typed.

python tests/kernels/networks_page.py --capture        capture every network, write docs/networks/*.json, then the page
python tests/kernels/networks_page.py --capture timm   only this library's; what is on record of the others stays
python tests/kernels/networks_page.py                  write the page from what is on record

Needs no GPU, some ten minutes, and torchvision, timm, segmentation-models-pytorch and MONAI. Which networks: `networks.py` here.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tests")]

import fake_gpu  # noqa: E402 – found by the path set above
from networks import LIBRARIES, Library, Network  # noqa: E402 – found by the path set above

from advisor.ops import catalog  # noqa: E402 – found by the path set above
from advisor.ops.family import Family  # noqa: E402 – found by the path set above
from advisor.reporting import places  # noqa: E402 – found by the path set above

PAGE = REPO / "docs" / "networks.md"
RECORDS = REPO / "docs" / "networks"
NAMED = 4  # networks that a row of the last tables names

Record = dict[str, Any]

_HEAD = """# Which networks the kernels find

<!-- Made by `python tests/kernels/networks_page.py`; do not edit. -->

The bundled kernels replace PyTorch's operations where a captured forward has a family's pattern. This page counts such places
in networks as their libraries publish them, with a column for each family. "17 of 56" means that the family has taken 17 places
and left 39, to a family further right or to PyTorch. The reasons are below. An empty cell: the network has no such place.

**What counts.** A place counts if the kernels would run there on an H200, by the measurements on file. Speed was not measured.
The forward is in training mode under bf16 autocast, channels_last, at 224 x 224 and a batch of 64. Inception and Xception have
299 x 299. Segmentation has 256 x 256 and a batch of 16, or two volumes of 96 x 96 x 96. The examples have what the script has.
`pointwise`, and `pooling` with a bias and ReLU, want large tensors, so they find more in larger batches.

**How.** Each network is captured as `advisor apply` does, with Dynamo and all families' rewrites, but with fake CUDA tensors and
CUDA's autocast (`tests/kernels/fake_gpu.py`). So the graphs have a GPU's dtypes and shapes, and no GPU is needed. Conditions that a
rewrite does not ask for are taken to hold: sm_80 or newer, channels_last, aligned memory.

`python tests/kernels/networks_page.py --capture` makes the page again. `tests/kernels/test_zoo.py` holds some networks to a number of
places. The report of `advisor apply` lists the places of your own network by module path, with what was left alone and why.
"""

_TAIL = """
These have no kernels, so no report lists them: ECA, effective and split squeeze-and-excite, a norm between the two products of a
squeeze-and-excite, global response norm, selective kernels, PReLU, PixelShuffle, and factors that are plain numbers (as in EDSR).

Nothing is taken inside an activation checkpoint that chooses what it keeps (`context_fn`), nor in a checkpoint of a graph that
Inductor compiles. None of these networks has such a checkpoint. Patterns that look alike and compute something else are in
`tests/kernels/test_left_alone.py`: frozen halves, shortcuts that are written into, gates over rows.
"""


def families() -> list[Family]:
    """The page's columns."""
    return [family for family in catalog.FAMILIES if family.captured]


# ---- what is recorded


def observed(network: Network) -> Record:
    """How many graphs the network is, and by family what was taken, by pattern, and what was left, by reason."""
    graphs = fake_gpu.capture(network.build(), network.shape)
    found: dict[str, Counter[str]] = {}
    left: dict[str, Counter[str]] = {}
    for reports in graphs:
        for family, report in reports.items():
            found.setdefault(family, Counter()).update(report.matched.values())
            left.setdefault(family, Counter()).update(report.unmatched.values())
    return {"graphs": len(graphs), "found": _sorted(found), "left": _sorted(left)}


def _sorted(counts: dict[str, Counter[str]]) -> dict[str, dict[str, int]]:
    return {family: dict(sorted(counter.items())) for family, counter in sorted(counts.items()) if counter}


def record(library: Library) -> Record:
    """What all networks of the library show, with what they were captured with. A line a network goes to stderr."""
    seen = {}
    for number, network in enumerate(library.networks, 1):
        began = time.monotonic()
        seen[network.name] = observed(network)
        say = f"{library.id} {number}/{len(library.names)} {network.name}: {time.monotonic() - began:.1f} s"
        print(say, file=sys.stderr, flush=True)
    return {
        "date": datetime.date.today().isoformat(),
        "versions": library.versions(),
        "families": [family.id for family in families()],
        "networks": seen,
    }


def written(found: Record) -> str:
    """A record as JSON with a line a network."""
    facts = {key: value for key, value in found.items() if key != "networks"}
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(seen)}" for name, seen in found["networks"].items())
    return json.dumps(facts, indent=1)[:-2] + f',\n "networks": {{\n{rows}\n }}\n}}\n'


def on_record(library: Library) -> Record:
    """What was recorded of this library.

    Raises:
        SystemExit: when nothing was, or not with these networks and families: a table would lack a row or a column.
    """
    path = RECORDS / f"{library.id}.json"
    found: Record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    again = f"run `python tests/kernels/networks_page.py --capture {library.id}`"
    if not found:
        raise SystemExit(f"{library.title} is not on record: {again}")
    if found["families"] != [family.id for family in families()]:
        raise SystemExit(f"{library.title} is on record with other families than the catalogue's: {again}")
    if tuple(found["networks"]) != library.names:
        raise SystemExit(f"{library.title} is on record with other networks than are listed: {again}")
    return found


# ---- the page


def row(name: str, seen: Record) -> str:
    """A network's row of its table."""
    title = name if seen["graphs"] == 1 else f"{name} ({seen['graphs']} graphs)"
    return _row(title, *(_cell(seen, family.id) for family in families()))


def _cell(seen: Record, family: str) -> str:
    """`17 of 56`; empty for none."""
    found, left = (sum(seen[kind].get(family, {}).values()) for kind in ("found", "left"))
    return f"{found} of {found + left}" if left else str(found or "")


def _row(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def _table(*columns: str) -> list[str]:
    return [_row(*columns), "|" + "---|" * len(columns)]


def page() -> str:
    """The page's text, from what is on record."""
    records = {library: on_record(library) for library in LIBRARIES}
    parts = [_HEAD, "\n".join(_legend()), _broken(records.values())]
    for library, found in records.items():
        rows = [row(name, seen) for name, seen in found["networks"].items()]
        table = [*_table("network", *(f"`{family.id}`" for family in families())), *rows]
        parts += [f"### {library.title}", _captured(found), "\n".join(table)]
    parts += ["## What was found", "\n".join(_aggregated(records.values(), "found", "pattern"))]
    parts += ["## What is left alone, and why", "\n".join(_aggregated(records.values(), "left", "reason")), _TAIL]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _legend() -> list[str]:
    return [*_table("family", "takes the place of"), *(_row(f"`{f.id}`", f.replaces) for f in families())]


def _broken(records: Iterable[Record]) -> str:
    """Which networks are no single graph, in a sentence."""
    seen = [(name, row["graphs"]) for found in records for name, row in found["networks"].items()]
    parts = [f"{name}, which is {count}" for name, count in seen if count > 1]
    but = f", but {' and '.join(parts)}" if parts else ""
    return f"{len(seen)} networks. All were captured whole, in one graph{but}."


def _captured(found: Record) -> str:
    """`22 November 2026, torch 2.13.0, timm 1.0.31`."""
    date = datetime.date.fromisoformat(found["date"])
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    return f"{date.day} {date:%B %Y}, {versions}"


def _aggregated(records: Iterable[Record], kind: str, column: str) -> list[str]:
    """By family what the records hold of this kind, over all networks; texts that differ in numbers alone are one."""
    found_in: dict[tuple[str, str], Counter[str]] = {}  # (family, text without its numbers) → networks' places
    alike: dict[tuple[str, str], list[str]] = {}
    for found in records:
        for name, seen in found["networks"].items():
            for family, texts in seen[kind].items():
                for text, count in texts.items():
                    key = family, places.numberless(text)
                    found_in.setdefault(key, Counter())[name] += count
                    alike.setdefault(key, []).append(text)
    lines = _table("family", column, "places", "networks")
    for family in families():
        mine = [key for key in found_in if key[0] == family.id]
        for key in sorted(mine, key=lambda key: -found_in[key].total()):
            text, networks = places.spanned(alike[key]), found_in[key]
            lines.append(_row(f"`{family.id}`", text, networks.total(), _some(networks)))
    return lines


def _some(counts: Counter[str]) -> str:
    """The networks with most places, and how many others there are."""
    names = [name for name, _ in counts.most_common(NAMED)]
    others = len(counts) - len(names)
    return ", ".join(names) + (f" and {others} more" if others else "")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ids = [library.id for library in LIBRARIES]
    parser.add_argument(
        "--capture", nargs="*", metavar="LIBRARY", help=f"capture first: all, or some of {', '.join(ids)}"
    )
    given = parser.parse_args(arguments)
    if given.capture is not None:
        if unknown := set(given.capture) - set(ids):
            parser.error(f"no library {', '.join(sorted(unknown))}: there are {', '.join(ids)}")
        capture([library for library in LIBRARIES if not given.capture or library.id in given.capture])
    PAGE.write_text(page(), encoding="utf-8")


def capture(libraries: Sequence[Library]) -> None:
    """Record these libraries' networks.

    Raises:
        SystemExit: before anything is captured, when one of them is not installed.
    """
    if missing := [f"{library.id} {why}" for library in libraries if (why := library.missing())]:
        raise SystemExit(
            "not captured, for not all of it can be:\n"
            + "\n".join(f"  {line}" for line in missing)
            + "\nInstall what is missing, or name the libraries to capture: of the others stays what is on record."
        )
    RECORDS.mkdir(exist_ok=True)
    for library in libraries:
        (RECORDS / f"{library.id}.json").write_text(written(record(library)), encoding="utf-8")


if __name__ == "__main__":
    main()
