"""Writes ops/dispatch_table.json from the rows on file: which kinds are taken, and which are left to PyTorch because they were not faster.

What a person wrote into the file stays: `like`, `left`, `parts`, `sizes`, `only`, `notes`. An entry of `like` goes where rows have overtaken it.

    python -m advisor.bench.dispatch_rows      # and analysis/convolution_rows.json, anew from docs/benchmarks; `advisor bench ops` does it when it ends
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from advisor.analysis import measured_convs
from advisor.bench import conv_rows
from advisor.core import architectures, storage
from advisor.core.errors import AdvisorError, ExitCode
from advisor.ops import catalog, dispatch_table
from advisor.ops.family import Case, Family
from advisor.ops.moments_cases import APART
from advisor.resources import kernels_dir

# What a case may take beyond what it replaces on one of several GPUs, where it wins on another: a run's noise.
TIE = 0.01

Row = Mapping[str, Any]
Shares = dict[str, dict[str, list[float]]]  # kind → dtype → [least, most]


def results() -> list[Path]:
    """The files of rows in docs/benchmarks, one a GPU."""
    return sorted((kernels_dir().parent / "docs" / "benchmarks").glob("*/ops.json"))


def write(files: Sequence[Path], table: Path = dispatch_table.FILE) -> None:
    """Bring the table up to these rows.

    Raises:
        AdvisorError: when a kind is taken to do as one that the rows do not show to be faster.
    """
    found = json.loads(table.read_text(encoding="utf-8"))
    on_file = {file.parent.name: json.loads(file.read_text(encoding="utf-8")) for file in files}
    by_arch: dict[int, dict[str, list[Row]]] = {}
    for gpu, document in on_file.items():  # files from before this was written are of what was measured first
        by_arch.setdefault(document.get("arch", architectures.MEASURED.sm), {})[gpu] = document["rows"]
    found["layers"] = layers({sm: tuple(rows) for sm, rows in by_arch.items()})
    first = tuple(by_arch.pop(architectures.MEASURED.sm).values())
    for family in catalog.FAMILIES:
        of = _family(family, found["families"].get(family.id, {}), first)
        found["families"][family.id] = of
        dispatch_table.put(family.id, dispatch_table.entries(of))  # which families behind it may ask
    found["of"] = {str(sm): _layer(found["families"], tuple(rows.values())) for sm, rows in sorted(by_arch.items())}
    storage.write_text(table, text(found))


def write_all(files: Sequence[Path]) -> None:
    """Bring up to these rows the table, and what `advisor conv` says of measured convolutions."""
    write(files)
    conv_rows.write(files)


def layers(measured: Mapping[int, Sequence[str]]) -> dict[str, str]:
    """Of each measured architecture its GPUs on file. `dispatch_table.layers` says what the others go by."""
    return {str(sm): f"measured: {', '.join(gpus)}" for sm, gpus in sorted(measured.items())}


def _layer(families: Mapping[str, Any], on_each: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """What the rows of another architecture show, of families with rows there."""
    judged = {family.id: _judged(family, families[family.id], on_each) for family in catalog.FAMILIES}
    return {
        name: {"measured": measured, "slower": slower}
        for name, (measured, slower) in judged.items()
        if measured or slower
    }


def _family(family: Family, of: Mapping[str, Any], on_each: Sequence[Sequence[Row]]) -> dict[str, Any]:
    """The family's entries with `measured` and `slower` of these rows, one sequence a GPU."""
    kept = {key: value for key, value in of.items() if key not in ("measured", "slower")}
    measured, slower = _judged(family, kept, on_each)
    kept["like"] = [entry for old in kept.get("like", ()) if (entry := _not_overtaken(old, measured))]
    for pair, like in (pair for entry in dispatch_table.entries(kept).like for pair in entry.pairs):
        if like[1] not in measured.get(like[0], {}):
            raise AdvisorError(
                f"{family.id}: {' '.join(pair)} is taken to do as {' '.join(like)}, which no row shows to be faster",
                fix=f"Take it out of `like` in {dispatch_table.FILE.name}, or measure it.",
            )
    return {"measured": measured, "slower": slower, **kept}


def _judged(family: Family, of: Mapping[str, Any], on_each: Sequence[Sequence[Row]]) -> tuple[Shares, Shares]:
    """Kinds with rows of each pass: those that are faster wherever a call's size is asked nothing against, and the others."""
    cases = family.benchmark
    kept = {key: value for key, value in of.items() if key not in ("measured", "slower")}
    known = {(case.kind, case.dtype) for case in cases if case.kind and _complete(case, on_each)}
    provisional: Shares = {}
    for kind, dtype in sorted(known):
        provisional.setdefault(kind, {})[dtype] = [0.0, 0.0]
    with dispatch_table.instead(family.id, dispatch_table.entries({**kept, "measured": provisional})):
        of_size = {id(case): not case.wins() for case in cases}
    left = dispatch_table.entries(kept).left
    measured: Shares = {}
    slower: Shares = {}
    for kind, dtype in sorted(known):
        on_file = [case for case in cases if (case.kind, case.dtype) == (kind, dtype) and _of(case, on_each)]
        mine = on_file if (kind, dtype) in left else [case for case in on_file if of_size[id(case)]]
        if not mine:  # on file at sizes alone that are not taken
            continue
        faster = (kind, dtype) not in left and all(_faster(case, cases, on_each) for case in mine)
        into = measured if faster else slower
        into.setdefault(kind, {})[dtype] = _range(share for case in mine for share in _shares(case, on_each))
    return measured, slower


def _not_overtaken(entry: dict[str, Any], measured: Shares) -> dict[str, Any] | None:
    """The entry without names that have rows of their own in all of its dtypes; None where no name is left."""
    names = [name for name in entry["names"] if not all(d in measured.get(name, {}) for d in entry["dtypes"])]
    return {**entry, "names": names} if names else None


def _of(case: Case, on_each: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """The case's rows on each GPU that has any."""
    key = (case.name, list(case.shape), case.dtype)
    found = ([row for row in rows if (row["name"], list(row["shape"]), row["dtype"]) == key] for rows in on_each)
    return [rows for rows in found if rows]


def _complete(case: Case, on_each: Sequence[Sequence[Row]]) -> bool:
    return {row["pass"] for rows in _of(case, on_each) for row in rows} == set(case.passes)


def _time(rows: Sequence[Row]) -> float:
    """Both passes as a share of eager's in the same run."""
    return float(sum(row["advisor_ms"] for row in rows) / sum(row["eager_ms"] for row in rows))


def _shares(case: Case, on_each: Sequence[Sequence[Row]]) -> list[float]:
    return [_time(rows) for rows in _of(case, on_each)]


def _faster(case: Case, cases: Sequence[Case], on_each: Sequence[Sequence[Row]]) -> bool:
    """On some GPU faster, on none slower beyond a tie, than PyTorch, and than the same two apart where they are on file."""
    shares = _shares(case, on_each)
    apart = next((c for c in cases if (c.name, c.shape, c.dtype) == (case.name + APART, case.shape, case.dtype)), None)
    beside = [
        share / _time(other) for share, other in (zip(shares, _of(apart, on_each), strict=False) if apart else ())
    ]
    return all(min(one) < 1.0 and max(one) < 1.0 + TIE for one in (shares, beside) if one)


def _range(shares: Iterable[float]) -> list[float]:
    found = [round(share, 3) for share in shares]
    return [min(found, default=math.inf), max(found, default=-math.inf)]


def text(table: Mapping[str, Any]) -> str:
    """JSON with a line a kind, so that a change of the table is read as one."""
    lines = ["{", f' "schema_version": {dispatch_table.SCHEMA},', ' "layers": {']
    lines.append(",\n".join(f"  {json.dumps(sm)}: {json.dumps(how)}" for sm, how in table["layers"].items()))
    lines += [" },", ' "families": {']
    families = []
    for name, of in table["families"].items():
        parts = []
        for key, value in of.items():
            if isinstance(value, list):
                inner = ",\n".join(f"    {json.dumps(entry)}" for entry in value)
                parts.append(f"   {json.dumps(key)}: [" + (f"\n{inner}\n   ]" if inner else "]"))
            else:
                inner = ",\n".join(f"    {json.dumps(kind)}: {json.dumps(entry)}" for kind, entry in value.items())
                parts.append(f"   {json.dumps(key)}: {{" + (f"\n{inner}\n   }}" if inner else "}"))
        families.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(parts) + "\n  }")
    own = json.dumps(table.get("of", {}))
    return "\n".join([*lines, ",\n".join(families), " },", f' "of": {own}', "}"]) + "\n"


def main() -> int:
    """Write it from docs/benchmarks."""
    files = results()
    if not files:
        raise AdvisorError("this installation has no docs/benchmarks", expected="a checkout")
    write_all(files)
    print(f"wrote {dispatch_table.FILE} and {measured_convs.FILE} from {', '.join(file.parent.name for file in files)}")
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
