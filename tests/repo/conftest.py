"""Builds of the checkout, one for all tests of this folder that ask."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from installed import run

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files, so that building leaves nothing in the checkout."""
    if importlib.util.find_spec("build") is None or importlib.util.find_spec("setuptools") is None:
        pytest.skip("build and setuptools are needed: pip install -e .[test]")
    if not (REPO / ".git").exists():
        pytest.skip("no checkout")
    folder = tmp_path_factory.mktemp("source")
    for name in run("git", "ls-files", "-co", "--exclude-standard", cwd=REPO).splitlines():
        if (REPO / name).is_file():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((REPO / name).read_bytes())
    return folder


@pytest.fixture(scope="session")
def built(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with an sdist of the checkout and a wheel that was made from that sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=out)
    return out
