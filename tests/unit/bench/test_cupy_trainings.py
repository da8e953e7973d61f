"""Rows of CuPy loops: arms by turns, what is told, what is written. No GPU: planted measurements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from advisor.bench import cupy_trainings, results
from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode
from advisor.trials.records import Measurement
from benchmark_pages import cupy_section

STEP_US = {"plain": 4000.0, "exact": 1000.0, "all": 500.0}


def planted(arm: str, items: Sequence[str]) -> Measurement:
    kind, turn = arm[:-1], int(arm[-1])
    step_us = STEP_US[kind] * (1 + 0.1 * turn)
    settled = {"settled_s": 2.0 + turn, "settled_steps": 50} if items else {}
    losses = (2.0, 1.0 if kind == "plain" else 1.001)
    return Measurement(step_us=(step_us,) * 3, losses=losses, applied=tuple(items), **settled)


def test_a_row_is_made_of_arms_by_turns() -> None:
    asked: list[str] = []

    def measure(arm: str, items: Sequence[str]) -> Measurement:
        asked.append(arm)
        return planted(arm, items)

    row = cupy_trainings.measured("net", "net.py", measure, "14.2")
    assert asked == ["plain0", "exact0", "all0", "plain1", "exact1", "all1"]
    assert (row.plain_ms, row.exact_ms, row.all_ms) == pytest.approx((4.2, 1.05, 0.525))
    assert row.exact_range == pytest.approx((1.0, 1.1))
    assert row.error == pytest.approx(1e-3)
    assert row.applied == cupy_trainings.ALL
    told = cupy_trainings.line(storage.to_plain(row))
    assert "4.00 x" in told
    assert "8.00 x" in told
    assert "settled behind 50 steps, 2.8 s more" in told


def test_an_arm_without_steps_leaves_the_others() -> None:
    row = cupy_trainings.measured(
        "net", "net.py", lambda arm, items: Measurement() if arm.startswith("all") else planted(arm, items), "14.2"
    )
    assert row.all_ms is None
    assert row.all_error is None
    assert "all changes" not in cupy_trainings.line(storage.to_plain(row))


def test_rows_are_written_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: object) -> None:
    for name in ("run_a.sh", "run_b.sh", "notes.txt"):
        (tmp_path / name).write_text("")
    monkeypatch.setattr(cupy_trainings, "installed", lambda: "14.2")
    monkeypatch.setattr(cupy_trainings.Behind, "measure", lambda self, folder, items, say: planted(folder.name, items))
    kinds: list[str] = []

    def write(path: Path, kind: str, rows: list[object], **facts: object) -> None:
        kinds.append(kind)
        path.write_text(json.dumps({"rows": rows}))

    monkeypatch.setattr(results, "write", write)
    out = tmp_path / "cupy.json"
    assert cupy_trainings.run(tmp_path, pattern="", out=out, say=lambda text: None) == ExitCode.OK
    assert [row["name"] for row in json.loads(out.read_text())["rows"]] == ["a", "b"]
    assert kinds == ["cupy", "cupy"]
    with pytest.raises(AdvisorError, match="nothing is named like 'c'"):
        cupy_trainings.run(tmp_path, pattern="c", out=out, say=lambda text: None)


def test_without_cupy_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(AdvisorError, match="no CuPy here"):
        cupy_trainings.run(None, pattern="", out=None, say=print)


def test_the_page_has_a_line_a_loop() -> None:
    row = storage.to_plain(cupy_trainings.measured("net", "net.py", planted, "14.2"))
    silent = {**row, "name": "silent", "plain_ms": None}
    told = cupy_section.section([row, silent])
    assert "| net | 4.200 (4.000 to 4.400) | 1.050 (1.000 to 1.100) | 4.00 × | 1e-03 |" in told
    assert "| 2.8 | 14.2 |" in told
    assert "silent" not in told
    assert cupy_section.section([]) == ""
