"""A script for one GPU as several ranks, as a user starts it: real processes over gloo."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import data_parallel
import pytest
import torch

# Eight batches an epoch, of nine samples, the last of seven; a norm over the batch, a layer that drops nothing, a checkpoint, an evaluation.
SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
drawn = torch.Generator().manual_seed(5)
data = TensorDataset(torch.randn(70, 3, 8, 8, generator=drawn), torch.randint(0, 4, (70,), generator=drawn))
loader = DataLoader(data, batch_size=9, shuffle=True)
net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
for epoch in range(EPOCHS):
    net.train()
    for i, (x, y) in enumerate(loader):
        loss = nn.functional.cross_entropy(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"{i}/{len(loader)} {loss.item():.5f}")
torch.save(net.state_dict(), "net.pt")
net.eval()
with torch.no_grad():
    print("evaluated", sum(nn.functional.cross_entropy(net(x), y).item() for x, y in DataLoader(data, batch_size=10)))
"""
PROVED = "schema_version: 1\nscript: train.py\ngpus: {}\nitems: []\n"  # no proof is made


def advisor(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "advisor", *words],
        cwd=folder,
        env=data_parallel.environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the script prints by itself: in this process, which has torch already."""
    monkeypatch.chdir(folder)
    threads, said = torch.get_num_threads(), io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            runpy.run_path("train.py", run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    return said.getvalue()


def numbers(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"(?:\d/8|evaluated) ([\d.]+)", text)]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.long)])
def test_ranks_print_save_and_evaluate_as_one_process_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    for name in ("one", "several"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(SCRIPT.replace("EPOCHS", "2"))
    (tmp_path / "several" / "plan.yaml").write_text(PROVED.format(ranks))
    plain = alone(tmp_path / "one", monkeypatch)
    found = advisor(tmp_path / "several", "run", "--gpus", str(ranks), "--plan", "plan.yaml", "train.py")
    assert found.returncode == 0, found.stderr
    assert len(numbers(found.stdout)) == 17  # each line once
    assert numbers(found.stdout) == pytest.approx(numbers(plain), rel=1e-4, abs=2e-5)
    one, several = (torch.load(tmp_path / name / "net.pt") for name in ("one", "several"))
    torch.testing.assert_close(several, one, rtol=1e-4, atol=1e-5)
    (other,) = (tmp_path / "several").glob("advisor-runs/*/ranks/rank-0001/output.log")
    assert numbers(other.read_text()) == pytest.approx(numbers(found.stdout), abs=2e-5)  # what it read, and went by
    assert sorted(path.name for path in (tmp_path / "several").iterdir()) == [
        "advisor-runs",
        "net.pt",
        "plan.yaml",
        "train.py",
    ]


@pytest.mark.long
def test_two_ranks_are_proved_and_a_plan_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("EPOCHS", "7"))
    found = advisor(tmp_path, "run", "--gpus", "2", "train.py")
    assert found.returncode == 0, found.stderr
    assert "2 ranks against one process" in found.stderr
    again = advisor(tmp_path, "run", "--gpus", "2", "train.py")
    assert "2 ranks against one process" not in again.stderr, "it is proved already"
    assert numbers(again.stdout) == numbers(found.stdout)


@pytest.mark.long
def test_norms_by_parts_of_a_batch_are_not_the_same_training(tmp_path: Path) -> None:
    """The proof's own test: what it is there to find, planted."""
    takes_back = "import torch.nn.functional as F\nF.batch_norm = getattr(F.batch_norm, '__wrapped__', F.batch_norm)\n"
    script = SCRIPT.replace("EPOCHS", "10").replace("import torch\n", f"import torch\n{takes_back}", 1)
    script = script.replace("BatchNorm2d(8)", "BatchNorm2d(8, track_running_stats=False)")  # buffers would tell sooner
    (tmp_path / "train.py").write_text(script)
    found = advisor(tmp_path, "run", "--gpus", "2", "train.py")
    assert found.returncode == 1
    assert "2 ranks do not train as one process does" in found.stderr
    assert not (tmp_path / "net.pt").exists()


DIES = {
    "raise ValueError('no such luck')": (1, r"rank 1: ValueError: no such luck \(.*train\.py:\d+\)"),
    "raise torch.OutOfMemoryError('CUDA out of memory')": (1, r"rank 1: OutOfMemoryError: CUDA out of memory"),
    "import os; os.kill(os.getpid(), 9)": (137, r"rank 1 was ended by SIGKILL; its output: .*rank-0001"),
    "import sys; sys.exit(3)": (3, r"rank 1 ended with exit code 3"),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", DIES, ids=["raises", "has no memory", "killed", "leaves"])
def test_a_rank_that_dies_ends_all_and_is_named(tmp_path: Path, fault: str) -> None:
    """And nothing is lost of what was saved before."""
    dies = f"    if epoch == 1 and torch.distributed.get_rank() == 1: {fault}\n    net.train()"
    saves = "    torch.save(net.state_dict(), f'net-{epoch}.pt')\ntorch.save"
    script = SCRIPT.replace("EPOCHS", "3").replace("    net.train()", dies).replace("torch.save", saves, 1)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "plan.yaml").write_text(PROVED.format(2))
    found = advisor(tmp_path, "run", "--gpus", "2", "--plan", "plan.yaml", "train.py")
    code, told = DIES[fault]
    assert found.returncode == code
    assert re.search(told, found.stderr), found.stderr
    assert "ChildFailedError" not in found.stderr
    assert [path.name for path in tmp_path.glob("net*.pt")] == ["net-0.pt"]
    assert set(torch.load(tmp_path / "net-0.pt")) >= {"0.weight", "1.running_mean"}
