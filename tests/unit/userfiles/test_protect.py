"""The order in which a process of a search is guarded."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FunctionType

import pytest

from advisor.userfiles import guard, protect
from advisor.userfiles.guard import Guard


def test_native_writers_are_guarded_before_anything_of_ours_can_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault of ours switches advisor off and the script goes on: what it then saves must not go past the guard. Nor what a process
    saves in which nothing of ours is attached: a worker, a rank before it has joined its group."""
    told: list[object] = []

    def fails(run_dir: Path) -> dict[str, str]:
        raise OSError("no space left on device")

    monkeypatch.setattr(sys, "addaudithook", told.append)
    monkeypatch.setattr(os, "open", os.open)
    monkeypatch.setattr(os, "register_at_fork", lambda **hooks: None)
    monkeypatch.setattr(guard.native_writers, "announce", told.append)
    monkeypatch.setattr(protect.trackers, "offline", fails)
    with pytest.raises(OSError, match="no space left"):
        protect.protect(tmp_path)
    here = Guard.of(tmp_path)
    assert told[1:] == [here.announced]
    here.stop()


def test_what_every_audit_event_calls_is_a_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python asks each hook for an attribute at each event, which a bound method takes 1.2 µs to say it lacks: in every process
    that is measured."""
    hooks = []
    monkeypatch.setattr(sys, "addaudithook", hooks.append)
    here = Guard(tmp_path / "run")
    (hook,) = hooks
    assert type(hook) is FunctionType
    seen = []
    monkeypatch.setattr(here, "about_to", lambda event, args: seen.append(event))
    hook("builtins.id", (1,))
    hook("open", ("a.txt", "w", os.O_WRONLY))
    assert seen == ["open"]
