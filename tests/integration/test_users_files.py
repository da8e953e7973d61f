"""Files of the user's, whatever is run on the script: `profile`, `perf.measure`; in one process and in several; however it ends."""

from __future__ import annotations

import hashlib
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import machine
import pytest

from advisor.userfiles import journal, owners

ROOT = Path(__file__).resolve().parents[2]

# Everything at once, and again every ten steps: a script that is stopped has changed all of it.
WRITES = """
import os, shutil, sqlite3, sys
rank = int(os.environ.get("RANK", 0))
def write(step):
    if rank:  # each rank logs beside the others
        open("log.csv", "a").write(f"{rank},{step}\\n")
        torch.save({"step": step}, f"out/rank{rank}.pt")
        return
    shutil.rmtree("wiped", ignore_errors=True)
    os.makedirs("wiped/new", exist_ok=True)
    open("wiped/new/a.txt", "w").write("x")
    torch.save({"step": step}, "out/best.pt")
    torch.save({"step": step}, "tmp.pt")
    os.replace("tmp.pt", "current.pt")
    open("log.csv", "a").write(f"{step}\\n")
    os.makedirs("runs/one", exist_ok=True)
    open("runs/one/events.out.tfevents.1", "ab").write(b"e" * 24)
    with sqlite3.connect("study.db") as study:
        study.execute("insert into trials values (?)", (step,))
    open("linked.txt", "w").write("through the link")
    open("hard.txt", "a").write("more")
    os.chmod("kept.sh", 0o600)
    os.utime("kept.sh")
    if os.path.exists("gone.txt"):
        os.remove("gone.txt")
        os.rename("old name.txt", "new name.txt")
    os.system("echo shell >> shell.log; rm -f shell.txt")
"""
TORCH = """
import torch
torch.set_num_threads(1)
"""
PLAIN = """
class torch:  # what starts in no time, where no step is needed
    def save(what, path):
        open(path, "wb").write(bytes(200))
"""
TRAINS = """
def train(steps):
    net = torch.nn.Linear(4, 2)
    if torch.distributed.is_initialized():
        net = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
        if step % 10 == 3:
            write(step)
"""


def state(folder: Path) -> dict[str, Any]:
    """Of everything below: kind, content, mode, time of change, and how many names it has."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if name.parts[0] == "advisor-runs" or "__pycache__" in name.parts:
            continue
        at = path.lstat()
        content = (
            os.readlink(path)
            if path.is_symlink()
            else hashlib.sha256(path.read_bytes()).hexdigest()
            if path.is_file()
            else ""
        )
        found[str(name)] = content, stat.filemode(at.st_mode), at.st_mtime_ns, at.st_nlink
    return found


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    (folder / "out").mkdir(parents=True)
    (folder / "wiped" / "deep").mkdir(parents=True)
    for name in ("out/best.pt", "wiped/deep/old.pt", "current.pt", "target.txt", "kept.sh", "gone.txt", "old name.txt",
                 "shell.log", "shell.txt", "hard.txt"):  # fmt: skip
        (folder / name).write_text(f"the user's {name}")
    (folder / "log.csv").write_text("epoch,loss\n1,0.5\n")
    (folder / "linked.txt").symlink_to("target.txt")
    os.link(folder / "hard.txt", folder / "snapshot.txt")
    with sqlite3.connect(folder / "study.db") as study:
        study.execute("create table trials (value)")
    study.close()
    os.chmod(folder / "kept.sh", 0o755)
    os.chmod(folder / "wiped", 0o750)
    for path in (*folder.rglob("*"), folder):
        os.utime(path, ns=(10**18, 10**18), follow_symlinks=False)
    monkeypatch.chdir(folder)
    return folder


def script(work: Path, main: str, *, trains: bool = True) -> None:
    (work / "train.py").write_text((TORCH + TRAINS if trains else PLAIN) + WRITES + textwrap.dedent(main))


def start(work: Path, *words: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "advisor", *words],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # what is begun in the background ignores it
        **options,
    )


def line(stderr: str) -> str:
    """The one that says what was put back."""
    (told,) = [text for text in stderr.splitlines() if text.startswith("[advisor] put back as it was: ")]
    return told


ALONE = ["train.py"]
TORCHRUN = ["--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
ENDS = {
    "stopped": ("train(10**6)", ALONE, 0),
    "measured in a second start": ("train(14)", ALONE, 0),
    "that fails": ("train(25)\nraise SystemExit(7)", ALONE, 7),
    "that is killed": ("train(25)\nos.kill(os.getpid(), 9)", ALONE, 137),
    "of ranks that it spawns": (
        """
        def main(number):
            global rank
            rank = number
            torch.distributed.init_process_group("gloo", store=torch.distributed.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
            train(10**6)
        if __name__ == "__main__":
            torch.multiprocessing.spawn(main, nprocs=2)
        """,
        [*ALONE, "../store"],
        0,
    ),
    "of ranks that torchrun starts": ("torch.distributed.init_process_group('gloo')\ntrain(10**6)", TORCHRUN, 0),
}  # fmt: skip


SHORT = ("measured in a second start", "of ranks that it spawns")  # all other ways are in these, or in the tests below


@pytest.mark.parametrize("how", [pytest.param(how, marks=() if how in SHORT else pytest.mark.long) for how in ENDS])
def test_profile_of_a_script(work: Path, how: str) -> None:
    main, words, code = ENDS[how]
    script(work, main)
    before = state(work)
    ended = start(work, "profile", "-o", "../run", *words)
    _, told = ended.communicate()
    assert ended.returncode == code, told
    assert state(work) == before
    assert "out/best.pt" in line(told)
    assert next((work.parent / "run" / "files" / "diverted").rglob("best.pt")).stat().st_size > 100
    assert not (work.parent / "run" / "files" / journal.JOURNAL).exists()


@pytest.mark.long
def test_a_run_that_is_the_users_own_keeps_what_it_writes(work: Path) -> None:
    script(work, "train(45)")
    ended = start(work, "profile", "--keep-running", "-q", "-o", "../run", "train.py")
    _, told = ended.communicate()
    assert ended.returncode == 0, told
    assert "put back" not in told
    assert (work / "log.csv").read_text().endswith("43\n")
    assert (work / "runs/one/events.out.tfevents.1").stat().st_size == 5 * 24
    assert not (work.parent / "run" / "files").exists()


def test_ctrl_c_puts_them_back_and_so_does_a_kill_at_the_next_start(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a run folder that no later command in this directory would look for."""
    machine.own_cache(monkeypatch, work.parent / "cache")
    script(work, "write(0)\nprint(os.getpid(), flush=True)\nimport time; time.sleep(600)", trains=False)
    before = state(work)
    for number, out in ((signal.SIGINT, "../interrupted"), (signal.SIGTERM, "../ended"), (signal.SIGKILL, "../killed")):
        ended = start(work, "profile", "-o", out, "train.py", start_new_session=True)
        assert ended.stdout is not None
        child = int(ended.stdout.readline())
        assert state(work) != before
        os.kill(ended.pid, number)
        if number == signal.SIGKILL:
            os.kill(child, number)
        _, told = ended.communicate()
        if number != signal.SIGKILL:
            assert state(work) == before, told
            assert "out/best.pt" in line(told)
    run_dir = work.parent / "killed"
    while owners.running(run_dir) is not None:
        time.sleep(0.02)  # the system takes the killed process away
    assert state(work) != before
    again = start(work, "doctor", "--recover")
    said, told = again.communicate()
    assert again.returncode == 0, told
    assert said == f"the files set aside in {run_dir} are back in their places\n"
    assert state(work) == before


def test_what_the_script_has_left_running_changes_nothing_afterwards(work: Path) -> None:
    """A rank or a saver whose parent was killed, and who writes on."""
    script(
        work,
        """
        if os.fork() == 0:
            import signal, time
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            sys.stdout.close()
            while True:
                open("log.csv", "a").write("of the orphan\\n")
                time.sleep(0.01)
        write(0)
        os.kill(os.getpid(), 9)
        """,
        trains=False,
    )
    before = state(work)
    ended = start(work, "profile", "-o", "../run", "train.py")
    _, told = ended.communicate()
    assert ended.returncode == 137, told
    assert owners.running(work.parent / "run") is None
    assert state(work) == before


def test_perf_measures_a_script_and_leaves_no_trace(work: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from advisor.testing.measuring import measure_script

    script(work, "train(10**6)")
    before = state(work)
    measured = measure_script(["train.py"], steps=5)
    assert measured.profile.step_us is not None
    assert state(work) == before
    assert "out/best.pt" in line(capfd.readouterr().err)


def test_perf_keeps_the_folder_of_files_that_could_not_be_put_back(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from advisor import pipeline
    from advisor.core.errors import AdvisorError
    from advisor.testing.measuring import measure_script

    def fails(words: Any, *, out: Path, **options: Any) -> None:
        (out / "files").mkdir()
        (out / "files" / journal.JOURNAL).write_text("{}")
        raise AdvisorError("could not be put back")

    monkeypatch.setattr(pipeline, "profile", fails)
    with pytest.raises(AdvisorError, match="could not be put back"):
        measure_script(["train.py"])
    (kept,) = work.glob(".advisor-perf-*")
    assert (kept / "files" / journal.JOURNAL).is_file()
