"""The order in which a process of a search is guarded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from advisor.trials.files import protect


def test_native_writers_are_guarded_before_anything_of_ours_can_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of ours switches advisor off and the script goes on: what it then saves must not go past the guard."""
    told: list[str] = []

    def fails(run_dir: Path) -> dict[str, str]:
        raise OSError("no space left on device")

    monkeypatch.setattr(protect.Guard, "of", lambda run_dir: SimpleNamespace(announced="the guard"))
    monkeypatch.setattr(protect.native_writers, "announce", told.append)
    monkeypatch.setattr(protect.trackers, "offline", fails)
    with pytest.raises(OSError, match="no space left"):
        protect.protect(tmp_path)
    assert told == ["the guard"]
