"""Where a search's processes keep compiled modules."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from advisor.profiling.beside import bytecode

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """A package in torch's place, and a cache folder; returns the package's folder."""
    for name in (bytecode.PREFIX, bytecode.FORBIDDEN):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def put(*, compiled: bool = False, writable: bool = True) -> Path:
        package = tmp_path / "site" / "torch"
        package.mkdir(parents=True)
        source = package / "__init__.py"
        source.write_text("")
        if compiled:
            found = Path(importlib.util.cache_from_source(str(source)))
            found.parent.mkdir()
            found.touch()
        spec = importlib.util.spec_from_file_location("torch", source)
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        monkeypatch.setattr(os, "access", lambda path, mode: writable and path == package)
        return package

    return put


def test_where_python_keeps_them_it_is_left_alone(install: Install) -> None:
    install(compiled=True, writable=False)
    assert bytecode.variables() == {}


def test_what_the_first_import_will_write_is_left_alone(install: Install) -> None:
    install()
    assert bytecode.variables() == {}


def test_a_folder_that_cannot_be_written(install: Install, tmp_path: Path) -> None:
    install(writable=False)
    folder = tmp_path / "cache" / "advisor" / "python"
    assert bytecode.variables() == {bytecode.PREFIX: str(folder), bytecode.FORBIDDEN: ""}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_an_environment_that_forbids_it(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install()
    monkeypatch.setenv(bytecode.FORBIDDEN, "1")
    assert bytecode.variables()


def test_the_users_own_place_for_them_is_kept(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install(writable=False)
    monkeypatch.setenv(bytecode.PREFIX, "/elsewhere")
    assert bytecode.variables() == {}


def test_no_code_from_a_folder_that_others_may_write(install: Install, tmp_path: Path) -> None:
    install(writable=False)
    folder = tmp_path / "cache" / "advisor" / "python"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert bytecode.variables() == {}


def test_the_next_process_finds_what_the_first_has_compiled(install: Install, tmp_path: Path) -> None:
    package = install(writable=False)
    (package / "part.py").write_text("value = 1\n")
    words = [sys.executable, "-c", "import torch.part; print(torch.part.__cached__)"]
    found = {**os.environ, bytecode.FORBIDDEN: "1", "PYTHONPATH": str(package.parent), **bytecode.variables()}
    told = subprocess.run(words, env=found, capture_output=True, text=True, check=True).stdout.strip()
    assert told.startswith(str(tmp_path / "cache" / "advisor" / "python"))
    assert Path(told).is_file()
    assert not (package / "__pycache__").exists()
