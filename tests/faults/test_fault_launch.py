"""Faults of the launch and of the user's script (numbers in catalogue.yaml)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LOOP = """
import sys
import torch
torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(8, 1, 8, 8)).square().mean().backward()
        optimizer.step()
"""


def profile(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """`advisor profile words`, in a few steps."""
    return subprocess.run(
        [sys.executable, "-m", "advisor", "profile", "--warmup", "2", "--steps", "3", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(LOOP + textwrap.dedent(text), encoding="utf-8")


def profiles(folder: Path) -> list[Path]:
    return list((folder / "advisor-runs").glob("*/profile.json"))


@pytest.mark.long
def test_odd_paths_and_a_home_that_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "my runs – überall"
    folder.mkdir()
    write(folder, "entraînement no 1.py", "train(40)\n")
    home = tmp_path / "home"
    home.write_text("a file where the home folder should be")
    ended = profile(folder, "entraînement no 1.py", HOME=str(home), XDG_CACHE_HOME=str(home / ".cache"))
    assert ended.returncode == 0, ended.stderr
    assert len(profiles(folder)) == 1


@pytest.mark.long
def test_a_name_that_is_no_utf8(tmp_path: Path) -> None:
    name = os.fsdecode(b"r\xe9seau.py")
    try:
        write(tmp_path, name, "train(40)\n")
    except OSError:
        pytest.skip("this file system takes UTF-8 alone")
    ended = profile(tmp_path, name)
    assert ended.returncode == 0, ended.stderr
    (found,) = profiles(tmp_path)
    assert json.loads(found.read_text(encoding="utf-8"))["script"] == name
    assert found.with_name("report.html").is_file()


@pytest.mark.parametrize("switches", [["-O"], ["-W", "error"]])
@pytest.mark.long
def test_switches_of_the_interpreter(switches: list[str], tmp_path: Path) -> None:
    write(tmp_path, "train.py", "train(40)\nprint('trained')\nsys.exit(7)\n")
    ended = profile(tmp_path, "--keep-running", "--", sys.executable, *switches, "train.py")
    assert ended.returncode == 7, ended.stderr
    assert "trained" in ended.stdout
    assert len(profiles(tmp_path)) == 1


@pytest.mark.parametrize("switches", [["-I"], ["-E"], ["-X", "utf8", "-OS"]])
def test_switches_that_shut_advisor_out_are_told_at_once(switches: list[str], tmp_path: Path) -> None:
    write(tmp_path, "train.py", "print('trained')\n")
    ended = profile(tmp_path, "--", sys.executable, *switches, "train.py")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert f"{switches[-1]} keeps advisor out" in ended.stderr
