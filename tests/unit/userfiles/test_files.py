import contextlib
import errno
import hashlib
import json
import os
import platform
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from clocks import until

from advisor.core.errors import AdvisorError
from advisor.resources import BOOTSTRAP
from advisor.userfiles import journal, owners, restore, trackers
from advisor.userfiles.protect import FILES_VARIABLE

ROOT = Path(journal.__file__).parents[2]


def tree(folder):
    """Every path below `folder` with its kind, content, permissions, time of change and number of names."""
    found = {}
    for base, folders, names in os.walk(folder):
        for name in folders:
            at = os.lstat(os.path.join(base, name))
            found[os.path.relpath(os.path.join(base, name), folder)] = "folder", at.st_mode, at.st_mtime_ns
        for name in names:
            path = Path(base, name)
            content = os.readlink(path) if path.is_symlink() else hashlib.sha256(path.read_bytes()).hexdigest()
            at = os.lstat(path)
            found[os.path.relpath(path, folder)] = content, at.st_mode, at.st_mtime_ns, at.st_nlink
    return found


def contents(folder):
    """As `tree`, without what a test's own writes change, and copies."""
    return {name: found[0] for name, found in tree(folder).items()}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    (folder / "out" / "deep").mkdir(parents=True)
    (folder / "empty").mkdir()
    for name, text in {
        "out/best.pt": "the user's best weights",
        "out/deep/last.pt": "older weights",
        "log.csv": "epoch,loss\n1,0.5\n",
        "notes.txt": "do not lose me",
    }.items():
        (folder / name).write_text(text)
    (folder / "current").symlink_to("out/best.pt")
    return folder


def run(work, body, *, check=True):
    run_dir = work.parent / "runs" / "one"
    code = f"""
import os, sys, shutil, json, signal
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from advisor.userfiles.protect import protect
guard = protect(Path({str(run_dir)!r}))
GUARDED = {{"PYTHONPATH": {str(BOOTSTRAP)!r}, "ADVISOR_FILES": {str(run_dir)!r}}}
os.chdir({str(work)!r})
""" + textwrap.dedent(body)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if check:
        assert result.returncode == 0, result.stderr
    return run_dir, result


SCRIPTS = {
    "wipes its output folder at the start": """
        shutil.rmtree("out")
        os.makedirs("out/new")
        open("out/new/a.txt", "w").write("x")
        open("out/best.pt", "w").write("worse")
        assert open("out/best.pt").read() == "worse"
    """,
    "rotates checkpoints": """
        for epoch in range(4):
            open("tmp.pt", "wb").write(b"%d" % epoch)
            os.replace("tmp.pt", "out/best.pt")
            shutil.copyfile("out/best.pt", f"out/epoch{epoch}.pt")
            if epoch:
                os.remove(f"out/epoch{epoch-1}.pt")
        os.rename("out/deep/last.pt", "out/deep/older.pt")
    """,
    "appends to a table and edits in place": """
        open("log.csv", "a").write("2,0.4\\n")
        with open("notes.txt", "r+") as f:
            f.write("XX")
        os.truncate("out/best.pt", 3)
    """,
    "opens without asking to write": """
        os.close(os.open("log.csv", os.O_RDONLY | os.O_TRUNC))
        assert os.path.getsize("log.csv") == 0
        os.close(os.open("notes.txt", os.O_WRONLY | os.O_TRUNC))
        os.close(os.open("run.lock", os.O_RDONLY | os.O_CREAT))
    """,
    "names files relative to an open folder": """
        folder = os.open("out", os.O_RDONLY)
        Path("best.pt").write_text("in the working folder")
        with os.fdopen(os.open("best.pt", os.O_WRONLY | os.O_TRUNC, dir_fd=folder), "w") as f:
            f.write("worse")
        assert Path("best.pt").read_text() == "in the working folder"
        with open("new.pt", "w", opener=lambda path, flags: os.open(path, flags, dir_fd=folder)) as f:
            f.write("new")
        os.mkdir("made", dir_fd=folder)
        os.symlink("best.pt", "made/link", dir_fd=folder)
        os.link("deep/last.pt", "made/last.pt", src_dir_fd=folder, dst_dir_fd=folder)
        os.rename("deep/last.pt", "older.pt", src_dir_fd=folder, dst_dir_fd=folder)
        os.rmdir("deep", dir_fd=folder)
        assert os.open in os.supports_dir_fd
        shutil.rmtree("empty")
    """,
    "writes through a symbolic link": """
        open("current", "w").write("new best")
        assert open("out/best.pt").read() == "new best"
    """,
    "truncates through a symbolic link": """
        os.truncate("current", 3)
    """,
    "replaces a symbolic link": """
        os.remove("current")
        os.symlink("out/deep/last.pt", "current")
    """,
    "renames whole folders": """
        os.rename("out", "out.old")
        os.mkdir("out")
        open("out/best.pt", "w").write("y")
        open("out.old/best.pt", "a").write("tail")
        os.rmdir("empty")
    """,
    "renames a folder over one that is empty": """
        os.rename("out", "empty")
        open("empty/best.pt", "a").write("tail")
    """,
    "renames files and goes on with them": """
        os.rename("log.csv", "older.csv")
        open("older.csv", "a").write("2,0.4\\n")
        os.rename("out/best.pt", "out/previous.pt")
        open("out/previous.pt", "w").write("worse")
        os.rename("notes.txt", "aside.txt")
        os.rename("aside.txt", "notes.txt")
        os.truncate("notes.txt", 3)
        assert open("older.csv").read() == "epoch,loss\\n1,0.5\\n2,0.4\\n"
    """,
    "gives a file a second name and writes there": """
        os.link("log.csv", "copy.csv")
        open("copy.csv", "a").write("2,0.4\\n")
        os.link("out/best.pt", "out/newest.pt")
        open("out/newest.pt", "w").write("worse")
    """,
    "moves and copies trees": """
        shutil.copytree("out", "backup")
        shutil.move("notes.txt", "backup/notes.txt")
        Path("notes.txt").write_text("another")
        Path("log.csv").unlink()
    """,
    "writes from forked workers": """
        pids = []
        for i in range(4):
            pid = os.fork()
            if pid == 0:
                for j in range(20):
                    open(f"out/w{i}-{j}.txt", "w").write("z")
                    open("log.csv", "a").write("w\\n")
                os._exit(0)
            pids.append(pid)
        for pid in pids:
            os.waitpid(pid, 0)
    """,
    "sets permissions and times": """
        os.chmod("out/best.pt", 0o600)
        os.chmod("out", 0o700)
        shutil.copystat("log.csv", "notes.txt")
        os.utime("current")
        Path("log.csv").touch()
        with open("out/deep/last.pt") as f:
            os.fchmod(f.fileno(), 0o755)
            os.utime(f.fileno(), (1, 1))
        shutil.copy2("notes.txt", "new.txt")
    """,
    "wipes a folder of its own that nobody else may read": """
        os.chmod("out", 0o700)
        shutil.rmtree("out")
        os.mkdir("out")
    """,
    "starts programs": """
        import subprocess
        subprocess.run(["rm", "-rf", "out/deep", "empty"], check=True)
        subprocess.run(["cp", "-r", "out", "backup"], check=True)
        subprocess.run("echo 2,0.4 >> log.csv; rm notes.txt; echo new > other.txt", shell=True, check=True)
        os.system("mv out/best.pt out/old.pt")
        Path("log.csv").write_text("in Python afterwards")
    """,
    "starts another Python": """
        import subprocess
        code = "import os; open('log.csv', 'w').write('z'); os.remove('notes.txt'); open('sub.txt', 'w')"
        subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **GUARDED})
    """,
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_that(name, work):
    before = tree(work)
    run_dir, _ = run(work, SCRIPTS[name])
    assert tree(work) != before  # the script did work on its real paths
    assert restore.written(run_dir)[0]
    assert restore.restore(run_dir) == ()
    assert tree(work) == before
    assert restore.written(run_dir)[0]  # still listed in the report after restoring
    assert restore.restore(run_dir) == ()
    assert tree(work) == before


@pytest.mark.parametrize("same_disk", [True, False])
@pytest.mark.parametrize("mode", ["a", "r+", "w"])
def test_a_name_that_a_file_had_beside_keeps_what_it_was(work, mode, same_disk):
    """A snapshot by hard links (`cp -al`, `rsync --link-dest`)."""
    (work / "snapshot").mkdir()
    os.link(work / "log.csv", work / "snapshot" / "log.csv")
    before = tree(work)
    run_dir, _ = run(
        work,
        f"""
        def across(*places, **more):
            raise OSError(18, "Invalid cross-device link")

        if not {same_disk}:
            os.link = os.rename = across
        open("log.csv", {mode!r}).write("2,0.4\\n")
        assert Path("snapshot/log.csv").read_text() == "epoch,loss\\n1,0.5\\n"
        """,
    )
    assert tree(work) != before
    assert restore.restore(run_dir) == ()
    assert (tree(work) == before) is same_disk
    assert contents(work) == {name: found[0] for name, found in before.items()}
    assert os.path.samefile(work / "log.csv", work / "snapshot" / "log.csv") is same_disk


def test_a_lock_of_advisors_own_is_not_told_as_the_scripts_file(work, tmp_path):
    # A search in two ranks listed the lock under which launchers are compiled among what the script had written.
    (tmp_path / "temporary").mkdir()
    run_dir, _ = run(
        work,
        f"""
        import tempfile
        tempfile.tempdir = {str(tmp_path / "temporary")!r}
        from advisor.core import locks
        with locks.exclusive(locks.of_user("native")):
            pass
        open(locks.of_user("native").with_suffix(".txt"), "w").write("the script's")
        """,
    )
    told, _ = restore.written(run_dir)
    assert [Path(name).suffix for name in told] == [".txt"]


def test_a_process_that_is_forked_amid_it_holds_nobody_up(work):
    # A loader's worker, while another thread writes its first log line: it has the lock's descriptor for as long as it lives.
    run(
        work,
        """
        with guard.own_work(), guard._first("log.csv"):
            worker = os.fork()
            if not worker:
                signal.pause()
        open("notes.txt", "a").write("x")  # hangs where it waits for the worker
        os.kill(worker, signal.SIGKILL)
        """,
    )


@pytest.mark.parametrize("name", ["study.db", "linked.db", "file:study.db?cache=shared"])
@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_a_database_is_as_it_was(work, mode, name):
    def rows():
        with contextlib.closing(sqlite3.connect(work / "study.db")) as study:
            return study.execute("select * from trials").fetchall()

    with contextlib.closing(sqlite3.connect(work / "study.db")) as study:
        study.execute(f"pragma journal_mode = {mode}")
        study.execute("create table trials (value)")
        study.execute("insert into trials values (1)")
        study.commit()
    (work / "linked.db").symlink_to("study.db")
    before = tree(work)
    run_dir, _ = run(
        work,
        f"""
        import sqlite3
        study = sqlite3.connect({name!r}, uri={name.startswith("file:")})
        study.execute("insert into trials values (2)")
        study.commit()
        os._exit(0)  # as a search process that is killed: the log is not yet in the database
        """,
    )
    assert restore.restore(run_dir) == ()
    assert tree(work) == before
    assert rows() == [(1,)]


def test_a_write_that_fails_anyway_fails_as_without_advisor(work):
    run(
        work,
        """
        def forbidden(path, *more, plain=os.lstat):  # of a folder that is not this user's
            if "private" in str(path):
                raise PermissionError(13, "Permission denied", path)
            return plain(path, *more)

        os.lstat = forbidden
        for path, expected in (("notes.txt/below", NotADirectoryError), ("private/x", PermissionError)):
            try:
                open(path, "w")
            except expected as error:
                continue
            raise AssertionError(path)
        """,
    )


def test_what_the_script_made_is_kept_in_the_run_folder(work):
    run_dir, _ = run(work, 'open("out/result.txt", "w").write("from the search")')
    restore.restore(run_dir)
    found = (run_dir / "files" / "diverted").rglob("result.txt")
    assert [p.read_text() for p in found] == ["from the search"]
    assert restore.written(run_dir) == ((str(work.resolve() / "out/result.txt"),), 0)


def test_temporary_files_are_counted_not_named(work, monkeypatch, tmp_path):
    # What compilers leave: files that are still there when the process ends are put away, and are nobody's result.
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    run_dir, _ = run(
        work,
        """
        import tempfile
        open(os.path.join(tempfile.mkdtemp(), "header.i"), "w").write("int x;")
        open(os.path.join(tempfile.gettempdir(), "metrics.csv"), "w").write("the user's own")
        open("out/result.txt", "w").write("from the search")
        """,
    )
    named = (str(temporary.resolve() / "metrics.csv"), str(work.resolve() / "out/result.txt"))
    restore.restore(run_dir)  # after which only what was there at the end is told
    assert restore.written(run_dir) == (named, 1)
    # Someone who works in a temporary folder has results there.
    place = temporary / "tmpwork"
    place.mkdir()
    monkeypatch.chdir(place)
    with open(run_dir / "files" / journal.JOURNAL, "a") as lines:
        lines.write(json.dumps({"action": "created", "path": str(place.resolve() / "out.pt")}) + "\n")
    assert str(place.resolve() / "out.pt") in restore.written(run_dir)[0]


def test_torch_save_is_seen_although_it_writes_natively(work):
    before = tree(work)
    run_dir, _ = run(
        work,
        """
        import torch
        protect(guard.root.parent)
        torch.save({"w": torch.ones(3)}, "out/best.pt")
        torch.save({"w": torch.zeros(3)}, Path("out/new.pt"))
        torch.jit.script(torch.nn.Identity()).save("out/deep/last.pt")
        assert torch.load("out/best.pt")["w"].sum() == 3
        shutil.copyfile("out/best.pt", "out/copy.pt")
        """,
    )
    restore.restore(run_dir)
    assert tree(work) == before


def test_kill_in_the_middle_then_the_next_start_restores(work):
    before = tree(work)
    run_dir, result = run(
        work,
        SCRIPTS["wipes its output folder at the start"] + "\n        os.kill(os.getpid(), signal.SIGKILL)",
        check=False,
    )
    assert result.returncode == -signal.SIGKILL
    assert tree(work) != before
    assert restore.restore_pending(run_dir.parent) == restore.Pending(restored=(str(run_dir),))
    assert tree(work) == before
    assert restore.restore_pending(run_dir.parent) == restore.Pending()


@pytest.mark.parametrize("forged", ["copied elsewhere", "another token", "no token"])
def test_a_journal_that_came_from_elsewhere_is_not_obeyed(work, forged):
    run_dir, _ = run(work, 'open("log.csv", "a").write("x")')
    changed = tree(work)
    if forged == "copied elsewhere":
        run_dir = run_dir.rename(run_dir.with_name("sent-by-mail"))
    elif forged == "another token":
        (run_dir / "files" / "token").write_text("0" * 32)
    else:
        (run_dir / "files" / "token").unlink()
    assert restore.restore_pending(run_dir.parent) == restore.Pending(foreign=(str(run_dir),))
    assert tree(work) == changed
    restore.restore(run_dir)  # asked for by name
    assert tree(work) != changed


def test_a_name_in_a_journal_cannot_lead_outside(work):
    run_dir, _ = run(work, 'open("log.csv", "a").write("x")')
    victim = work / "notes.txt"
    entry = {
        "action": "kept",
        "path": str(work / "stolen.txt"),
        "aside": os.path.relpath(victim, run_dir / "files/kept-aside"),
    }
    with open(run_dir / "files" / journal.JOURNAL, "a") as lines:
        lines.write(json.dumps(entry) + "\n")
    restore.restore(run_dir)
    assert victim.exists()
    assert not (work / "stolen.txt").exists()


@pytest.fixture
def other():
    """A process that lives and is not ours; and the line that it would note."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process, f"{process.pid} {owners.started(process.pid)}\n"
    finally:
        process.kill()
        process.communicate()


def test_a_running_search_is_left_alone(work, other):
    run_dir, _ = run(work, 'open("log.csv", "a").write("x")')
    changed = tree(work)
    with open(run_dir / "files" / owners.OWNERS, "a") as lines:
        lines.write(other[1])
    assert restore.restore_pending(run_dir.parent) == restore.Pending()
    with pytest.raises(AdvisorError, match=f"goes on, in process {other[0].pid}"):
        restore.restore_asked(run_dir)
    assert tree(work) == changed
    other[0].kill()
    other[0].wait()
    assert restore.restore_asked(run_dir) == ()
    assert tree(work) != changed
    with pytest.raises(AdvisorError, match="no run was interrupted"):
        restore.restore_asked(run_dir)


def test_two_searches_do_not_take_each_others_files_for_the_users(work, other):
    """Planted: the second would set the first one's file aside, the first put the user's back, the second lose it."""
    first, _ = run(work, 'open("out/best.pt", "w").write("of the first search")')
    with open(first / "files" / owners.OWNERS, "a") as lines:
        lines.write(other[1])
    held = tree(work)
    second = first.with_name("two")
    code = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from advisor.userfiles.guard import Guard
Guard.of(Path({str(second)!r}))
open("log.csv", "a").write("of the second")
open("out/best.pt", "w").write("of the second")
"""

    def again():
        return subprocess.run([sys.executable, "-c", code], cwd=work, capture_output=True, text=True, check=False)

    ended = again()
    assert f"the run in {first}, process {other[0].pid}, has set it aside" in ended.stderr
    assert restore.held_by_another(second).startswith(f"{work / 'out/best.pt'}: the run in {first}")
    assert restore.restore(second) == ()  # what it could touch is back
    assert tree(work) == held
    other[0].kill()
    other[0].wait()
    restore.restore(first)
    assert (work / "out/best.pt").read_text() == "the user's best weights"
    assert again().returncode == 0
    restore.restore(second)
    assert (work / "out/best.pt").read_text() == "the user's best weights"


def test_two_searches_may_both_have_nameless_files_in_one_folder(work, other):
    """Planted: /tmp was taken for a file that the first one wrote (O_TMPFILE), and the second script failed."""
    nameless = "import tempfile; tempfile.TemporaryFile(dir=os.getcwd()).write(b'x')"
    first, _ = run(work, nameless)
    with open(first / "files" / owners.OWNERS, "a") as lines:
        lines.write(other[1])
    code = f"""
import os, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from advisor.userfiles.guard import Guard
Guard.of(Path({str(first.with_name("two"))!r}))
{nameless}
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=work, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr


def test_a_later_process_with_the_number_of_a_dead_search_does_not_hold_it(work, other):
    run_dir, _ = run(work, 'open("log.csv", "a").write("x")')
    if not owners.started(os.getpid()):
        pytest.skip("no /proc here")
    (run_dir / "files" / owners.OWNERS).write_text(f"{other[0].pid} 1\n")
    assert restore.restore_pending(run_dir.parent) == restore.Pending(restored=(str(run_dir),))


def test_what_cannot_be_put_back_is_told_and_tried_again(work):
    before = tree(work)
    run_dir, _ = run(work, 'open("log.csv", "w").write("x"); os.remove("notes.txt"); os.mkdir("notes.txt")')
    (work / "notes.txt" / "in the way").touch()
    found = restore.restore_pending(run_dir.parent)
    assert found.restored == ()
    assert [problem.partition(":")[0] for problem in found.problems] == [str(work / "notes.txt")]
    (work / "notes.txt" / "in the way").unlink()
    (work / "notes.txt").rmdir()
    assert restore.restore_pending(run_dir.parent) == restore.Pending(restored=(str(run_dir),))
    assert tree(work) == before


def test_a_script_that_outlives_its_advisor_ends_or_at_least_holds_its_files(work):
    """kill -9 of the supervisor alone: the orphan must not write on while the next start puts its files back."""
    run_dir = work.parent / "runs" / "one"
    child = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from advisor.userfiles.protect import protect
protect(Path({str(run_dir)!r}))
open("log.csv", "a").write("x")
print(os.getpid(), flush=True)
time.sleep(10**6)
"""
    supervisor = f"""
import os, subprocess, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from advisor.userfiles.owners import hold
hold(Path({str(run_dir)!r}))
environment = {{**os.environ, "ADVISOR_SUPERVISOR": str(os.getpid())}}
subprocess.run([sys.executable, "-c", {child!r}], env=environment)
"""
    before = tree(work)
    process = subprocess.Popen([sys.executable, "-c", supervisor], cwd=work, stdout=subprocess.PIPE, text=True)
    pid = int(process.stdout.readline())
    assert restore.restore_pending(run_dir.parent) == restore.Pending()
    process.kill()
    process.communicate()  # its output ends when the child, which has it too, is about to
    until(lambda: owners.running(run_dir) != pid)
    assert owners.running(run_dir) is None
    assert restore.restore_pending(run_dir.parent) == restore.Pending(restored=(str(run_dir),))
    assert tree(work) == before


def test_more_than_there_is_room_for_is_told_and_the_program_runs(work):
    (work / "big.bin").write_bytes(b"x" * 4096)
    code = 'sys.modules["advisor.userfiles.events"]._PROGRAM_BYTES = 2048; import subprocess; subprocess.run(["rm", "big.bin", "notes.txt"])'
    run_dir, result = run(work, code)
    assert "big.bin" in result.stderr
    assert "not enough room" in result.stderr
    restore.restore(run_dir)
    assert not (work / "big.bin").exists()


def started(work, script, **environment):
    """A script of this text as the launcher starts it in a search; its run folder and how it ended."""
    run_dir = work.parent / "runs" / "one"
    (work / "train.py").write_text(textwrap.dedent(script))
    variables = {"PYTHONPATH": str(BOOTSTRAP), FILES_VARIABLE: str(run_dir), **environment}
    ended = subprocess.run(
        [sys.executable, "train.py"],
        cwd=work,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return run_dir, ended


def test_files_are_set_aside_before_torch_is_imported(work):
    script = 'import shutil, sys; shutil.rmtree("out"); print("torch" in sys.modules)'
    (work / "train.py").touch()
    before = contents(work)
    run_dir, ended = started(work, script)
    assert ended.stdout == "False\n", ended.stderr
    assert not (work / "out").exists()
    restore.restore(run_dir)
    (work / "train.py").write_text("")
    assert contents(work) == before


def test_a_script_whose_files_cannot_be_set_aside_does_not_start(work):
    """Its own module of that name would be hidden by ours, so the guard cannot come first."""
    (work / "advisor.py").touch()
    _, ended = started(
        work, 'open("log.csv", "w")', ADVISOR_SESSION="session.json", ADVISOR_SUPERVISOR=str(os.getpid())
    )
    assert ended.returncode == 3
    assert "the script is not started" in ended.stderr
    assert (work / "log.csv").read_text().startswith("epoch,loss")
    # What the script starts is not ours to end.
    _, ended = started(work, 'open("log.csv", "w"); import advisor; print(advisor.__file__)')
    assert ended.returncode == 0
    assert ended.stdout.strip() == str(work / "advisor.py")
    assert "files are not set aside" in ended.stderr


def test_a_journal_cut_off_by_a_crash_still_restores(work):
    before = tree(work)
    run_dir, _ = run(work, SCRIPTS["rotates checkpoints"])
    with open(run_dir / "files" / journal.JOURNAL, "a") as lines:
        lines.write('{"action": "kept", "pa')
    restore.restore(run_dir)
    assert tree(work) == before


def test_on_a_disk_that_fills_what_cannot_be_noted_is_not_touched(work):
    """The system writes what there is room for, and raises at the next write only."""
    before = tree(work)
    run_dir, _ = run(
        work,
        """
        write, full = os.write, [True]

        def short(handle, data):
            return write(handle, data[:40] if full else data)

        os.write = short
        for path in ("log.csv", "out/best.pt"):
            try:
                open(path, "w")
            except OSError as error:
                assert error.errno == 28, error
            else:
                raise AssertionError(path)
        full.clear()
        open("notes.txt", "w").write("there is room again")
        open("log.csv", "w").write("there is room again")
        """,
    )
    assert (work / "out/best.pt").read_text() == "the user's best weights"
    assert restore.restore(run_dir) == ()
    assert tree(work) == before


def test_what_is_back_is_not_undone_again_where_the_disk_is_too_full_to_list_it(work, monkeypatch):
    run_dir, _ = run(work, 'open("result.txt", "w").write("of the search")')
    monkeypatch.setattr(os, "write", lambda handle, data: 0)
    assert restore.restore(run_dir) == ()
    (work / "result.txt").write_text("the user's own")
    assert restore.restore(run_dir) == ()
    assert (work / "result.txt").read_text() == "the user's own"


def test_two_processes_one_after_the_other_start_from_the_same_files(work):
    before = tree(work)
    for _ in range(2):
        run_dir, _ = run(work, SCRIPTS["appends to a table and edits in place"])
        assert restore.restore(run_dir) == ()
        assert tree(work) == before


def test_a_write_is_refused_when_the_original_cannot_be_set_aside(work):
    _, result = run(
        work,
        """
        shutil.rmtree(guard.root / "kept-aside")
        (guard.root / "kept-aside").write_text("in the way")
        os.remove("notes.txt")
        """,
        check=False,
    )
    assert result.returncode != 0
    assert "could not set a file aside" in result.stderr
    assert (work / "notes.txt").read_text() == "do not lose me"


def test_reading_leaves_no_trace(work):
    run_dir, _ = run(work, 'open("log.csv").read(); os.makedirs("out", exist_ok=True); os.stat("out")')
    assert restore.written(run_dir) == ((), 0)
    assert not (run_dir / "files" / journal.JOURNAL).exists()


def test_trackers_stay_offline_and_in_the_run_folder(tmp_path):
    environment = trackers.offline(tmp_path)
    assert environment["WANDB_MODE"] == "offline"
    assert environment["MLFLOW_TRACKING_URI"].startswith(tmp_path.resolve().as_uri())


BLOCKED = 'os.remove("notes.txt"); os.mkdir("notes.txt"); open("notes.txt/in the way", "w").close()'


def blocked(work, run_dir):
    """The one file that a process of `BLOCKED` leaves no room for is told, and the next attempt may succeed."""
    shutil.rmtree(run_dir / "files" / "diverted", ignore_errors=True)
    (work / "notes.txt").mkdir(exist_ok=True)
    (work / "notes.txt" / "of another program").touch()
    found = restore.restore(run_dir)
    assert [problem.partition(":")[0] for problem in found] == [str(work / "notes.txt")]


def test_what_is_back_is_the_users_own_when_the_rest_is_tried_again(work):
    before = contents(work)
    run_dir, _ = run(work, 'open("log.csv", "a").write("x"); open("result.txt", "w").write("of the search");' + BLOCKED)
    blocked(work, run_dir)
    (work / "log.csv").write_text("trained on since")
    (work / "result.txt").write_text("trained on since")
    shutil.rmtree(work / "notes.txt")
    assert restore.restore(run_dir) == ()
    assert (work / "log.csv").read_text() == "trained on since"
    assert (work / "result.txt").read_text() == "trained on since"
    (work / "log.csv").write_text("epoch,loss\n1,0.5\n")
    (work / "result.txt").unlink()
    assert contents(work) == before


def test_what_is_back_is_set_aside_anew_by_the_next_process(work):
    before = tree(work)
    run_dir, _ = run(work, 'open("log.csv", "a").write("x");' + BLOCKED)
    blocked(work, run_dir)
    run(work, 'open("log.csv", "w").write("of the second process")')
    shutil.rmtree(work / "notes.txt")
    assert restore.restore(run_dir) == ()
    assert tree(work) == before


def test_a_search_that_left_nothing_behind_is_restored_once(work):
    run_dir, _ = run(work, 'open("part.tmp", "w").close(); os.remove("part.tmp")')
    assert restore.restore_pending(run_dir.parent) == restore.Pending(restored=(str(run_dir),))
    assert restore.restore_pending(run_dir.parent) == restore.Pending()


def test_ctrl_c_while_files_are_put_back_waits_until_they_are(work):
    before = tree(work)
    run_dir, _ = run(work, SCRIPTS["wipes its output folder at the start"])
    code = f"""
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from advisor.userfiles.restore import restore
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job begins without
replace = os.replace
def interrupted(*places):
    os.kill(os.getpid(), signal.SIGINT)
    replace(*places)
os.replace = interrupted
try:
    restore(Path({str(run_dir)!r}))
except KeyboardInterrupt:
    print("interrupted")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "interrupted\n"
    assert tree(work) == before


def test_what_still_works_there_is_ended_before_files_are_put_back(work, monkeypatch):
    """A forked saver whose parent was killed: it would write on over what is back, as it holds everything for set aside."""
    monkeypatch.setattr(owners, "LEAVES_S", 0.0)
    monkeypatch.setattr(owners, "ASKED_S", 0.2)
    before = tree(work)
    run_dir, _ = run(
        work,
        """
        import time
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            for number in (0, 1, 2):
                os.close(number)
            while True:
                open("log.csv", "a").write("of the orphan")
                time.sleep(0.01)
        while not os.path.getsize("log.csv") > 20:
            time.sleep(0.01)
        os._exit(0)
        """,
    )
    assert owners.running(run_dir) is not None
    assert restore.restore(run_dir) == ()
    assert owners.running(run_dir) is None
    assert tree(work) == before


@pytest.mark.parametrize("mode", ["a", "r+"])
def test_whoever_has_a_file_open_has_the_one_that_is_put_back(work, mode):
    """Another training that logs to it meanwhile: its lines are not lost, and later ones come to the right place."""
    with open(work / "log.csv", "a") as other:
        run_dir, _ = run(work, f'open("log.csv", {mode!r}).write("of the run")')
        other.write("meanwhile\n")
        other.flush()
        assert restore.restore(run_dir) == ()
        other.write("afterwards\n")
    assert (work / "log.csv").read_text() == "epoch,loss\n1,0.5\nmeanwhile\nafterwards\n"


@pytest.mark.parametrize("mode", ["a", "w"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EBUSY])
def test_a_file_that_cannot_change_places_is_written_back(work, mode, number, monkeypatch):
    """In a folder where no file can be made, or a mount of its own, as containers have them."""
    before, place = contents(work), str(work.resolve() / "log.csv")
    fixed = f"""
        def fixed(plain):
            def moves(*places, **more):
                if {place!r} in map(str, places):
                    raise OSError({number}, os.strerror({number}))
                return plain(*places, **more)
            return moves
        os.replace, os.rename, os.unlink = map(fixed, (os.replace, os.rename, os.unlink))
        open("log.csv", {mode!r}).write("x")
    """
    run_dir, _ = run(work, fixed)
    assert contents(work) != before
    inode = (work / "log.csv").stat().st_ino

    def fixed_here(plain):
        def moves(*places, **more):
            if place in map(str, places):
                raise OSError(number, os.strerror(number))
            return plain(*places, **more)

        return moves

    for name in ("replace", "unlink"):
        monkeypatch.setattr(os, name, fixed_here(getattr(os, name)))
    assert restore.restore(run_dir) == ()
    assert (work / "log.csv").stat().st_ino == inode
    assert contents(work) == before
    assert not any((run_dir / "files/kept-aside").iterdir())


def test_what_the_run_wrote_gives_way_where_there_is_no_room_for_both(work, monkeypatch):
    """A checkpoint on another disk than the run folder, which is full."""
    before = tree(work)
    run_dir, _ = run(work, 'open("out/best.pt", "w").write("large")')

    def full(source, target, plain=os.replace):
        if "diverted" in str(target):
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        plain(source, target)

    def no_room(source, target):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", full)
    monkeypatch.setattr(journal, "copy", no_room)
    assert restore.restore(run_dir) == ()
    assert tree(work) == before


def test_a_copy_that_the_disk_has_no_room_for_is_not_begun(tmp_path, monkeypatch):
    large = tmp_path / "data.h5"
    with open(large, "wb") as stream:
        stream.truncate(1 << 21)
    monkeypatch.setattr(journal, "cloned", lambda *places: False)
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=100, f_frsize=4096))
    monkeypatch.setattr(shutil, "copy2", lambda *places, **more: pytest.fail("it was begun"))
    with pytest.raises(OSError, match=r"a copy needs 2\.00 MiB, and 400 KiB are free") as found:
        journal.copy(large, tmp_path / "copy")
    assert found.value.errno == errno.ENOSPC
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_file()) == ["data.h5"]


def test_a_large_file_is_cloned_where_the_disk_can(tmp_path, monkeypatch):
    import fcntl

    large = tmp_path / "data.h5"
    large.write_bytes(bytes(1 << 20))
    os.utime(large, ns=(5, 7))
    cloned = []
    monkeypatch.setattr(fcntl, "ioctl", lambda target, code, source: cloned.append(code))
    monkeypatch.setattr(shutil, "copy2", lambda *places, **more: pytest.fail("it was copied"))
    journal.copy(large, tmp_path / "copy")
    assert cloned == [0x40049409]
    assert (tmp_path / "copy").stat().st_mtime_ns == 7


WIPES = {
    "rmtree": 'shutil.rmtree("runs", ignore_errors=True)',
    "rmdir": 'os.remove("runs/one/files/kept-aside/" + os.listdir("runs/one/files/kept-aside")[0])',
    "rename": 'os.rename("runs", "runs.old")',
    "shell": 'os.system("rm -rf runs")',
    "move": 'import subprocess; subprocess.run(["mv", "runs", "runs.old"])',
}


@pytest.mark.parametrize("how", WIPES)
def test_a_script_that_wipes_the_run_folder_does_not_wipe_what_was_set_aside(work, how):
    """`-o out/run`, and the script begins with its `out` anew."""
    (work / "runs").symlink_to(work.parent / "runs")
    before = {name: found for name, found in tree(work).items() if name != "runs"}
    run_dir, _ = run(
        work,
        f"""
        os.chdir("..")
        open("work/log.csv", "w").write("x")
        try:
            {WIPES[how]}
        except OSError as error:
            assert "lie in there until they are put back" in str(error), error
        else:
            assert {how == "rmtree"}
        """,
    )
    assert restore.restore(run_dir) == ()
    assert {name: found for name, found in tree(work).items() if name != "runs"} == before


def test_a_run_folder_elsewhere_is_found_at_the_next_start(work, tmp_path):
    """`-o /data/run`: no command looks there, but the user's cache folder has it."""
    before = tree(work)
    run_dir, _ = run(work, 'open("log.csv", "a").write("x")')
    assert restore.restore_pending(tmp_path / "another folder") == restore.Pending(restored=(str(run_dir),))
    assert tree(work) == before


def test_a_run_of_another_machine_is_left_to_that(work, monkeypatch):
    """Home folders are shared: nobody here can say whether its processes have ended."""
    run_dir, _ = run(work, 'open("log.csv", "a").write("x")')
    changed = tree(work)
    monkeypatch.setattr(platform, "node", lambda: "another")
    monkeypatch.setattr(owners, "last_seen", None)
    assert restore.restore_pending(run_dir.parent) == restore.Pending(foreign=(str(run_dir),))
    assert restore.restore_pending(run_dir.parent / "elsewhere") == restore.Pending()
    assert tree(work) == changed


def test_one_line_says_what_was_put_back(work, monkeypatch):
    monkeypatch.chdir(work)
    run_dir, _ = run(
        work,
        """
        import subprocess
        for name in ("log.csv", "notes.txt"):
            open(name, "a").write("x")
        for number in range(6):
            open(f"out/{number}.pt", "w").write("x")
        os.makedirs("made/below")
        subprocess.run([sys.executable, "-S", "-c", "import os; open(os.path.join('made', 'below', 'native'), 'w')"], env={})
        """,
    )
    restore.restore(run_dir)
    assert restore.told(run_dir) == (
        "put back as it was: log.csv, notes.txt; removed again: out/0.pt, out/1.pt, out/2.pt, out/3.pt and 2 more; "
        f"what the script wrote is in {run_dir}/files/diverted; left because it is not empty: made, made/below"
    )
    assert "diverted" not in restore.told(run_dir, moved=False)
    empty, _ = run(work, "")
    assert restore.told(empty.with_name("another")) == ""


def test_a_note_of_an_old_search_that_another_advisor_forgets_first_is_no_matter(tmp_path, monkeypatch):
    owners.hold(tmp_path / "old")
    noted = tmp_path / "cache" / "advisor" / "searches"
    (old,) = noted.iterdir()
    os.utime(old, (0, 0))
    unlink = Path.unlink

    def gone(path, missing_ok=False):
        if path == old:
            unlink(path)
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", gone)
    owners.hold(tmp_path / "new")
    assert not old.exists()
    assert (tmp_path / "new" / "files" / "token").is_file()
