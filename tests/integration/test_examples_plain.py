"""The example scripts work as plain PyTorch: a user can run each without advisor, on a CPU, in seconds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"

# script, arguments, a pattern of its output with the loss in the first group, files it must leave
RUNS = {
    "mnist.py": (
        "--epochs 1 --batch-size 32 --train-size 128 --test-size 64 --log-interval 1",
        r"Loss: ([\d.]+)",
        (),
    ),
    "cifar.py": (
        "--width 8 --batch-size 32 --epochs 1 --train-size 128 --test-size 64 --print-every 1",
        r"Loss: ([\d.]+)",
        ("checkpoint/ckpt.pth",),
    ),
    "imagenet.py": (
        "-a resnet18 -b 8 --image-size 32 --num-classes 10 --epochs 1 --train-size 24 --val-size 8 -j 0 --dummy -p 1 --lr 0.01",
        r"Loss ([\d.e+-]+)",
        ("checkpoint.pth.tar",),
    ),
    "alexnet.py": (
        "--width 4 --hidden 32 --batch-size 32 --epochs 1 --train-size 128 --test-size 64",
        r"loss ([\d.]+)",
        (),
    ),
    "small_amp.py": ("--epochs 1 --train-size 128 --batch-size 32", r"loss ([\d.]+)", ()),
    "unet.py": (
        "--epochs 1 --train-size 8 --val-size 4 --batch-size 4 --image-size 32 --width 4 --workers 0",
        r"loss ([\d.]+)",
        (),
    ),
    "mobilenet.py": (
        "--epochs 1 --train-size 24 --batch-size 8 --image-size 32 --width-mult 0.25",
        r"loss ([\d.]+)",
        ("mobilenet.pth",),
    ),
    "gan.py": (
        "--niter 1 --train-size 32 --batchSize 16 --imageSize 32 --ngf 4 --ndf 4",
        r"Loss_D: ([\d.]+)",
        ("netG.pth", "netD.pth"),
    ),
    "detector.py": (
        "--epochs 2 --train-size 16 --batch-size 4 --image-size 96 --width 0.125 --workers 0",
        r"loss ([\d.]+)",
        ("detector.pt",),
    ),
    "distill.py": (
        "--epochs 2 --train-size 16 --batch-size 4 --image-size 64 --num-classes 10 --workers 0",
        r"loss ([\d.]+)",
        ("distilled.pt",),
    ),
    "unet3d.py": ("--epochs 1 --scans 2 --steps 2 --batch-size 1 --patch 16 --width 4", r"loss ([\d.]+)", ()),
    "ecg.py": ("--epochs 1 --train-size 32 --batch-size 16 --length 512 --width 8", r"loss ([\d.]+)", ()),
    "flow.py": ("--steps 1 --batch-size 1 --height 64 --width 64 --channels 16 --iters 2", r"loss ([\d.]+)", ()),
    "cyclegan.py": ("--steps 1 --image-size 32 --width 4 --blocks 1", r"loss ([\d.]+)", ()),
    "superres.py": ("--steps 1 --batch-size 2 --patch 16 --width 8 --blocks 1", r"loss ([\d.]+)", ()),
    "diffusion.py": ("--steps 1 --batch-size 2 --image-size 16 --width 32", r"loss ([\d.]+)", ()),
    "simsiam.py": (
        "--epochs 1 --train-size 16 --batch-size 8 --image-size 32 --width 8 --workers 0",
        r"loss ([\d.]+)",
        (),
    ),
    "retina.py": ("--steps 1 --batch-size 1 --image-size 64 --width 8", r"loss ([\d.]+)", ()),
    "speedrun.py": ("--epochs 1 --train-size 128 --batch-size 64 --width 16", r"loss ([\d.]+)", ()),
    "jpegs.py": (
        "--epochs 1 --train-size 16 --batch-size 8 --image-size 64 --width 8 --workers 0",
        r"loss ([\d.]+)",
        (),
    ),
    "metric.py": ("--steps 1 --batch-size 8 --image-size 32 --width 8 --classes 500", r"loss ([\d.]+)", ()),
    "policy.py": ("--updates 20 --batch-size 8 --width 8", r"loss ([\d.]+)", ()),
}


def run(script: str, arguments: str, folder: Path, launcher: tuple[str, ...] = ()) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / script), *arguments.split()],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# The one whose packages need most; `make demo` trains cifar.py, and each is plain PyTorch as this one is.
SHORT = {"imagenet.py"}


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in RUNS]
)
def test_trains_a_few_steps(script: str, tmp_path: Path) -> None:
    arguments, pattern, files = RUNS[script]
    losses = [float(text) for text in re.findall(pattern, run(script, arguments, tmp_path))]
    assert losses
    assert all(0 < loss < 50 for loss in losses)
    assert all((tmp_path / name).is_file() for name in files)


@pytest.mark.long
def test_imagenet_trains_in_two_processes_and_one_goes_on_from_their_checkpoint(tmp_path: Path) -> None:
    small = "-a resnet18 -b 4 --image-size 32 --num-classes 10 --train-size 24 --val-size 9 -j 0 --dummy -p 1"
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    trained = run("imagenet.py", f"{small} --epochs 1", tmp_path, torchrun)
    # Half the batches each, and one process that tells of them.
    assert re.findall(r"Epoch: \[0\]\[(\d)/3\]", trained) == ["1", "2", "3"]
    assert trained.count("* Acc@1") == 1
    resumed = run("imagenet.py", f"{small} --epochs 2 --resume checkpoint.pth.tar", tmp_path)
    assert "Epoch: [1][6/6]" in resumed


@pytest.mark.long
def test_cifar_and_imagenet_resume_from_their_checkpoints(tmp_path: Path) -> None:
    small = "--width 8 --batch-size 32 --train-size 64 --test-size 64 --device-data"
    run("cifar.py", f"{small} --epochs 1", tmp_path)
    assert "Epoch: 1" in run("cifar.py", f"{small} --epochs 2 --resume", tmp_path)
    small = "-a resnet18 -b 8 --image-size 32 --num-classes 10 --train-size 16 --val-size 8 --device-data"
    run("imagenet.py", f"{small} --epochs 1", tmp_path)
    resumed = run("imagenet.py", f"{small} --epochs 2 --resume checkpoint.pth.tar", tmp_path)
    assert "Epoch: [1]" in resumed
    assert "Epoch: [0]" not in resumed


@pytest.mark.parametrize(("name", "parameters"), [("resnet50", 25_557_032), ("mobilenet_v3_large", 5_483_032)])
def test_models_have_the_published_size_and_names(name: str, parameters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import models

    with torch.device("meta"):
        model = getattr(models, name)()
        assert model(torch.empty(2, 3, 64, 64)).shape == (2, 1000)
    assert sum(p.numel() for p in model.parameters()) == parameters
    expected = "layer3.5.bn2.running_var" if name == "resnet50" else "features.4.block.2.fc1.bias"
    assert expected in model.state_dict()


def test_every_example_is_documented_and_tested() -> None:
    scripts = {path.name for path in EXAMPLES.glob("*.py")} - {"models.py"}
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert {name for name in scripts if not name.startswith("cupy_")} == set(RUNS)  # those need a GPU
    assert all(f"`{script}`" in readme for script in scripts)
