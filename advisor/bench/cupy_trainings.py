"""`advisor bench cupy`: training loops of CuPy alone, as written, with the changes that keep their precision, and with all.

The scripts are docs/examples, and with a folder those behind its runners (`real.py`). Each measurement is a fresh process whose steps are timed once
its changes have settled; what that took beyond plain steps is told too, for a loop that gains nothing pays no more than that.
"""

from __future__ import annotations

import datetime
import functools
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.bench import fresh, results
from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.units import counted
from advisor.resources import kernels_dir
from advisor.trials import records

SCRIPTS: dict[str, tuple[str, ...]] = {
    "cupy_cnn": ("cupy_cnn.py", "--epochs", "200"),
    "cupy_rawkernel": ("cupy_rawkernel.py", "--steps", "20000"),
    "cupy_autograd": ("cupy_autograd.py", "--steps", "20000"),
    "cupy_inverse": ("cupy_inverse.py", "--steps", "20000"),
    "cupy_products": ("cupy_products.py", "--steps", "2000"),
}
EXACT = ("cupy_kernels_once", "cupy_graphs")
ALL = (*EXACT, "cupy_single", "cupy_tf32")
ARMS = {"plain": (), "exact": EXACT, "all": ALL}
WARMUP, STEPS, RUNS = 15, 60, 2
LIMIT_S = 120.0  # of one process
FILE = "cupy.json"
Say = Callable[[str], None]
Measure = Callable[[str, Sequence[str]], records.Measurement]
Loop = Callable[[Path, Sequence[str], Say], records.Measurement]


@dataclass(frozen=True, slots=True, kw_only=True)
class CupyRow:
    """One loop. Times of whole steps in milliseconds: the median of the runs' medians; None where no run gave any.

    Attributes:
        exact_ms: with all changes that keep the precision; all_ms: with those that do not, too.
        plain_range, exact_range, all_range: the smallest and the largest run.
        error: how far the exact changes' last loss is from the plain run's, in parts of it; None where the loop shows none.
        all_error: the same with all changes.
        settled_s: from the first step until the exact changes had settled, in the slowest run; settled_steps: in so many steps.
        applied: what was on of all changes; effects: what those did, or why they did nothing.
    """

    name: str
    script: str
    plain_ms: float | None
    exact_ms: float | None
    all_ms: float | None
    plain_range: tuple[float, ...]
    exact_range: tuple[float, ...]
    all_range: tuple[float, ...]
    error: float | None
    all_error: float | None
    settled_s: float
    settled_steps: int
    applied: tuple[str, ...]
    effects: dict[str, str]
    n: int
    cupy: str
    date: str


def run(folder: Path | None, *, pattern: str, out: Path | None, say: Say) -> int:
    """Measure each loop whose name holds `pattern`; print a line each, and write after each.

    Raises:
        AdvisorError: without a GPU (exit code 5) or CuPy, or when `pattern` matches nothing.
    """
    version = installed()
    chosen = {name: measure for name, measure in _loops(folder).items() if pattern in name}
    if not chosen:
        raise AdvisorError(f"nothing is named like {pattern!r}", expected="part of " + ", ".join(_loops(folder)))
    target = out or results.folder() / FILE
    for number, (name, (script, measure)) in enumerate(chosen.items()):
        say(f"{name}: {number + 1} of {counted(len(chosen), 'loop')}")
        with tempfile.TemporaryDirectory() as place:
            found = measured(name, script, functools.partial(_at, measure, Path(place), say), version)
        print(line(storage.to_plain(found)), flush=True)
        with results.alone(target):
            rows = {row["name"]: row for row in results.on_file(target)}
            rows[name] = storage.to_plain(found)
            results.write(target, "cupy", [rows[known] for known in sorted(rows)], cupy=version)
    return ExitCode.OK


def _at(measure: Loop, place: Path, say: Say, arm: str, items: Sequence[str]) -> records.Measurement:
    return measure(place / arm, items, say)


def measured(name: str, script: str, measure: Measure, version: str) -> CupyRow:
    """The row of a loop: its arms by turns, so that a machine that slows down does so for all."""
    found: dict[str, list[records.Measurement]] = {arm: [] for arm in ARMS}
    for turn in range(RUNS):
        for arm, items in ARMS.items():
            run = measure(f"{arm}{turn}", items)
            if run.step_us:
                found[arm].append(run)
    medians = {arm: sorted(statistics.median(run.step_us) / 1e3 for run in runs) for arm, runs in found.items()}
    middle = {arm: statistics.median(times) if times else None for arm, times in medians.items()}
    slowest = max(found["exact"], key=lambda run: run.settled_s, default=records.Measurement())
    return CupyRow(
        name=name,
        script=script,
        plain_ms=middle["plain"],
        exact_ms=middle["exact"],
        all_ms=middle["all"],
        plain_range=tuple(medians["plain"]),
        exact_range=tuple(medians["exact"]),
        all_range=tuple(medians["all"]),
        error=_apart(found["plain"], found["exact"]),
        all_error=_apart(found["plain"], found["all"]),
        settled_s=slowest.settled_s,
        settled_steps=slowest.settled_steps,
        applied=found["all"][0].applied if found["all"] else (),
        effects=found["all"][0].effects if found["all"] else {},
        n=RUNS,
        cupy=version,
        date=datetime.date.today().isoformat(),
    )


def line(row: Mapping[str, Any]) -> str:
    """What is printed of a loop."""
    if row["plain_ms"] is None:
        return f"{row['name']:16} gave no steps"
    parts = [f"{row['name']:16} as written {row['plain_ms']:7.3f} ms"]
    for arm, told in (("exact", "exact changes"), ("all", "all changes")):
        if (ms := row[f"{arm}_ms"]) is not None:
            parts.append(f"{told} {ms:7.3f} ms {row['plain_ms'] / ms:.2f} x")
    beyond = row["settled_s"] - row["settled_steps"] * row["plain_ms"] / 1e3
    parts.append(f"settled behind {counted(row['settled_steps'], 'step')}, {beyond:.1f} s more than plain ones")
    return "  ".join([*parts, *(f"{name}: {told}" for name, told in row["effects"].items())])


def _apart(plain: list[records.Measurement], changed: list[records.Measurement]) -> float | None:
    if not plain or not changed or not plain[0].losses or not changed[0].losses:
        return None
    a, b = plain[0].losses, changed[0].losses
    last = min(len(a), len(b)) - 1
    return abs(b[last] - a[last]) / max(abs(a[last]), 1e-300)


def installed() -> str:
    """CuPy's version.

    Raises:
        AdvisorError: without it, or without a GPU.
    """
    try:
        import cupy
    except ImportError:
        raise AdvisorError("no CuPy here: its loops cannot be measured", fix="pip install cupy-cuda13x") from None
    if not cupy.cuda.is_available():
        raise AdvisorError("no benchmark here: no CUDA GPU", exit_code=ExitCode.GPU_REQUIRED)
    return str(cupy.__version__)


def _loops(folder: Path | None) -> dict[str, tuple[str, Loop]]:
    """By name, what is run, and what measures it in a folder with these changes."""
    if folder is not None:
        found = sorted(folder.glob("run_*.sh"))
        return {path.stem[4:]: (path.name, Behind(path).measure) for path in found}
    place = kernels_dir().parent / "docs" / "examples"
    return {name: (" ".join(words), Example(place, words).measure) for name, words in SCRIPTS.items()}


@dataclass(frozen=True, slots=True)
class Example:
    """One of docs/examples: its folder, and the words behind `python`."""

    place: Path
    words: tuple[str, ...]

    def measure(self, folder: Path, items: Sequence[str], say: Say) -> records.Measurement:
        """A fresh run of the script."""
        words = (str(self.place / self.words[0]), *self.words[1:])
        return fresh.measure(words, items, folder, say, warmup=WARMUP, steps=STEPS, longest_s=LIMIT_S)


@dataclass(frozen=True, slots=True)
class Behind:
    """A training that a runner starts."""

    runner: Path

    def measure(self, folder: Path, items: Sequence[str], say: Say) -> records.Measurement:
        """A fresh run of the script that the runner starts."""
        say(f"fresh run with {', '.join(items)}" if items else "fresh run as written")
        prefix = [sys.executable, "-m", "advisor.bench.fresh", "--out", str(folder), "--with", ",".join(items)]
        prefix += ["--warmup", str(WARMUP), "--steps", str(STEPS)]
        if not items:
            del prefix[5:7]
        root = str(kernels_dir().parent)
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
        process = subprocess.Popen(
            ["bash", str(self.runner)],
            env=dict(os.environ, PREFIX=" ".join(prefix), PYTHONPATH=path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that it ends with all that it has started
        )
        with suppress(subprocess.TimeoutExpired):
            process.wait(LIMIT_S)
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        try:
            return storage.load(folder / records.MEASURE_FILE, records.Measurement)
        except AdvisorError:
            return records.Measurement()
