"""Each example on a GPU, at full size, as its user would: apply, train with the plan, load the checkpoint in the plain script."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ROOT = Path(__file__).parents[2]
MAX_SEARCH = os.environ.get("ADVISOR_TEST_SEARCH", "100s")

# script → (arguments of the search, what a short training takes instead, checkpoint it leaves)
RUNS = {
    "mnist.py": ("--save-model", "--epochs 1 --train-size 6400 --test-size 1000 --save-model", "mnist_cnn.pt"),
    "small_amp.py": ("", "--epochs 1 --train-size 5120", ""),
    "alexnet.py": ("", "--epochs 1 --train-size 5120 --test-size 1000", ""),
    "cifar.py": ("", "--epochs 1 --train-size 2560 --test-size 512", "checkpoint/ckpt.pth"),
    "imagenet.py": (
        "-b 128 -j 12 --dummy",
        "-b 128 -j 12 --dummy --epochs 1 --train-size 2560 --val-size 256",
        "checkpoint.pth.tar",
    ),
    "unet.py": ("", "--epochs 1 --train-size 640 --val-size 64", ""),
    "mobilenet.py": ("", "--epochs 1 --train-size 5120", "mobilenet.pth"),
    "gan.py": ("", "--niter 1 --train-size 2560", "netG.pth"),
    "detector.py": ("", "--epochs 1 --train-size 1280", "detector.pt"),
    "distill.py": ("", "--epochs 1 --train-size 2560", "distilled.pt"),
}


def advisor(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "advisor", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )
    print(done.stdout[-6000:], done.stderr[-8000:], sep="\n")  # shown by pytest when the test fails, and with -rP
    return done


def saved(path: Path) -> dict[str, object]:
    found = json.loads(path.read_text())
    return dict(found.get("data", found))


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A folder that holds the script and what it imports, as a user's project does."""
    for name in (request.node.callspec.params["script"], "models.py"):
        shutil.copy(ROOT / "docs" / "examples" / name, tmp_path)
    return tmp_path


@pytest.mark.parametrize("script", RUNS)
def test_apply_run_and_load(script: str, folder: Path) -> None:
    search, short, checkpoint = RUNS[script]
    applied = advisor(folder, "apply", "--auto", "--max-time", MAX_SEARCH, script, *search.split())
    assert applied.returncode in (0, 4)
    assert {path.name for path in folder.iterdir()} - {"advisor-runs", "__pycache__"} == {script, "models.py"}
    run = max((folder / "advisor-runs").iterdir(), key=lambda path: path.stat().st_mtime)
    stack = saved(run / "trials.json")["stack"]
    if stack is not None and stack["speedup_high"] is not None:
        assert stack["speedup_high"] >= 1.0, "what was kept makes the script slower"
    if not (run / "plan.yaml").is_file():
        pytest.skip("nothing was kept, so there is no plan to run")
    trained = advisor(folder, "run", "--plan", str(run / "plan.yaml"), script, *short.split())
    assert trained.returncode == 0
    if not checkpoint:
        return
    with_plan = torch.load(folder / checkpoint, map_location="cpu", weights_only=False)
    plain = subprocess.run(
        [sys.executable, script, *short.split()], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert plain.returncode == 0, plain.stderr
    same_form(with_plan, torch.load(folder / checkpoint, map_location="cpu", weights_only=False))


def same_form(ours: object, theirs: object) -> None:
    """Both checkpoints hold the same names, and tensors of the same shape and dtype: either loads with strict."""
    assert type(ours) is type(theirs)
    if isinstance(ours, dict) and isinstance(theirs, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            same_form(ours[key], theirs[key])
    elif isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        assert (ours.shape, ours.dtype, ours.device) == (theirs.shape, theirs.dtype, theirs.device)
        assert not ours.is_floating_point() or bool(torch.isfinite(ours).all())
