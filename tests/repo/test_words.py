"""What no tracked file may say."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]

# In pieces, so that this file passes its own test.
MACHINE_PATHS = [
    "/" + "work/",
    "/" + "tmp/wt",
    "/" + "opt/adv",
    "/" + "opt/py" + "pi",
    "/home/" + "ubuntu",
    "/" + "Users/",
]
REGISTRY_HOSTS = ["py" + "pi.org", "files.python" + "hosted.org", "download.py" + "torch.org", "pypi.nv" + "idia.com"]
UNFINISHED = ["TO" + "DO", "FIX" + "ME", "X" + "XX:"]


def tracked() -> list[Path]:
    if not (REPO / ".git").exists():
        pytest.skip("no checkout")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, text=True, check=True)
    return [REPO / name for name in done.stdout.split("\0") if name and (REPO / name).is_file()]


@pytest.mark.parametrize(
    "words", [MACHINE_PATHS, REGISTRY_HOSTS, UNFINISHED], ids=["paths", "registries", "unfinished"]
)
def test_no_tracked_file_says(words: list[str]) -> None:
    found = []
    for path in tracked():
        text = path.read_bytes().decode("utf-8", errors="replace")
        found += [
            f"{path.relative_to(REPO)}:{number}: {word}"
            for number, line in enumerate(text.splitlines(), 1)
            for word in words
            if word in line
        ]
    assert found == []
