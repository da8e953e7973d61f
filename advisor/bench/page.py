"""docs/benchmarks/README.md, made of the results on file: `python -m advisor.bench.page > docs/benchmarks/README.md`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from advisor.ops import catalog, sources
from advisor.ops.family import Case, Family
from advisor.resources import kernels_dir

Row = Mapping[str, Any]
BAR = 10  # characters for a kernel at its limit

_HEAD = """# Benchmarks

Made from the JSON files in this folder by `python -m advisor.bench.page > docs/benchmarks/README.md`; the JSON by
`advisor bench ops` and `advisor bench models` on the machine that names the folder. Wins and losses alike.

How it is measured: all contenders in one process, interleaved call by call, by CUDA events behind a pad that hides launch
times and empties the L2 cache, over rotating inputs; medians, with (p90 - p10) / median as spread. *Limit* is the time for the
bytes that the pass must move, each tensor once as often as the pass cannot avoid it, at the copy bandwidth measured in the same run,
or for its operations at the rate of a matrix product, whichever is longer. Errors are relative, against fp64, beside PyTorch's own.
A family of `advisor kernels list` that is not here has no measurement on file, and nothing runs it.
Memory is the most that a pass had allocated beyond its inputs.
How a number is gathered in a training: [measurement](../measurement.md).
"""


def text(folder: Path) -> str:
    """The page for `folder`, docs/benchmarks: one chapter a machine, in Markdown."""
    parts = [_HEAD]
    for machine in sorted(path for path in folder.iterdir() if path.is_dir()):
        ops, models = (_document(machine / f"{kind}.json") for kind in ("ops", "models"))
        if not ops and not models:
            continue
        parts.append(f"## {(ops or models)['gpu']}\n")
        if models:
            parts += [_models(models)]
        if ops:
            parts += [_facts(ops), *_families(ops["rows"])]
    return "\n".join(parts).rstrip() + "\n"


def _document(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _facts(document: Row) -> str:
    rows = document["rows"]
    dates = sorted({row["date"] for row in rows})
    torch = ", ".join(sorted({row["torch"] for row in rows}))
    return (
        f"### Kernels\n\n{len(rows)} measurements, torch {torch}, CUDA {document['cuda']}, copy bandwidth "
        f"{document['copy_gbps']:,.0f} GB/s, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}.\n"
    )


def _families(rows: Iterable[Row]) -> list[str]:
    by_case: dict[tuple[str, tuple[int, ...], str], list[Row]] = {}
    for row in rows:
        by_case.setdefault((row["name"], tuple(row["shape"]), row["dtype"]), []).append(row)
    parts = []
    for family in catalog.FAMILIES:
        cases = [(case, by_case.get((case.name, case.shape, case.dtype), [])) for case in family.benchmark]
        measured = [(case, found) for case, found in cases if found]
        if measured:
            parts.append(_family(family, measured))
            missing = sorted({f"{case.name} {case.dtype}" for case, found in cases if not found})
            parts += [f"Not measured: {', '.join(missing)}.\n"] if missing else []
    return parts


def _family(family: Family, cases: list[tuple[Case, list[Row]]]) -> str:
    lines = [
        f"#### {family.id}\n",
        f"In place of {family.replaces}.\n",
        "| operation | shape | dtype | pass | ours ms | limit ÷ ours | | eager ÷ ours | compile ÷ ours | spread | "
        "error | PyTorch's | memory ÷ eager's | dispatched |",
        "|---|---|---|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for case, rows in cases:
        for row in rows:
            share = row["limit_ms"] / row["advisor_ms"]
            compiled = f"{row['compile_ms'] / row['advisor_ms']:.2f}" if row["compile_ms"] else "–"
            memory = (
                f"{row['advisor_peak_bytes'] / row['eager_peak_bytes']:.2f}" if row.get("eager_peak_bytes") else "–"
            )
            lines.append(
                f"| {case.name} | {'×'.join(map(str, case.shape))} | {case.dtype} | {row['pass']} "
                f"| {row['advisor_ms']:.4f} | {share:.2f} | {bar(share)} | {row['eager_ms'] / row['advisor_ms']:.2f} "
                f"| {compiled} | {row['spread']:.1%} | {row['error']:.1e} | {row['baseline_error']:.1e} "
                f"| {memory} | {case.wins() or 'yes'} |"
            )
    return "\n".join(lines) + "\n"


def bar(share: float) -> str:
    """`███████···` for 0.7."""
    full = min(BAR, max(0, round(share * BAR)))
    return "█" * full + "·" * (BAR - full)


def trainings(document: Row) -> str:
    """The README's table: the scripts as written, and after `advisor apply --auto`."""
    lines = ["| training | as written, img/s | after `apply --auto` | | kernels |", "|---|---:|---:|---:|---|"]
    lines += [
        f"| {row['name']} | {row['plain_images_per_s']:,.0f} | {_number(row['applied_images_per_s'])} | {row['speedup']:.1f} × "
        f"| {_kernels(row)} |"
        for row in document["rows"]
        if row["speedup"] is not None
    ]
    return "\n".join(lines) + "\n"


def _models(document: Row) -> str:
    rows = document["rows"]
    lines = [
        "### Whole trainings\n",
        f"torch {document['torch']}, CUDA {document['cuda']}. The scripts are docs/examples, unmodified; *applied* is what "
        "`advisor apply --auto` kept, in fresh processes. *Kernels*: whether the bundled ones have changed since.\n",
        "| training | plain img/s | applied img/s | speed-up | kept | hand-tuned ms | with compile ms | applied ms | search s | kernels |",
        "|---|---:|---:|---:|---|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['name']} | {row['plain_images_per_s']:,.0f} | {_number(row['applied_images_per_s'])} | {_speedup(row)} "
            f"| {', '.join(row['kept']) or 'nothing'} | {_number(row['hand_tuned_ms'], 2)} "
            f"| {_number(row['hand_tuned_compiled_ms'], 2)} | {_number(row['applied_ms'], 2)} | {row['apply_s']:.0f} "
            f"| {_kernels(row)} |"
        )
    return "\n".join(lines) + "\n"


def _kernels(row: Row) -> str:
    """Whether the bundled kernels are still those that this training ran with."""
    now = {name: sources.sha256(name) for name in sources.all_names()}
    return "as now" if row["kernel_sha"] == now else "older"


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _speedup(row: Row) -> str:
    if row["speedup"] is None:
        return "–"
    return f"{row['speedup']:.2f} ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})"


if __name__ == "__main__":
    sys.stdout.write(text(kernels_dir().parent / "docs" / "benchmarks"))
