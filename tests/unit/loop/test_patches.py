"""Hooks that can be taken back, also when others have patched over them, and after a fork."""

from __future__ import annotations

import os

import pytest

from advisor.loop.patches import Patches


class Base:
    def call(self) -> str:
        return "plain"


class Derived(Base):
    pass


def test_an_inherited_attribute_is_removed_again() -> None:
    patches = Patches()
    patches.replace(Derived, "call", lambda self: "ours")
    assert Derived().call() == "ours"
    assert Base().call() == "plain"
    patches.restore_all()
    assert "call" not in vars(Derived)


def test_a_patch_of_somebody_else_on_top_stays() -> None:
    patches = Patches()
    patches.replace(Derived, "call", lambda self: "ours")
    theirs = lambda self: "theirs"  # noqa: E731 – as short as what it stands for
    Derived.call = theirs
    try:
        patches.restore_all()
        assert Derived.call is theirs
    finally:
        del Derived.call


def test_a_fault_takes_all_hooks_back_and_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    patches, undone, told = Patches(), [], []
    patches.replace(Derived, "call", lambda self: "ours")
    patches.undo(lambda: undone.append(1))
    patches.on_fault.append(told.append)

    def observe(value: object) -> None:
        raise LookupError("planted")

    guarded = patches.guard(observe)
    guarded(1)
    guarded(2)
    assert Derived().call() == "plain"
    assert undone == [1]
    assert not patches.active
    assert [str(error) for error in told] == ["planted"]
    line = capsys.readouterr().err
    assert line.count("[advisor]") == 1
    assert "LookupError: planted (test_patches.py:" in line


def test_system_exit_passes_a_guard() -> None:
    def stop() -> None:
        raise SystemExit(0)

    with pytest.raises(SystemExit):
        Patches().guard(stop)()


def test_a_forked_child_is_not_observed() -> None:
    patches = Patches()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(write, b"active" if patches.active else b"quiet")
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 10) == b"quiet"
    assert patches.active
