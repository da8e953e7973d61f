"""Faults in a trial, on a CPU (numbers in catalogue.yaml); test_fault_trials_gpu.py plants them on a device."""

from __future__ import annotations

from pathlib import Path

import pytest
from searching import search_with


def test_a_candidate_that_kills_or_hangs_is_named_and_the_next_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = search_with(tmp_path, monkeypatch, "cpu", "hangs", "illegal_access")
    assert {name: v.status for name, v in found.verdicts.items()} == {"hangs": "failed", "illegal_access": "failed"}
    assert "did not end within" in found.verdicts["hangs"].reason
    assert "signal 11" in found.verdicts["illegal_access"].reason
