"""What workers call a case hangs on nothing that two processes see differently: workers whose names differ refuse to run."""

import gzip
import os
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]

CASES = """
import gzip, time, pytest
@pytest.mark.parametrize("text", [gzip.compress(b"x", mtime=time.time_ns() % 2**32), b"plain", "in words"])
def test_text(text): ...
"""


def names(folder: Path) -> list[str]:
    """What a process of its own calls the cases of a file that stands below this repository's conftest."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "conftest", "--collect-only", "."]
    env = {**os.environ, "PYTHONPATH": f"{REPO / 'tests'}{os.pathsep}{REPO}"}
    told = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    return [line.partition("::")[2] for line in told.stdout.splitlines() if "::" in line]


def test_cases_of_bytes_are_named_by_their_place(tmp_path):
    assert gzip.compress(b"x", mtime=1) != gzip.compress(b"x", mtime=2)
    (tmp_path / "test_made.py").write_text(CASES)
    assert names(tmp_path) == ["test_text[text0]", "test_text[text1]", "test_text[in words]"]
