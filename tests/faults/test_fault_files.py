"""Faults around files and kills (numbers in catalogue.yaml)."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from advisor import runs
from advisor.core import storage
from advisor.core.errors import AdvisorError
from advisor.core.verdict import TrialLog
from advisor.profiling.beside.sampler import Sampler
from advisor.userfiles.restore import restore_pending

ROOT = Path(__file__).resolve().parents[2]
KILLS = 15  # of each kind

# Writes what a profile leaves, over and over, as the training's process and the supervisor do.
RECORDING = """
import sys
from pathlib import Path
from advisor.core import storage
from advisor.core.verdict import Verdict
from advisor.trials import records
run = Path(sys.argv[1])
(run / "trials").mkdir(parents=True)
print("begun", flush=True)
number = 0
while True:
    number += 1
    storage.save(run / "search.json", records.SearchRecord(steps=number, notes=("x" * 5000,)))
    records.save_verdict(run, Verdict(transform=f"item_{number % 7}", status="kept", reason="y" * 3000))
"""

# Wipes, rotates, appends and renames in the user's folder, guarded as in a search.
DESTROYING = """
import os, shutil, sys
from pathlib import Path
from advisor.userfiles.protect import protect
protect(Path(sys.argv[1]))
print("begun", flush=True)
for number in range(10**9):
    open("log.csv", "a").write(f"{number}\\n")
    open("tmp.pt", "w").write("x" * 20000)
    os.replace("tmp.pt", "best.pt")
    if os.path.isdir("out"):
        shutil.rmtree("out")
    os.makedirs("out/new", exist_ok=True)
    open(f"out/new/{number % 5}.txt", "w").write("y")
    if os.path.exists("notes.txt"):
        os.rename("notes.txt", "renamed.txt")
"""


def killed(code: str, argument: Path, folder: Path, delay: float) -> None:
    """Run `code` in `folder` and kill it `delay` seconds after its first word."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(argument)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    _, said = process.communicate()
    assert first == b"begun\n", said.decode()
    assert process.returncode == -signal.SIGKILL, said.decode()


def test_killed_at_random_moments_every_file_is_absent_or_whole(tmp_path: Path) -> None:
    chance = random.Random(54)
    seen = 0
    for number in range(KILLS):
        run = tmp_path / str(number)
        killed(RECORDING, run, tmp_path, chance.uniform(0, 0.03))
        for path in run.rglob("*.json"):
            if path.name.startswith("."):
                continue  # an unfinished copy beside the file, never read
            assert json.loads(path.read_text())["schema_version"] == 1, path
            seen += 1
    assert seen > KILLS


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def test_killed_at_random_moments_the_users_files_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    work = tmp_path / "work"
    (work / "out" / "deep").mkdir(parents=True)
    for name in ("best.pt", "log.csv", "notes.txt", "out/a.pt", "out/deep/b.pt"):
        (work / name).write_text(f"the user's {name}")
    before = tree(work)
    chance = random.Random(55)
    for number in range(KILLS):
        killed(DESTROYING, tmp_path / "runs" / str(number), work, chance.uniform(0, 0.02))
        restore_pending(tmp_path / "runs")
        assert tree(work) == before, f"kill {number}"


def test_a_full_disk_ends_the_record_and_not_the_training(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        """
import builtins, errno, io, os, sys
real_open, real_os_open = builtins.open, os.open
def full(path):
    return isinstance(path, (str, os.PathLike)) and "advisor-runs" in os.fspath(path) and STEPS[0] > 3
def no_open(path, mode="r", *rest, **more):
    if full(path) and any(letter in mode for letter in "wax+"):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    return real_open(path, mode, *rest, **more)
def no_os_open(path, flags, *rest, **more):
    if full(path) and flags & (os.O_WRONLY | os.O_RDWR):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))
    return real_os_open(path, flags, *rest, **more)
builtins.open = io.open = no_open
os.open = no_os_open
STEPS = [0]
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(60):
    STEPS[0] += 1
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
print("trained", STEPS[0])
sys.exit(6)
"""
    )
    ended = subprocess.run(
        [sys.executable, "-m", "advisor", "profile", "--keep-running", "--warmup", "2", "--steps", "4", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert ended.stdout.splitlines()[0] == "trained 60", ended.stderr
    assert ended.returncode == 6
    assert "No space left" in ended.stderr


def test_what_a_full_disk_has_no_room_for_is_named_and_what_was_there_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's own error, of a write or a flush, names no file."""
    before = TrialLog(script="train.py", argv=())
    storage.save(tmp_path / "trials.json", before)

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(AdvisorError) as told:
        storage.save(tmp_path / "trials.json", TrialLog(script="train.py", argv=("--fast",)))
    assert str(told.value) == (
        f"cannot write {tmp_path / 'trials.json'} (No space left on device). Make room there, or see that you may write there."
    )
    assert storage.load(tmp_path / "trials.json", TrialLog) == before
    # What a run can do without does not end it.
    samples = Sampler(path=tmp_path / "samples.json")
    samples.start()
    samples.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["trials.json"]


@pytest.mark.long
def test_a_dry_run_leaves_the_tree_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("mine\n")
    (tmp_path / "train.py").write_text(
        """
import torch
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(200):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    with open("log.txt", "w" if step == 0 else "a") as log:
        log.write(f"{step}\\n")
torch.save(model.state_dict(), "model.pt")
"""
    )
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    ended = subprocess.run(
        [sys.executable, "-m", "advisor", "apply", "--dry-run", "train.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert "nothing was changed" in ended.stderr
    shutil.rmtree(tmp_path / "advisor-runs")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_two_runs_at_once_have_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made: list[Path] = []
    threads = [threading.Thread(target=lambda: made.append(runs.new_run_dir("train.py"))) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 20
    assert all(path.is_dir() for path in made)
