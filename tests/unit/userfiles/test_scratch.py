"""A process whose writes go to a folder of its own."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
DOES = """
import glob, io, os, pathlib, shutil, tempfile
os.makedirs("made", exist_ok=True)
with open("made/one.txt", "w") as stream:
    stream.write("mine")
print("back", open("made/one.txt").read(), os.path.exists("made/one.txt"), os.listdir("made"))
with open("log.txt", "a") as stream:
    stream.write(" and mine")
print("appended", pathlib.Path("log.txt").read_text())
os.replace("made/one.txt", "made/two.txt")
print("renamed", os.path.exists("made/one.txt"), sorted(glob.glob("made/*")))
shutil.copyfile("data.txt", "copy.txt")
os.remove("data.txt")
print("removed", os.path.exists("data.txt"), sorted(os.listdir()))
pathlib.Path("deep/er").mkdir(parents=True)
pathlib.Path("deep/er/file").touch()
shutil.rmtree("deep")
print("cleared", os.path.isdir("deep"))
shutil.rmtree("kept")
print("kept", os.path.isdir("kept"))
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "x").write_text("there")
    print("temporary", os.path.commonpath([folder, SCRATCH]) != SCRATCH)
"""


def test_what_it_writes_is_its_own_and_what_was_there_stays(tmp_path: Path) -> None:
    user, run = tmp_path / "user", tmp_path / "run" / "ranks" / "rank-0001" / "files"
    user.mkdir()
    (user / "kept").mkdir()
    for name in ("log.txt", "data.txt", "kept/file"):
        (user / name).write_text("theirs")
    code = (
        f"SCRATCH = {str(run)!r}\nfrom pathlib import Path\nfrom advisor.userfiles.scratch import Scratch\n"
        f"Scratch(Path(SCRATCH)).install()\n{textwrap.dedent(DOES)}"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=user,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.splitlines() == [
        "back mine True ['one.txt']",
        "appended theirs and mine",
        "renamed False ['made/two.txt']",
        "removed False ['copy.txt', 'kept', 'log.txt', 'made']",
        "cleared False",
        "kept False",
        "temporary True",
    ]
    assert sorted(str(p.relative_to(user)) for p in user.rglob("*")) == ["data.txt", "kept", "kept/file", "log.txt"]
    assert {(user / name).read_text() for name in ("log.txt", "data.txt", "kept/file")} == {"theirs"}
