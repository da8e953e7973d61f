"""Run folders that were not written by this advisor (numbers in catalogue.yaml)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.profile import KernelRow, StepProfile

ROOT = Path(__file__).resolve().parents[2]


def sound() -> dict[str, object]:
    row = KernelRow(name="kernel", kind="conv", op="aten::conv2d", calls=1, time_us=10.0)
    profile = StepProfile(
        script="train.py",
        argv=(),
        created="2026-01-01T00:00:00",
        environment=Environment(),
        step_kind="optimizer",
        step_us=None,
        wall_us=None,
        kernels=(row,),
        launches=1,
    )
    return {"schema_version": storage.SCHEMA_VERSION, "type": "StepProfile", **storage.to_plain(profile)}


def report(folder: Path, text: str, *words: str) -> subprocess.CompletedProcess[str]:
    run = folder / "run"
    run.mkdir(exist_ok=True)
    (run / "profile.json").write_text(text)
    return subprocess.run(
        [sys.executable, "-m", "advisor", "report", str(run), *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
    )


def refused(ended: subprocess.CompletedProcess[str]) -> bool:
    lines = ended.stderr.strip().splitlines()
    return ended.returncode == 2 and len(lines) <= 3 and "Traceback" not in ended.stderr


def test_a_sound_profile_is_shown(tmp_path: Path) -> None:
    assert report(tmp_path, json.dumps(sound())).returncode == 0


@pytest.mark.parametrize("version", [0, 2, 999, "1", None, [1]])
def test_a_profile_of_another_schema_is_refused(version: object, tmp_path: Path) -> None:
    ended = report(tmp_path, json.dumps({**sound(), "schema_version": version}))
    assert refused(ended), ended.stderr
    assert "schema_version" in ended.stderr


HOSTILE = {
    "deep nesting": "[" * 100_000,
    "deep nesting in a field": json.dumps(sound())[:-1] + ', "notes": ' + "[" * 5000 + "]" * 5000 + "}",
    "huge number": json.dumps({**sound(), "launches": 1e308}).replace("1e+308", "9" * 4000),
    "not a number": json.dumps({**sound(), "launches": float("nan")}),
    "a list for a table": json.dumps({**sound(), "environment": []}),
    "a number for a name": json.dumps({**sound(), "script": 7}),
    "no object": '"profile"',
    "nothing": "",
    "binary": "\x00\x01\x02",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_profile_is_refused_or_shown_as_text(name: str, tmp_path: Path) -> None:
    ended = report(tmp_path, HOSTILE[name])
    assert refused(ended) or ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr
    if name in ("a list for a table", "a number for a name", "no object", "nothing", "binary", "deep nesting"):
        assert refused(ended), ended.stderr


def test_names_that_lead_outside_are_only_names(tmp_path: Path) -> None:
    outside = tmp_path / "outside.html"
    row = {**sound()["kernels"][0], "name": "<script>alert(1)</script>", "module": "../../outside.html"}
    plain = {**sound(), "script": "../../../outside.html", "kernels": [row]}
    ended = report(tmp_path, json.dumps(plain), "--html", "page.html")
    assert ended.returncode == 0, ended.stderr
    assert not outside.exists()
    assert "<script>alert(1)</script>" not in (tmp_path / "page.html").read_text()
