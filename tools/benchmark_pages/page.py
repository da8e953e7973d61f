"""docs/benchmarks, its pages and plots, and the README's table, made of the results on file: `python tools/benchmark_pages`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from advisor.bench import cupy_trainings, dispatch_rows, hosts, models, sweep
from advisor.bench.goals import DTYPE, LARGE_BYTES, large
from advisor.core import storage
from advisor.core.units import shape_text
from advisor.ops import catalog
from advisor.ops.family import Case, Family
from benchmark_pages import (
    beside_eager,
    checks,
    cliffs_page,
    cupy_section,
    gaps,
    hosts_section,
    inferred,
    plots,
    real_page,
)
from benchmark_pages.gaps import Measured, Row

BAR = 10  # characters for a kernel at its limit

_HEAD = """# Benchmarks

`python tools/benchmark_pages` makes these pages from the JSON files in the folders here. `advisor bench ops`,
`advisor bench models`, `hosts` and `cupy` make the JSON on the machine that names the folder. Wins and losses are
shown alike.

{machines}
Ratios compare within a machine and a run. Dispatch is decided once for all GPUs: a case must win on one GPU, and may take at
most {tie} more than PyTorch's own on any other.

## How it is measured

| column | what it is |
|---|---|
| times | All contenders run in one process, by turns. Each runs a row of up to eight of its own calls between two CUDA events, \
after a pad that hides launch times. Inputs rotate. Medians; the spread is (p90 - p10) / median. Rows of before 2026-11-23 \
are single calls, which take 2 to 9 µs more ([how](../notes/kernels/how-kernels-are-measured.md#rows-of-calls)). |
| *limit* | The longer of two times: the bytes that the pass must move at the copy bandwidth of the same run, and its \
operations at the rate of a matrix product. |
| *error* | Relative, against fp64, with PyTorch's own for comparison. |
| *units* | Shares of the GPU's units by its performance monitors (`--counters`), in rows of about 3 ms, sampled every 20 µs \
([how](../notes/kernels/how-kernels-are-measured.md#what-holds-a-kernel-counted-in-rows)). |
| *memory* | The most that a pass had allocated beyond its inputs. |
| *host* | The time until a call returns, ours less eager's. Ours goes through a site as in a captured graph, eager's is called \
without its modules. Median of 20 rows of 8 calls each, by turns, on an idle GPU and a shared host \
([how](../notes/host-cost-of-a-call.md#calls-replayed-from-c)). |
| *compile* | torch.compile in its default mode. |

A family of `advisor kernels list` that is on no page has no measurement on file, and nothing runs it.
How a number is gathered in a training: [measurement](../measurement.md).
"""


PAGE = "README.md"
_CONTENDERS = {"advisor": "advisor", "eager": "eager PyTorch", "compile": "torch.compile"}
_TRAINERS = {"advisor": "apply --auto", "eager": "tuned by hand", "compile": "and compiled"}


def files(folder: Path) -> dict[str, str]:
    """What belongs into `folder`, docs/benchmarks, by path: a page for all, one a machine, in Markdown; and plots."""
    made: dict[str, str] = {}
    lines = [
        "| GPU | trainings | measurements | cases dispatched | faster than eager PyTorch | eager ÷ ours | copy GB/s |",
        "|---|---:|---:|---:|---:|---|---:|",
    ]
    every: list[Row] = []
    for machine in sorted(path for path in folder.iterdir() if path.is_dir()):
        ops, models, real = (_document(machine / f"{kind}.json") for kind in ("ops", "models", "real"))
        if real:
            made[f"{machine.name}/{real_page.PAGE}"] = real_page.page(real)
        swept = _document(machine / sweep.FILE)
        if swept:
            made[f"{machine.name}/{cliffs_page.PAGE}"] = cliffs_page.page(swept)
        if ops or models:
            parts = _machine(machine, ops, models, real, swept)
            made |= {f"{machine.name}/{name}": text for name, text in parts.items()}
            lines.append(_line(machine.name, ops, models))
            every += ops.get("rows", [])
    head = _HEAD.format(machines="\n".join(lines) + "\n", tie=f"{dispatch_rows.TIE:.0%}")
    return {PAGE: f"{head}\n{inferred.section(measured_families(every))}".rstrip() + "\n", **made}


def _line(name: str, ops: Row, models: Row) -> str:
    gpu, trainings = (ops or models)["gpu"], len(models.get("rows", ()))
    measured = [
        rows for _, cases in measured_families(ops.get("rows", ())) for case, rows in cases if rows and not case.wins()
    ]
    ratios = [sum(r["eager_ms"] for r in rows) / sum(r["advisor_ms"] for r in rows) for rows in measured]
    return (
        f"| [{gpu}]({name}/{PAGE}) | {trainings} | {len(ops.get('rows', ()))} | {len(ratios)} | {sum(r > 1 for r in ratios)} "
        f"| {_range(ratios)} | {_number(ops.get('copy_gbps'))} |"
    )


def _machine(folder: Path, ops: Row, models: Row, real: Row, swept: Row) -> dict[str, str]:
    """A machine's page and plots, by name."""
    parts, drawn = [f"# {(ops or models)['gpu']}\n\n[How it is measured](../{PAGE}#how-it-is-measured).\n"], {}
    if real:
        told = real_page.summary(real["rows"])
        parts.append(f"[Trainings that other people wrote]({real_page.PAGE}): {told}\n")
    if swept:
        parts.append(f"[Where cuDNN is slow]({cliffs_page.PAGE}): {cliffs_page.summary(swept['rows'])}\n")
    if models:
        name = "trainings.svg"
        drawn[name] = _models_plot(models["rows"])
        parts.append(_models(models, f"![Speed of whole trainings, as written = 1]({name})"))
    if ops:
        families = measured_families(ops["rows"])
        checked = _document(folder / checks.FILE).get("rows", ())
        small = hosts_section.section(_document(folder / hosts.FILE).get("rows", ()))
        parts += [_facts(ops, families), summary(families), gaps.section(families), beside_eager.section(families)]
        loops = cupy_section.section(_document(folder / cupy_trainings.FILE).get("rows", ()))
        parts += [part for part in (small, loops) if part]
        parts += [checks.section(checked)]
        for family, cases in families:
            name = f"{family.id}.svg"
            measured = [(case, rows) for case, rows in cases if rows]
            plot = _family_plot(family, measured)
            drawn |= {name: plot} if plot else {}
            parts.append(
                _family(family, measured, f"![{family.id}: share of the limit reached]({name})" if plot else "")
            )
            missing = [f"{case.name} {case.dtype} {shape_text(case.shape)}" for case, rows in cases if not rows]
            parts += [f"Not measured: {', '.join(missing)}.\n"] if missing else []
    return {PAGE: "\n".join(parts).rstrip() + "\n", **drawn}


def _document(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _facts(document: Row, families: Sequence[tuple[Family, Measured]]) -> str:
    rows = document["rows"]
    dates = sorted({row["date"] for row in rows})
    torch = ", ".join(sorted({row["torch"] for row in rows}))
    return (
        f"## Kernels\n\n{len(rows)} measurements, torch {torch}, CUDA {document['cuda']}, copy bandwidth "
        f"{document['copy_gbps']:,.0f} GB/s, {' to '.join(dict.fromkeys((dates[0], dates[-1])))}. {_compiled(families, rows)}\n"
    )


def _compiled(families: Sequence[tuple[Family, Measured]], rows: Sequence[Row]) -> str:
    """How many rows have what torch.compile makes of the operation beside them, and where that is faster than what is dispatched."""
    beside = sum(row["compile_ms"] is not None for row in rows)
    if not beside:
        return "None has compiled code beside it: they are of `advisor bench ops --baseline eager`."
    dispatched = [
        row
        for _, cases in families
        for case, of in cases
        if not case.wins()
        for row in of
        if row["compile_ms"] is not None
    ]
    slower = sum(row["compile_ms"] < row["advisor_ms"] for row in dispatched)
    return (
        f"{beside if beside < len(rows) else 'All'} have compiled code beside them, {len(dispatched)} of them of what is dispatched: "
        f"there it is faster than ours in {slower}."
    )


def measured_families(rows: Iterable[Row]) -> list[tuple[Family, Measured]]:
    """Families that were measured, with the rows of each of their cases."""
    by_case: dict[tuple[str, tuple[int, ...], str], list[Row]] = {}
    for row in rows:
        by_case.setdefault((row["name"], tuple(row["shape"]), row["dtype"]), []).append(row)
    found = [
        (family, [(case, by_case.get((case.name, case.shape, case.dtype), [])) for case in family.benchmark])
        for family in catalog.FAMILIES
    ]
    return [(family, cases) for family, cases in found if any(rows for _, rows in cases)]


def summary(families: Iterable[tuple[Family, Measured]]) -> str:
    """A line for each family and pass: how near the limit on large tensors, and where PyTorch's own op runs instead."""
    lines = [
        f"Each family in {DTYPE} on tensors of {LARGE_BYTES / 1e6:.0f} MB and more, where it is dispatched: median (least to most). "
        "*Dispatched*: of all cases measured, any dtype and size; elsewhere PyTorch's own operation runs. A case is dispatched where both "
        "passes together win.\n",
        "| family | pass | cases | limit ÷ ours | | eager ÷ ours | compile ÷ ours | dispatched |",
        "|---|---|---:|---|---|---|---|---:|",
    ]
    for family, cases in families:
        measured = [(case, row) for case, rows in cases for row in rows]
        for way in dict.fromkeys(row["pass"] for _, row in measured):
            every = [(case, row) for case, row in measured if row["pass"] == way]
            wins = [(case, row) for case, row in every if not case.wins()]
            shown = [row for case, row in wins if large(case)]
            limits = [row["limit_ms"] / row["advisor_ms"] for row in shown]
            lines.append(
                f"| [{family.id}](#{family.id}) | {way} | {len(shown)} | {_range(limits)} "
                f"| {bar(median(limits)) if limits else ''} | {_range([r['eager_ms'] / r['advisor_ms'] for r in shown])} "
                f"| {_range([r['compile_ms'] / r['advisor_ms'] for r in shown if r['compile_ms']])} "
                f"| {len(wins)} of {len(every)} |"
            )
    return "\n".join(lines) + "\n"


def _range(values: Sequence[float]) -> str:
    """`0.85 (0.71 to 0.96)`."""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})" if values else "–"


def _family_plot(family: Family, measured: Measured) -> str:
    """Each operation once, at its largest tensor; empty where none was measured in the dtype shown."""
    largest: dict[str, tuple[Case, list[Row]]] = {}
    for case, rows in measured:
        known = largest.get(case.name)
        if case.dtype == DTYPE and (known is None or math.prod(case.shape) > math.prod(known[0].shape)):
            largest[case.name] = case, rows
    shown = [
        plots.Dots(
            label=f"{case.name} {shape_text(case.shape)}{' backward' if row['pass'] == 'backward' else ''}",
            values={who: row["limit_ms"] / row[f"{who}_ms"] for who in plots.COLOURS if row[f"{who}_ms"]},
        )
        for case, rows in largest.values()
        for row in rows
    ]
    return plots.dots(f"{family.id}, {DTYPE}: limit ÷ time", "at the limit", _CONTENDERS, shown) if shown else ""


def _family(family: Family, cases: Measured, plot: str) -> str:
    lines = [
        f"### {family.id}\n",
        f"In place of {family.replaces}.\n",
        *([f"{plot}\n"] if plot else []),
        "| operation | shape | dtype | pass | ours ms | limit ÷ ours | | eager ÷ ours | compile ÷ ours | spread | "
        "error | PyTorch's | memory ÷ eager's | host µs | dispatched |",
        "|---|---|---|---|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for case, rows in cases:
        for row in rows:
            share = row["limit_ms"] / row["advisor_ms"]
            compiled = f"{row['compile_ms'] / row['advisor_ms']:.2f}" if row["compile_ms"] else "–"
            memory = (
                f"{row['advisor_peak_bytes'] / row['eager_peak_bytes']:.2f}" if row.get("eager_peak_bytes") else "–"
            )
            lines.append(
                f"| {case.name} | {shape_text(case.shape)} | {case.dtype} | {row['pass']} "
                f"| {row['advisor_ms']:.4f} | {share:.2f} | {bar(share)} | {row['eager_ms'] / row['advisor_ms']:.2f} "
                f"| {compiled} | {row['spread']:.1%} | {row['error']:.1e} | {row['baseline_error']:.1e} "
                f"| {memory} | {row['advisor_host_us'] - row['eager_host_us']:+.0f} | {case.wins() or 'yes'} |"
            )
    return "\n".join(lines) + "\n"


def bar(share: float) -> str:
    """`███████···` for 0.7."""
    full = min(BAR, max(0, round(share * BAR)))
    return "█" * full + "·" * (BAR - full)


def trainings(document: Row) -> str:
    """The README's table: the scripts as written, what people tune by hand where that was measured, and after `advisor apply`."""
    rows = [row for row in document["rows"] if row["speedup"] is not None]
    titles = {"eager_ms": "tuned by hand", "compile_ms": "and compiled", "advisor_ms": "after `apply --auto`"}
    titles = {key: title for key, title in titles.items() if any(row[key] for row in rows)}
    lines = [
        f"| training, img/s | as written | {' | '.join(titles.values())} | factor | kernels |",
        f"|---|---:|{'---:|' * len(titles)}---:|---|",
    ]
    for row in rows:
        rates = " | ".join(_rate(row, key) for key in titles)
        lines.append(
            f"| {row['name']} | {row['plain_images_per_s']:,.0f} | {rates} | {row['speedup']:.1f} × | {_kernels(row)} |"
        )
    return "\n".join(lines) + "\n"


def with_trainings(readme: str, document: Row) -> str:
    """The README with its table of trainings made anew."""
    table = trainings(document)
    begin = readme.index(table.partition("as written")[0])
    end = readme.index("\n\n", begin) + 1
    return readme[:begin] + table + readme[end:]


def _models(document: Row, plot: str) -> str:
    rows = document["rows"]
    lines = [
        "## Whole trainings\n",
        f"torch {document['torch']}, CUDA {document['cuda']}. The scripts are docs/examples, unmodified; *applied* is what "
        "`advisor apply --auto` kept, in fresh processes. *Tuned by hand* is the same script with bf16 autocast, channels_last, "
        "cuDNN autotuning and a fused optimizer, *compiled* with torch.compile too; – where that was not measured in the same "
        "session. *Limit* is modelled: the operators of the step profiled last, each at the rates measured on this machine. "
        "*Search* is what finding what is kept took, and when, where that was proved and timed again later by `advisor apply --plan`. "
        "*Kernels*: whether the bundled ones have changed since.\n",
        f"{plot}\n",
        "| training | as written img/s | by hand img/s | compiled img/s | applied img/s | speed-up | kept | as written ms | "
        "by hand ms | compiled ms | applied ms | limit ms | search | kernels |",
        "|---|---:|---:|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        rates = " | ".join(_rate(row, key) for key in ("eager_ms", "compile_ms", "advisor_ms"))
        times = " | ".join(_number(row[f"{key}_ms"], 2) for key in ("plain", "eager", "compile", "advisor", "limit"))
        lines.append(
            f"| {row['name']} | {row['plain_images_per_s']:,.0f} | {rates} | {_speedup(row)} "
            f"| {', '.join(row['kept']) or 'nothing'} | {times} | {_search(row)} | {_kernels(row)} |"
        )
    return "\n".join(lines) + "\n"


def _models_plot(rows: Iterable[Row]) -> str:
    shown = [
        plots.Dots(
            label=row["name"],
            values={who: row["plain_ms"] / row[f"{who}_ms"] for who in plots.COLOURS if row[f"{who}_ms"]},
        )
        for row in rows
    ]
    return plots.dots("Whole trainings: how many times as fast", "the script as written", _TRAINERS, shown)


def _rate(row: Row, key: str) -> str:
    """Images a second at this step time."""
    return _number(row["plain_images_per_s"] * row["plain_ms"] / row[key] if row[key] else None)


def _kernels(row: Row) -> str:
    return "older" if models.has_changed(row) else "as now"


def _search(row: Row) -> str:
    took = f"{row['apply_s']:.0f} s"
    return f"{took}, {row['searched']}" if row.get("searched") else took


def _number(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:,.{digits}f}"


def _speedup(row: Row) -> str:
    if row["speedup"] is None:
        return "–"
    return f"{row['speedup']:.2f} ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})"


SHOWN = "nvidia-h200"  # the machine of the README's table


def write(root: Path) -> None:
    """Make the pages, plots and the README's table of the checkout at `root` anew."""
    folder, readme = root / "docs" / "benchmarks", root / "README.md"
    for name, content in files(folder).items():
        storage.write_text(folder / name, content)
    shown = _document(folder / SHOWN / "models.json")
    storage.write_text(readme, with_trainings(readme.read_text(encoding="utf-8"), shown))
