"""docs/reliability.md from the catalogue and from recorded runs of its tests.

python tests/faults/page.py --run cpu          run the tests that need no GPU, write docs/reliability/cpu.json, then the page
python tests/faults/page.py --run gpu          the same of those that need one: docs/reliability/gpu.json
python tests/faults/page.py --run cpu --missing  only those that are not on record, or failed there; what is stays
python tests/faults/page.py --run gpu --only chance  only those with this in their names; what else is on record stays
python tests/faults/page.py                    write the page from what is recorded
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence, Set
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CATALOGUE = Path(__file__).with_name("catalogue.yaml")
PLANNED = 102  # that many were listed before anything was built; those behind them were met since
PAGE = ROOT / "docs" / "reliability.md"
RECORDS = ROOT / "docs" / "reliability"
HELD = ("tests", "told")  # of a run, by test


def catalogue() -> list[dict[str, Any]]:
    """The areas, each with its faults."""
    areas: list[dict[str, Any]] = yaml.safe_load(CATALOGUE.read_text(encoding="utf-8"))
    return areas


def tests() -> list[str]:
    """Every `file::function` that the catalogue names, once, in order."""
    named = (test for area in catalogue() for fault in area["faults"] for test in fault.get("tests", ()))
    return list(dict.fromkeys(named))


def exists(test: str) -> bool:
    """Whether the file defines that function."""
    file, _, function = test.partition("::")
    path = ROOT / file
    return path.is_file() and bool(re.search(rf"^def {function}\(", path.read_text(encoding="utf-8"), re.MULTILINE))


def on_gpu(test: str) -> bool:
    """Whether the test needs a GPU: those have files of their own."""
    return test.partition("::")[0].endswith("_gpu.py")


def named(machine: str) -> list[str]:
    """The tests that a run on this machine is to make."""
    return [test for test in tests() if on_gpu(test) is (machine == "gpu")]


def record(machine: str, chosen: Sequence[str]) -> dict[str, Any]:
    """Run these of the catalogue's tests here, in one run: outcomes of each one's cases, with what they ran on."""
    at_once = ["-n", "2", "--dist", "loadfile"] if machine == "cpu" else []  # two at once would share the GPU
    with tempfile.TemporaryDirectory() as folder:
        outcome = Path(folder) / "outcome.xml"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-o",
                "junit_family=xunit1",  # which knows what a test tells beside its outcome
                *at_once,
                f"--junit-xml={outcome}",
                *chosen,
            ],
            cwd=ROOT,
            check=False,
        )
        found: dict[str, Counter[str]] = {}
        told: dict[str, str] = {}
        for case in ElementTree.parse(outcome).getroot().iter("testcase"):
            name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name', '').split('[')[0]}"
            kinds = {child.tag for child in case}
            result = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            found.setdefault(name, Counter())[result] += 1
            for said in case.iter("property"):
                if said.get("name") == "told":
                    told[name] = said.get("value", "")
    import torch

    return {
        "device": torch.cuda.get_device_name() if machine == "gpu" else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "tests": {name: dict(sorted(counts.items())) for name, counts in sorted(found.items())},
        "told": dict(sorted(told.items())),
    }


def records() -> dict[str, list[dict[str, Any]]]:
    """What was recorded, by machine: its runs, each with the tests that none has made since."""
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RECORDS.glob("*.json"))}


def _with(run: dict[str, Any], tests: Set[str]) -> dict[str, Any]:
    """The run with what it holds of these tests alone."""
    return {**run, **{key: {test: found for test, found in run[key].items() if test in tests} for key in HELD}}


def with_run(before: Sequence[dict[str, Any]], run: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs with one more, whose tests leave the others'; two of a day on the same machine and software are one."""
    made_on = ("device", "python", "torch", "date")
    runs = []
    for old in before:
        left = _with(old, old["tests"].keys() - run["tests"].keys())
        if all(old[key] == run[key] for key in made_on):
            run = {**run, **{key: dict(sorted({**left[key], **run[key]}.items())) for key in HELD}}
        elif left["tests"]:
            runs.append(left)
    return [*runs, run]


def _happened(fault: dict[str, Any], machines: dict[str, list[dict[str, Any]]]) -> str:
    said = []
    for machine, runs in machines.items():
        total: Counter[str] = Counter()
        told: list[str] = []
        for test in fault.get("tests", ()):
            for run in runs:
                total.update(run["tests"].get(test, {}))
                told += [run["told"][test]] if test in run["told"] else []
        if total:
            counts = ", ".join(f"{count} {kind}" for kind, count in sorted(total.items()))
            said.append(f"{machine}: {counts}" + f" ({'; '.join(told)})" * bool(told))
    on_record = {test for runs in machines.values() for run in runs for test in run["tests"]}
    waiting = [test for test in fault.get("tests", ()) if on_gpu(test) and test not in on_record]
    if waiting:
        said.append(f"gpu: {len(waiting)} not run yet")
    if reason := fault.get("not_applicable"):
        return f"does not apply: {reason}"
    return "; ".join(said) or "not run"


def page() -> str:
    """The page's text."""
    machines, areas = records(), catalogue()
    every = [fault for area in areas for fault in area["faults"]]
    tried = [fault for fault in every if fault.get("tests")]
    lines = [
        "# Reliability: what was tried, and what happened",
        "",
        "<!-- Made by `python tests/faults/page.py`; do not edit. -->",
        "",
        "Everything here that can go wrong is planted by a test. The list is `tests/faults/catalogue.yaml`; `make reliability` runs",
        "its tests and writes this page.",
        "",
        f"{len(every)} faults, {PLANNED} of them listed before anything was built and the others met since: {len(tried)} with "
        f"tests, {len(every) - len(tried)} that do not apply, {sum('open' in fault for fault in every)} with something still open.",
        "",
    ]
    for machine, run in ((machine, run) for machine, runs in machines.items() for run in runs):
        on = f"**{machine}**" + f", {run['device']}" * bool(run["device"])
        total = sum((Counter(counts) for counts in run["tests"].values()), Counter())
        lines.append(
            f"- {on}, {run['date']}, Python {run['python']}, torch {run['torch']}: "
            + ", ".join(f"{count} {kind}" for kind, count in sorted(total.items()))
        )
    for area in areas:
        lines += ["", f"## {area['area']}", "", "| # | fault | expected | cases |", "|---|---|---|---|"]
        for fault in area["faults"]:
            happened = _happened(fault, machines)
            if "open" in fault:
                happened += f". Open: {fault['open']}"
            lines.append(f"| {fault['number']} | {fault['fault']} | {fault['expected']} | {happened} |")
    return "\n".join(lines) + "\n"


def _stays(test: str, counts: dict[str, int], *, missing: bool, only: str | None) -> bool:
    """Whether a test on record is not run anew."""
    return (missing and not counts.get("failed")) or (only is not None and only not in test)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", choices=("cpu", "gpu"), help="run the tests for this machine first and record them")
    parser.add_argument("--missing", action="store_true", help="run only tests that are not on record, or failed there")
    parser.add_argument("--only", metavar="TEXT", help="run only tests with this in their names")
    given = parser.parse_args()
    if given.run:
        RECORDS.mkdir(exist_ok=True)
        wanted = named(given.run)
        before = records().get(given.run, [])
        kept = {
            test
            for run in before
            for test, counts in run["tests"].items()
            if test in wanted and _stays(test, counts, missing=given.missing, only=given.only)
        }
        chosen = [test for test in wanted if test not in kept and (given.only or "") in test]
        if chosen:
            before = [_with(run, kept) for run in before]
            text = json.dumps(with_run(before, record(given.run, chosen)), indent=1) + "\n"
            (RECORDS / f"{given.run}.json").write_text(text, encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
