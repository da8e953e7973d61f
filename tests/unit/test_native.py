"""How calls.cpp is compiled, found again, and what is said where it cannot be."""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from advisor.core import compiled
from advisor.ops.sites import native


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    native.load.cache_clear()
    yield
    native.load.cache_clear()


def compiler(folder: Path, script: str) -> str:
    path = folder / "cc-of-a-test"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_the_switch_keeps_everything_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(compiled.SWITCH, "0")
    assert native.unavailable() == "ADVISOR_NATIVE=0"
    assert not native.pending()
    assert native.module() is None


def test_without_a_compiler_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert native.unavailable() == "no C++ compiler: neither CXX names one nor is there c++, g++, clang++"


def test_a_compiler_that_fails_is_told_by_its_first_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(
        "CXX", compiler(tmp_path, "echo 'note: x' >&2; echo 'calls.cpp:1: error: no such thing' >&2; exit 1")
    )
    assert native.unavailable() == "calls.cpp does not build: calls.cpp:1: error: no such thing"
    assert not list((tmp_path / "advisor/native").iterdir())  # nothing half made
    assert not native.pending()  # nor is it tried again


@pytest.mark.parametrize("lacking", ["permission", "home"])
def test_where_the_cache_cannot_be_looked_into_everything_stays_in_python(
    monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    def is_file(path: Path, own: Callable[[Path], bool] = Path.is_file) -> bool:
        if "native" in path.parts:
            raise PermissionError(13, "Permission denied")
        return own(path)

    def nobody(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    if lacking == "permission":
        monkeypatch.setattr(Path, "is_file", is_file)
    else:
        monkeypatch.delenv("HOME", raising=False)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(pwd, "getpwuid", nobody)
    assert not native.pending()
    said = {"permission": "PermissionError", "home": "RuntimeError: Could not determine home directory"}[lacking]
    assert native.unavailable().startswith(f"the cache folder cannot be read: {said}")
    assert native.module() is None


def test_what_it_makes_is_loaded_and_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a compiler that copies what a real one has made before."""
    if native.unavailable():
        pytest.skip(native.unavailable())
    made = native.built(native.find_compiler())
    native.load.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    copying = compiler(tmp_path, f'echo once >> {tmp_path}/calls; for last; do :; done; cp {made} "$last"')
    monkeypatch.setenv("CXX", copying)
    assert native.pending()
    for _ in range(2):
        assert native.unavailable() == ""
        assert not native.pending()
        native.load.cache_clear()
    assert (tmp_path / "calls").read_text() == "once\n"


def test_a_library_that_does_not_load_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", compiler(tmp_path, 'for last; do :; done; echo nonsense > "$last"'))
    assert native.unavailable().startswith("calls.cpp does not build: ")
    assert os.environ["CXX"]
