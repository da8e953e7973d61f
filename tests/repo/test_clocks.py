"""No test's outcome depends on how fast or how steady the machine is: tests read no clock, and wait without limits of their own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
READS = re.compile(r"\btime\.(?:time|monotonic|perf_counter|process_time)(?:_ns)?\(\)")
LIMITS = re.compile(r"\btimeout=\d|\.(?:wait|join)\(\d|\btimeout_s=\d")
# What measures on purpose, and what is read for another reason than to decide by it.
MAY = {
    "causes/alternate.py": "measures what a fault costs, for the page",
    "causes/causes_catalogue.py": "a training that is slow on purpose",
    "data_parallel.py": "limits for trainings on GPUs; on a CPU there are none, or planted ones",
    "faults/repeated_trials.py": "times a device for page.py",
    "integration/test_attach.py": "a limit on a planted clock",
    "kernels/networks_page.py": "says how long a network took",
    "numerics/labelled.py": "says how long the gate took",
    "repo/test_case_names.py": "a text that it judges",
    "repo/test_clocks.py": "this",
    "repo/test_imports.py": "long",
    "under_load.py": "says how long a run took",
    "unit/profiling/after/test_aggregate.py": "long",
    "unit/profiling/inside/test_collector.py": "instants around events, for a trace",
    "unit/profiling/machine/counters_selftest.py": "measures, on a GPU, what counting costs",
    "unit/profiling/machine/test_environment.py": "a limit of hours",
    "unit/test_runs.py": "ages files",
    "unit/trials/test_search.py": "an instant that is late enough on any machine",
}

TRAININGS = (TESTS / "causes" / "sound", TESTS / "causes" / "varied")  # users' scripts, which end by themselves


def found(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if READS.search(line) or LIMITS.search(line)]


def test_no_test_decides_by_a_real_clock() -> None:
    """`clocks.until` waits for what happens; `clocks.Clock` stands in a module's place for `time`. What may be read is named above."""
    read = {
        str(path.relative_to(TESTS)): lines
        for path in sorted(TESTS.rglob("*.py"))
        if not path.stem.endswith("_gpu")
        and path.parent not in TRAININGS
        and (lines := found(path.read_text(encoding="utf-8")))
    }
    assert {name: lines for name, lines in read.items() if name not in MAY} == {}
    assert set(MAY) <= set(read)  # no name that is not needed


@pytest.mark.parametrize(
    "line",
    [
        "assert time.monotonic() - began < 5",
        "while time.time() < end:",
        "subprocess.run(words, timeout=60)",
        "child.wait(60)",
        "thread.join(20)",
    ],
)
def test_what_reads_one_is_seen(line: str) -> None:
    assert found(line)
