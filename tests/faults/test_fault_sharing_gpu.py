"""A GPU that others use too, and one that the script itself has lost (numbers in catalogue.yaml)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from advisor.ops import nvrtc
from advisor.trials.live.disturbance import MachineWatch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

HERE = Path(__file__).resolve().parent
LOOP = """
import sys
import torch
import planted_changes
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 5)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8, 3, 8, 8, device="cuda")
for step in range(80):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    if step == int(sys.argv[1]):
        planted_changes.illegal_access(x)
        print("still", loss.item())
print("trained")
"""
NEVER = "-1"
HOLD = (
    "import sys, torch; torch.zeros(1 << 20, device='cuda').sum().item(); print('there', flush=True); sys.stdin.read()"
)


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def profile(folder: Path, strike: str) -> subprocess.Popen[str]:
    words = ("--keep-running", "--warmup", "2", "--steps", "4", "train.py", strike)
    return start(folder, "-m", "advisor", "profile", *words)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(LOOP)
    return tmp_path


def test_another_process_on_the_gpu_disturbs_a_block(tmp_path: Path) -> None:
    torch.zeros(1, device="cuda").sum().item()  # this process is on it before the watch begins
    watch = MachineWatch(torch.device("cuda"))
    if watch._gpu is None or not watch._gpu.processes():
        pytest.skip("the driver does not tell here who is on the GPU")
    assert watch.end(False) != "another process on the GPU"
    other = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "there\n"
        watch.begin()
        assert watch.end(False) == "another process on the GPU"
    finally:
        other.communicate("", timeout=60)
    for _ in range(50):  # the driver takes a moment to forget it
        if watch.end(False) != "another process on the GPU":
            return
        time.sleep(0.1)
    pytest.fail("a process that has ended is still held against the blocks")


def test_two_profiles_at_once_on_one_gpu(folder: Path) -> None:
    ended = [(process, *process.communicate(timeout=120)) for process in [profile(folder, NEVER) for _ in range(2)]]
    for process, out, said in ended:
        assert process.returncode == 0, said
        assert out.splitlines()[0] == "trained"
    found = sorted((folder / "advisor-runs").glob("*/profile.json"))
    assert len(found) == 2
    for path in found:
        assert json.loads(path.read_text())


@pytest.mark.skipif(torch.cuda.is_available() and bool(nvrtc.unavailable()), reason="needs CuPy")
@pytest.mark.parametrize("strike", [6, 60])
def test_a_script_that_loses_the_gpu_ends_as_it_would(folder: Path, strike: int) -> None:
    """In the measuring window, and after it."""
    plain, ours = start(folder, "train.py", str(strike)), profile(folder, str(strike))
    _, expected = plain.communicate(timeout=120)
    out, said = ours.communicate(timeout=120)
    assert "illegal memory access" in expected
    assert "illegal memory access" in said
    assert ours.returncode == plain.returncode, said
    assert "still" not in out
    assert "trained" not in out
    assert said.count("Traceback (most recent call last)") == expected.count("Traceback (most recent call last)"), said
    told = [line for line in said.splitlines() if line.startswith("[advisor]") and "illegal memory access" in line]
    assert len(told) <= 1, said
    runs = list((folder / "advisor-runs").iterdir())
    assert len(runs) == 1
    for path in runs[0].rglob("*.json"):
        json.loads(path.read_text())
