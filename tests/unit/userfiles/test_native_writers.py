"""Packages that write natively are wrapped when the script imports them; these stand for them, writing past every audit event."""

from __future__ import annotations

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from advisor.userfiles import native_writers

ROOT = Path(native_writers.__file__).parents[3]
# By the C library: no audit event tells of it.
PAST_PYTHON = """
import ctypes, os
def written(path, flags):
    libc = ctypes.CDLL(None)
    handle = libc.open(os.fsencode(path), flags, 0o600)
    assert handle >= 0, path
    libc.write(handle, b"theirs", 6)
    libc.close(handle)
"""
PACKAGES = {
    "safetensors": "def serialize_file(tensors, filename, metadata=None):\n    written(filename, 577)\n",  # create, truncate
    "cv2": "def imwrite(filename, img, params=None):\n    written(filename, 577)\n    return True\n",
    "h5py": """
class File:
    def __init__(self, name, mode="r", **kwds):
        if mode != "r":
            written(name, {"w": 577, "a": 1089}[mode])
""",
}


@pytest.fixture
def packages(tmp_path: Path) -> Path:
    for name, text in PACKAGES.items():
        folder = tmp_path / "packages" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(PAST_PYTHON + text)
    return tmp_path / "packages"


@pytest.fixture
def told(packages: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """What a guard is told, with safetensors imported before and the others not yet."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(packages)
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)  # so that what stands there before is put back
        del sys.modules[name]
    others = tuple(writer for writer in native_writers.WRITERS if writer.module in PACKAGES)
    monkeypatch.setattr(native_writers, "WRITERS", others)
    importlib.import_module("safetensors")
    calls: list[tuple[str, bool]] = []
    native_writers.announce(lambda path, truncates: calls.append((Path(path).name, truncates)))
    return calls


def test_a_guard_is_told_before_each_write_and_not_of_reads(told, tmp_path) -> None:
    safetensors, cv2, h5py = (importlib.import_module(name) for name in PACKAGES)
    safetensors.serialize_file({}, tmp_path / "model.safetensors")
    safetensors.serialize_file({}, filename=str(tmp_path / "again.safetensors"))
    assert cv2.imwrite(str(tmp_path / "a.png"), None) is True
    h5py.File(str(tmp_path / "a.h5"), "w")
    h5py.File(str(tmp_path / "a.h5"), mode="a")
    h5py.File(str(tmp_path / "a.h5"))
    assert told == [
        ("model.safetensors", True), ("again.safetensors", True), ("a.png", True), ("a.h5", True), ("a.h5", False)
    ]  # fmt: skip


def test_names_taken_from_a_package_later_are_the_wrapped_ones(told, tmp_path) -> None:
    names: dict[str, object] = {}
    exec("from cv2 import imwrite", names)
    names["imwrite"](tmp_path / "a.png", None)
    assert told == [("a.png", True)]


def test_who_asks_for_a_package_leaves_it_to_be_wrapped_at_its_import(told, tmp_path) -> None:
    """Transformers asks what is installed (`find_spec`) long before any of it is imported."""
    assert importlib.util.find_spec("cv2") is not None
    importlib.import_module("cv2").imwrite(str(tmp_path / "a.png"), None)
    assert told == [("a.png", True)]


def test_a_package_that_is_missing_stays_missing(told, packages) -> None:
    (packages / "h5py" / "__init__.py").unlink()
    (packages / "h5py").rmdir()
    importlib.invalidate_caches()
    with pytest.raises(ImportError):
        importlib.import_module("h5py")
    assert "h5py" not in sys.modules


def test_what_they_overwrite_and_make_is_put_back(packages, tmp_path) -> None:
    work, run_dir = tmp_path / "work", tmp_path / "runs" / "one"
    work.mkdir()
    for name in ("model.safetensors", "val.png", "scan.h5"):
        (work / name).write_text(f"the user's {name}")
    script = f"""
import os, sys
from pathlib import Path
sys.path[:0] = [{str(ROOT)!r}, {str(packages)!r}]
from advisor.userfiles.protect import protect
guard = protect(Path({str(run_dir)!r}))
os.chdir({str(work)!r})
import cv2, h5py, safetensors
safetensors.serialize_file({{}}, "model.safetensors")
safetensors.serialize_file({{}}, "new.safetensors")
cv2.imwrite("val.png", None)
h5py.File("scan.h5", "a")
assert Path("scan.h5").read_text() == "the user's scan.h5theirs"
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert (work / "val.png").read_text() == "theirs"
    restore = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom advisor.userfiles.restore import restore\nfrom pathlib import Path\n"
    subprocess.run([sys.executable, "-c", f"{restore}restore(Path({str(run_dir)!r}))"], check=True)
    assert {path.name: path.read_text() for path in work.iterdir()} == {
        name: f"the user's {name}" for name in ("model.safetensors", "val.png", "scan.h5")
    }
