"""The trace's own file format: compact, whole, and told apart from damage."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from advisor.core import storage
from advisor.core.errors import AdvisorError
from advisor.core.trace import DramSamples, OpTable, Trace
from advisor.loop.records import load_trace, save_trace

TRACE = Trace(
    device="cuda",
    step_bounds_ns=[1, 2],
    ops=OpTable(**{column.name: ["µ", ""] if "str" in str(column.type) else [1, 2] for column in fields(OpTable)}),
    dram=DramSamples(start_ns=[1], end_ns=[2], read_bytes=[1.5], write_bytes=[0.0]),
    launches=3,
    notes=["a note"],
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    save_trace(path, TRACE)
    read = load_trace(path)
    assert read.ops.name == TRACE.ops.name
    assert read == TRACE
    assert "\n" not in path.read_text()


def test_the_slow_writers_file_is_read_too(tmp_path: Path) -> None:
    storage.save(tmp_path / "trace.json", TRACE)
    assert load_trace(tmp_path / "trace.json") == TRACE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "another version"),
        ('{"schema_version": 99}', "another version"),
        ('{"schema_version": 1}', "is no trace"),
        ('{"schema_version": 1, "device": "cpu", "step_bounds_ns": [], "ops": 3}', "holds int"),
        (
            json.dumps(
                {"schema_version": 1, "device": "cpu", "step_bounds_ns": [], "ops": {"name": ["a"], "start_ns": []}}
            ),
            "different length",
        ),
    ],
)
def test_damage_is_told(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(AdvisorError, match=message):
        load_trace(path)
    with pytest.raises(AdvisorError, match="no absent"):
        load_trace(tmp_path / "absent.json")
