"""`advisor try --patch`: a copy with the patch applied against the script as it is, with children that are told what they measure."""

import random
from pathlib import Path

import pytest

from advisor.core import storage
from advisor.core.attempt import Attempt
from advisor.core.errors import AdvisorError
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.launcher import Exit
from advisor.trials import patched, records, shadow
from advisor.trials.options import SearchOptions

PATCH = """\
--- a/lib/model.py
+++ b/lib/model.py
@@ -1,2 +1,2 @@
 import math
-WIDTH = 1
+WIDTH = {width}
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "__init__.py").write_text("")
    (folder / "lib" / "model.py").write_text("import math\nWIDTH = 1\n")
    (folder / "train.py").write_text("import lib.model\n")
    (folder / "data").mkdir()
    (folder / "data" / "images.bin").write_text("many")
    (folder / "idea.patch").write_text(PATCH.format(width=2))
    monkeypatch.chdir(folder)
    return folder


class Launcher:
    """Stands for the launcher: what each process measures depends on the folder that it runs in."""

    def __init__(self, run_dir, copy_us, *, loss=lambda step: 2.0 - 0.01 * step, loads=True, batch=32, noise=0.01):
        self.run_dir, self.copy_us, self.loss, self.loads, self.batch = run_dir, copy_us, loss, loads, batch
        self.noise, self.calls = noise, []
        self.ends = Exit(code=0, stopped_by_advisor=True)

    def __call__(self, command, session, *, elsewhere=None, **_):
        changed = elsewhere is not None
        self.calls.append((changed, session.seed, command.argv[1:]))
        if changed and self.ends.code:
            return self.ends
        r = random.Random(len(self.calls))
        usual = self.copy_us if changed else 1000.0
        steps = tuple(usual * (1 + r.gauss(0, self.noise)) for _ in range(session.steps))
        loss = self.loss if changed else (lambda step: 2.0 - 0.01 * step)
        measured = records.Measurement(
            step_us=steps,
            every_us=steps,
            losses=tuple(loss(i) for i in range(session.warmup + session.steps)),
            batch_size=self.batch if changed else 32,
            model_hash="m",
            loaded=session.watched if changed and self.loads else (),
            complete=True,
        )
        storage.save(self.run_dir / records.MEASURE_FILE, measured)
        return Exit(code=0, stopped_by_advisor=True)


def tried(project, copy_us=500.0, **how):
    run_dir = project.parent / "run"
    run_dir.mkdir()
    start = Launcher(run_dir, copy_us, **how)
    found = attempt(project, start)
    assert storage.load(run_dir / "attempt.json", Attempt) == found
    return found, start


def attempt(project, start):
    return patched.try_patch(
        ScriptCommand.parse(["train.py"]),
        ["train.py"],
        Path("idea.patch"),
        module=False,
        options=SearchOptions(time_s=60.0),
        run_dir=start.run_dir,
        say=lambda _: None,
        start=start,
    )


def test_a_patch_that_halves_the_step_is_kept(project):
    found, start = tried(project)
    assert (found.verdict, found.exit_code, found.files) == ("kept", 0, ("lib/model.py",))
    assert found.speedup == pytest.approx(2.0, rel=0.05)
    assert [check.passed for check in (found.effect, found.numerics, found.timing)] == [True] * 3
    # Two runs of each kind, and the first of either have one seed.
    assert [changed for changed, _, _ in start.calls] == [False, True, True, False]
    assert start.calls[0][1] == start.calls[1][1] != start.calls[2][1] == start.calls[3][1]
    assert (project / "lib" / "model.py").read_text() == "import math\nWIDTH = 1\n"
    assert (found.run and Path(found.run) / "patched/lib/model.py").read_text() == "import math\nWIDTH = 2\n"


@pytest.mark.parametrize(
    ("how", "verdict", "code", "says"),
    [
        ({"copy_us": 1000.0}, "reverted", 1, "no gain above 1.0 %"),
        ({"copy_us": 960.0, "noise": 0.6}, "inconclusive", 4, "too noisy"),
        ({"loads": False}, "not applicable", 1, "did not load lib/model.py"),
        ({"loss": lambda step: 9.0 - 0.01 * step}, "reverted", 1, "it changes the training"),
        ({"loss": lambda step: 2.2 - 0.01 * step}, "reverted", 1, "the first loss"),
        ({"loss": lambda step: float("nan")}, "reverted", 1, "NaN"),
        ({"batch": 64}, "reverted", 1, "64 samples in place of 32"),
    ],
)
def test_what_is_not_kept_says_why(project, how, verdict, code, says):
    found, _ = tried(project, **how)
    assert (found.verdict, found.exit_code) == (verdict, code), found.reason
    assert says in found.reason


def test_a_patched_script_that_fails_is_told_with_its_last_line(project):
    run_dir = project.parent / "run"
    run_dir.mkdir()
    start = Launcher(run_dir, 500.0)
    start.ends = Exit(code=1)
    (run_dir / records.OUTPUT_FILE).write_text("Traceback (most recent call last):\nValueError: no width\n")
    found = attempt(project, start)
    assert (found.verdict, found.exit_code) == ("failed", 1)
    assert "gave no measurement" in found.reason


def test_a_patch_that_breaks_the_syntax_fails_before_anything_runs(project):
    (project / "idea.patch").write_text("--- a/train.py\n+++ b/train.py\n@@ -1 +1 @@\n-import lib.model\n+import (\n")
    found, start = tried(project)
    assert (found.verdict, start.calls) == ("failed", [])
    assert "does not compile" in found.reason


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing of a diff", "changes no file"),
        ("--- a/gone.py\n+++ b/gone.py\n@@ -1 +1 @@\n-a\n+b\n", "changes gone.py"),
        ("--- a/../../etc/passwd\n+++ b/../../etc/passwd\n@@ -1 +1 @@\n-a\n+b\n", "inside the project"),
        (PATCH.format(width=2).replace("-WIDTH = 1", "-WIDTH = 5"), "does not apply"),
    ],
)
def test_a_patch_that_fits_nothing_is_refused(project, tmp_path, text, says):
    (project / "idea.patch").write_text(text)
    with pytest.raises(AdvisorError, match=says):
        shadow.make(Path("idea.patch"), tmp_path / "copy", "train.py")


def test_data_is_linked_and_source_is_copied(project, tmp_path):
    found = shadow.make(Path("idea.patch"), tmp_path / "copy", "train.py")
    assert (found.folder / "data").is_symlink()
    assert not (found.folder / "train.py").is_symlink()
    assert found.directory() == found.folder
    assert found.words(["train.py", "--data", "data", str(project / "data")]) == (
        "train.py", "--data", "data", str(found.folder / "data"),
    )  # fmt: skip
    assert found.python_path() == str(found.folder)


def test_a_project_below_the_working_directory_is_named_in_the_copy(project, tmp_path, monkeypatch):
    monkeypatch.chdir(project.parent)
    found = shadow.make(project / "idea.patch", tmp_path / "copy", "project/train.py")
    assert found.words(["project/train.py", "--lr", "0.1"]) == (str(found.folder / "train.py"), "--lr", "0.1")
    assert found.directory() == project.parent
