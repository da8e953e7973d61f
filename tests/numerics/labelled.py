"""The numeric gate on right changes and planted faults of small trainings: docs/numerics.json and docs/numerics.md.

python tests/numerics/labelled.py --half held      judge that half, write its records, then the page (`chosen`: the one it was built with)
python tests/numerics/labelled.py --half held --gate before  the same, recorded as the gate of an earlier revision (which PYTHONPATH names)
python tests/numerics/labelled.py --half held --only GAN     only trainings with this in their names; what is on record of others stays
python tests/numerics/labelled.py --half large --device cuda --workers 4   on a GPU, several trainings side by side; recorded by its name
python tests/numerics/labelled.py                  write the page from what is recorded
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from numerics import faults, right  # noqa: E402 – found by the path set above
from numerics.large import LARGE  # noqa: E402 – found by the path set above
from numerics.loops import Change, Loop  # noqa: E402 – found by the path set above
from numerics.nets import KINDS, Kind  # noqa: E402 – found by the path set above

RECORD, PAGE = ROOT / "docs" / "numerics.json", ROOT / "docs" / "numerics.md"
# What the bounds were chosen with. All others were judged when these stood.
CHOSEN = (
    "segmentation, atrous, deep", "segmentation, Res2Net", "segmentation, Res2Net, deep", "detection, frozen norms",
    "1-D, dropout 0.8", "1-D, dropout 0.2", "1-D, causal", "3-D, UNet", "GAN, batch norm", "refinement",
    "refinement, long", "classifier, plain", "classifier, ConvNeXt", "classifier, transformer", "classifier in bf16",
)  # fmt: skip
# Which of the faults, and which weights and batches, the half that was held out is judged on: others than while the gate was built.
HELD_FROM = 7
STATES = {"fresh": 2, "trained": 120}  # steps
HALVES = ("chosen", "held", "large")


def half(name: str, only: str = "") -> list[tuple[int, Kind]]:
    """Trainings of one half, or the large ones, with their numbers: the one of that name, or those with `only` in theirs."""
    first = 0 if name == "chosen" else HELD_FROM
    numbered = enumerate(LARGE if name == "large" else KINDS, first)
    found = [(i, k) for i, k in numbered if name == "large" or (k.name in CHOSEN) == (name == "chosen")]
    return [(i, k) for i, k in found if k.name == only] or [(i, k) for i, k in found if only in k.name]


def cases(loop: Loop, number: int) -> Iterator[tuple[str, Change]]:
    """(right or fault, change)."""
    yield from (("right", change) for change in right.changes(loop))
    yield from (("fault", change) for change in faults.changes(loop, number))


def _now(device: str) -> float:
    """On a CPU the time of this process, of one thread, whatever else runs."""
    return time.process_time() if device == "cpu" else time.perf_counter()


def judged(
    name: str, only: str = "", states: tuple[str, ...] = tuple(STATES), device: str = "cpu"
) -> Iterator[dict[str, Any]]:
    """One record for each change of each training of that half, in each state."""
    for number, kind in half(name, only):
        loop, steps = Loop(kind, 0, number, device), 0
        for state in states:
            place = tuple(STATES).index(state)
            loop.advance(STATES[state] - steps)
            steps = STATES[state]
            for what, change in cases(loop, number + 4 * place):
                if change.name.startswith("fp16") and device == "cpu" and (place or number % 2):  # slow there
                    continue
                start = _now(device)
                check = loop.judge(change)
                seconds = _now(device) - start
                yield {
                    "training": kind.name, "state": state, "change": change.name, "is": what,
                    "passed": check.passed, "detail": check.detail, "seconds": round(seconds, 3),
                }  # fmt: skip


def _all_of(name: str, only: str, states: tuple[str, ...], device: str) -> list[dict[str, Any]]:
    """The records of one training, in a process of its own; what is judged wrongly is said at once."""
    torch.set_num_threads(1)
    records = []
    for record in judged(name, only, states, device):
        records.append(record)
        if wrong(record):
            what = (record[key] for key in ("training", "state", "change", "detail"))
            print(f"{record['is']}: {', '.join(what)}", flush=True)
    return records


def side_by_side(name: str, only: str, states: tuple[str, ...], device: str, workers: int) -> list[dict[str, Any]]:
    """The records of all trainings of a half with `only` in their names, so many at a time."""
    names = [kind.name for _, kind in half(name, only)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        found = [pool.submit(_all_of, name, training, states, device) for training in names]
        return [record for future in found for record in future.result()]


def wrong(record: dict[str, Any]) -> bool:
    """A right change refused or a fault let through; what could not be compared is neither passed nor refused."""
    return record["passed"] is not True if record["is"] == "right" else record["passed"] is not False


def _order(record: dict[str, Any]) -> tuple[str, ...]:
    return tuple(record[key] for key in ("training", "state", "is", "change"))


def page(recorded: dict[str, dict[str, list[dict[str, Any]]]]) -> str:
    lines = [
        "# How often the numeric gate is wrong",
        "",
        "<!-- Made by `python tests/numerics/labelled.py`; do not edit. -->",
        "",
        "How often the numeric gate is wrong: correct changes that it refuses, and deliberate errors that it accepts.",
        "",
        f"{len(KINDS)} small trainings (tests/numerics/nets.py), after 2 steps and after {STATES['trained']}, on a CPU. Right changes are those",
        "of tests/numerics/right.py, faults those of tests/numerics/faults.py. We developed the gate on one half of the trainings (chosen).",
        "The other half (held) is the test set. It was used once; then we repaired the gate, and tested it again with new weights, batches",
        f"and faults (random draw {HELD_FROM}). The decision is [0061](decisions/0061-each-layer-by-itself.md).",
        "",
        "| half | gate | right changes | refused | faults | let through | seconds a change, mean (median) |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in sorted({name for halves in recorded.values() for name in halves}):
        for gate in ("before", "now"):
            records = recorded.get(gate, {}).get(name, [])
            if not records:
                continue
            good, bad = ([r for r in records if r["is"] == what] for what in ("right", "fault"))
            refused, through = sum(map(wrong, good)), sum(map(wrong, bad))
            seconds = [r["seconds"] for r in records]
            lines.append(
                f"| {name} | {gate} | {len(good)} | {refused} ({refused / len(good):.1%}) | {len(bad)} | {through} ({through / len(bad):.1%}) "
                f"| {statistics.mean(seconds):.2f} ({statistics.median(seconds):.2f}) |"
            )
    for gate in ("now", "before"):
        errors = [(name, r) for name in recorded.get(gate, {}) for r in recorded[gate][name] if wrong(r)]
        if errors:
            lines += [
                "",
                "## Wrong decisions of the present gate" if gate == "now" else f"## Wrong decisions: {gate}",
                "",
                "| half | training | state | change | reason given by the gate |",
                "|---|---|---|---|---|",
            ]
            lines += [
                f"| {name} | {r['training']} | {r['state']} | {r['change']} | {r['detail']} |" for name, r in errors
            ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--half", choices=HALVES)
    parser.add_argument("--gate", choices=("now", "before"), default="now")
    parser.add_argument("--state", choices=tuple(STATES), help="that state only; what is on record of the other stays")
    parser.add_argument("--only", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    if options.half:
        states = (options.state,) if options.state else tuple(STATES)
        records = side_by_side(options.half, options.only, states, options.device, options.workers)
        place = options.half
        if options.device != "cpu":
            place += f" on {torch.cuda.get_device_name(options.device)}"
        records = [r | {"detail": r["detail"] if wrong(r) else ""} for r in records]
        recorded = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
        judged_now = {(r["training"], r["state"]) for r in records}
        before = recorded.get(options.gate, {}).get(place, [])
        kept = [r for r in before if (r["training"], r["state"]) not in judged_now]
        recorded.setdefault(options.gate, {})[place] = sorted(kept + records, key=_order)
        RECORD.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
