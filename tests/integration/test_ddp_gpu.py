"""The kernels and the command under DistributedDataParallel on two GPUs, over NCCL. What needs none of them: test_ddp.py.

Each part runs in two processes that are killed when they hang. All results come through files, so what was found before a fault counts.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data_parallel
import pytest
import torch
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from advisor.loop.training import RootModule, Training
from advisor.ops import dispatch, nvrtc
from advisor.ops.batchnorm_act import api, spec
from advisor.transforms import registry

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs, one for each rank"),
    pytest.mark.skipif(not distributed.is_nccl_available(), reason="needs a torch with NCCL"),
    pytest.mark.skipif(torch.cuda.is_available() and bool(nvrtc.unavailable()), reason="needs CuPy for the kernels"),
]

SHAPE = {"channels": 64, "size": 64, "n": 16, "steps": 4}
BF16, SYNCHRONISED, NO_DEVICE = "bf16, no_sync and views", "SyncBatchNorm", "no device set"
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "no_sync": {"accumulate": True},
    BF16: {"accumulate": True, "gradient_as_bucket_view": True, "half": True},
    SYNCHRONISED: {"synchronised": True},
    # The last: where a launch fails, the other rank waits for this one.
    NO_DEVICE: {},
}
IN_FP32 = {
    "batchnorm_act", "batchnorm_max_pool", "bias_act", "depthwise", "group_norm", "layer_norm", "pooling", "squeeze_excite", "upsample",
}  # fmt: skip
IN_BF16 = {"batchnorm_act", "depthwise", "first_conv", "group_norm", "grouped", "layer_norm", "pooling"}
NORMS = {"batchnorm_act", "batchnorm_concat", "batchnorm_max_pool"}


def train_all_ways(rank: int, folder: Path) -> Iterator[tuple[str, Any]]:
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    for name, options in WAYS.items():
        # PyTorch's own tutorial of DistributedDataParallel moves the model to its device and leaves device 0 current.
        torch.cuda.set_device(0 if name == NO_DEVICE else rank)
        try:
            yield name, data_parallel.trained(torch.device("cuda", rank), **SHAPE, **options)
        except Exception:  # in one rank alone: the other waits for it until both are killed
            traceback.print_exc()
            yield name, {"failed": traceback.format_exc()}
    torch.cuda.set_device(rank)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Any]], str]:
    folder = tmp_path_factory.mktemp("ddp")
    return data_parallel.in_two_processes(train_all_ways, folder, backend="nccl", limit_s=115)


@pytest.mark.parametrize("way", WAYS)
def test_a_training_with_kernels_is_as_right_as_pytorchs_and_the_same_on_both_ranks(found, way: str) -> None:
    ways, why = found
    assert way in ways, f"not reached: {why}"
    # As tests/kernels has it: of a whole network's step in fp32, and of autocast.
    factor, slack = (2.0, 1e-2) if way == BF16 else (1.4, 1e-4)
    # One value beside a kink, of a maximum or of ReLU, is 2.4e-4 of these four steps. PyTorch's own were so far off in 13 of 13 runs on two
    # H100s, in a 14th, with ours on that side of it, not: so the worst of PyTorch's own in any way counts.
    alike = [rank for name, ranks in ways.items() if (name == BF16) == (way == BF16) for rank in ranks]
    plain_error = max((rank["plain_error"] for rank in alike if "failed" not in rank), default=0.0)
    for rank in ways[way]:
        assert "failed" not in rank, rank["failed"]
        print({key: value for key, value in rank.items() if key != "losses"})
        assert rank["same_on_all_ranks"]
        assert rank["ranks_saw_other_data"]
        assert rank["error"] <= factor * plain_error + slack
        assert rank["buffers"] <= factor * rank["plain_buffers"] + slack
        wanted = IN_BF16 if way == BF16 else IN_FP32 - NORMS if way == SYNCHRONISED else IN_FP32
        assert set(rank["matched"]) >= wanted
        assert set(rank["engaged"]) >= wanted
        assert not wanted & set(rank["fell_back"])
        assert rank["graphs"] == 1 or way == SYNCHRONISED


def test_synchronised_norms_are_left_alone_and_the_reason_is_told(found) -> None:
    ways, why = found
    assert SYNCHRONISED in ways, f"not reached: {why}"
    for rank in ways[SYNCHRONISED]:
        assert "failed" not in rank, rank["failed"]
        assert not NORMS & (set(rank["matched"]) | set(rank["engaged"]))
        assert rank["left"]["batchnorm_act"] == "the model has no BatchNorm2d, BatchNorm3d, batch_norm()"


class Block(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.bn2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """CIFAR's, with norms of 4 to 17 MB at batch 128 in bf16: sizes that a process by itself launches over the whole GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        shapes = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1))
        self.blocks = nn.Sequential(*(Block(*shape) for shape in shapes))
        self.head = nn.Linear(256, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(F.relu(self.bn(self.stem(x)))).mean((2, 3)))


STEPS = 200
EAGER, AS_DISPATCHED, WHOLE_GRID, HELD = "eager", "as dispatched", "whole grid", "collective holds SMs"


def train_beside_collectives(rank: int, folder: Path) -> Iterator[tuple[str, Any]]:
    """Many steps with many small all-reduces, in which the ranks are late by turns: what came first waits on its SMs for the other."""
    torch.cuda.set_device(rank)
    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda", rank)
    torch.manual_seed(0)
    net = ResNet().to(device, memory_format=torch.channels_last).train()
    torch.manual_seed(1 + rank)
    images = torch.randn(128, 3, 32, 32, device=device).to(memory_format=torch.channels_last)
    targets = torch.randint(0, 10, (128,), device=device)
    alone = nvrtc.alone
    for name in (EAGER, AS_DISPATCHED, WHOLE_GRID):
        twin = copy.deepcopy(net)
        model = DistributedDataParallel(twin, device_ids=[rank], bucket_cap_mb=1, gradient_as_bucket_view=True)
        dispatch.clear()
        if name != EAGER:
            training = Training(device=device, roots=[RootModule(module=model, name="ResNet", args=(images,))])
            registry.get("fused_bn_act").apply(training, {})
        nvrtc.alone = (lambda: True) if name == WHOLE_GRID else alone
        optimizer, chance = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), random.Random(1)
        for step in range(STEPS):
            late, cycles = chance.randrange(2), chance.randrange(1, 3_000_000)
            if late == rank and step < STEPS // 2:
                torch.cuda._sleep(cycles)
            elif step == STEPS // 2:
                torch.cuda.synchronize()
                began = time.perf_counter()
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.cross_entropy(model(images), targets)
            loss.backward()
            optimizer.step()
        torch.cuda.synchronize()
        yield (
            name,
            {
                "loss": loss.item(),
                "step_ms": 1e3
                * (time.perf_counter() - began)
                / (STEPS - STEPS // 2),  # of those in which nobody was late on purpose
                "same_on_all_ranks": data_parallel._agreed(twin),
                "engaged": sum(dispatch.engaged.get("batchnorm_act", {}).values()),
                "launched": sorted(nvrtc.launched),
            },
        )
    nvrtc.alone = alone
    yield HELD, _wait_for_each_other(rank, device)


def _wait_for_each_other(rank: int, device: torch.device) -> dict[str, Any]:
    """Launches over the whole GPU behind and ahead of a collective on another stream, which holds SMs until the late rank comes."""
    x = torch.randn(128, 64, 32, 32, device=device, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    weight, bias, mean, var = (
        torch.ones(64, device=device),
        *torch.zeros(2, 64, device=device),
        torch.ones(64, device=device),
    )
    want = F.relu(F.batch_norm(x.float(), None, None, weight, bias, True)).to(x.dtype)
    sums, worst = torch.ones(16 << 20, device=device), 0.0
    for turn in range(20):
        distributed.barrier()
        torch.cuda.synchronize()
        late = turn % 2 == rank
        if late:
            time.sleep(0.02)
        works = [] if late else [distributed.all_reduce(sums, async_op=True)]
        y = [api.batchnorm_act(x, None, mean, var, weight, bias, 0.1, 1e-5, "relu", way=spec.GRID) for _ in range(30)]
        works += [distributed.all_reduce(sums, async_op=True)] if late else []
        for work in works:
            work.wait()
        torch.cuda.synchronize()
        worst = max(worst, *(float((found.float() - want.float()).abs().max()) for found in y))
        sums.fill_(1.0)
    return {"worst": worst, "launched": sorted(nvrtc.launched)}


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[Any]], str]:
    folder, many = tmp_path_factory.mktemp("beside"), {"NCCL_MIN_NCHANNELS": "16"}  # SMs that a collective takes
    with pytest.MonkeyPatch.context() as patch:
        for name, value in many.items():
            patch.setenv(name, value)
        return data_parallel.in_two_processes(train_beside_collectives, folder, backend="nccl", limit_s=115)


@pytest.mark.parametrize("name", [EAGER, AS_DISPATCHED, WHOLE_GRID])
def test_steps_end_beside_collectives(beside, name: str) -> None:
    """Under a process group norms are not launched over the whole grid; that they would end if they were is the driver's doing."""
    ways, why = beside
    assert name in ways, f"not reached: {why}"
    print(name, [rank["step_ms"] for rank in ways[name]], "ms a step")
    whole = {spec.GRID_FORWARD, spec.GRID_BACKWARD}
    for rank in ways[name]:
        assert rank["same_on_all_ranks"]
        assert rank["loss"] < 2.0  # it learns the one batch
        assert (rank["engaged"] > 10 * STEPS) == (name != EAGER)
        assert whole & set(rank["launched"]) == (whole if name == WHOLE_GRID else set())


def test_a_launch_over_the_whole_gpu_waits_for_a_collective_that_waits_for_the_other_rank(beside) -> None:
    ways, why = beside
    assert HELD in ways, f"not reached: {why}"
    for rank in ways[HELD]:
        assert rank["worst"] < 0.05  # two roundings to bf16 of values up to 5
        assert spec.GRID_FORWARD in rank["launched"]


SCRIPT = """
import os, sys
import torch
from torch import distributed, nn
distributed.init_process_group("BACKEND")
rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cpu") if "BACKEND" == "gloo" else torch.device("cuda", rank)
if device.type == "cuda":
    torch.cuda.set_device(device)
torch.manual_seed(0)
layers = [nn.Conv2d(3, 32, 3, padding=1)]
for _ in range(4):
    layers += [nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)]
net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).to(device)
model = nn.parallel.DistributedDataParallel(net, device_ids=None if device.type == "cpu" else [rank], gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
torch.manual_seed(rank)
images, targets = torch.randn(64, 3, 32, 32, device=device), torch.randint(0, 10, (64,), device=device)
for step in range(int(sys.argv[1])):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), targets).backward()
    optimizer.step()
weights = torch.cat([p.detach().flatten() for p in net.parameters()])
first = weights.clone()
distributed.broadcast(first, 0)
open(f"rank{rank}", "w").write("alike" if torch.equal(weights, first) else "apart")
distributed.destroy_process_group()
"""
PLAN = "schema_version: 1\nitems: [ITEMS]\n"
CHANGES = ("channels_last", "amp_bf16", "fused_bn_act")


def advisor(folder: Path, *words: str, limit_s: float = 115) -> tuple[int, str]:
    """Exit code and all that was said of `advisor words -- torchrun … train.py`; its processes are killed when they hang."""
    command = [sys.executable, "-m", "advisor", *words]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=data_parallel.environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired as hung:
        os.killpg(process.pid, signal.SIGTERM)  # torchrun ends its ranks then, which are in sessions of their own
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        told = hung.stdout or b""
        pytest.fail(f"hung: {' '.join(words)}\n{(told if isinstance(told, str) else told.decode())[-6000:]}")
    print(said[-6000:])
    return process.returncode, said


def torchrun(steps: int) -> list[str]:
    beside_python = Path(sys.executable).with_name("torchrun")
    known = shutil.which("torchrun") or beside_python.exists()
    start = ["torchrun"] if known else [sys.executable, "-m", "torch.distributed.run"]
    return ["--", *start, "--standalone", "--nproc-per-node", "2", "train.py", str(steps)]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT).replace("BACKEND", "nccl"))
    items = ", ".join(f"{{transform: {name}, status: kept}}" for name in CHANGES)
    (tmp_path / "plan.yaml").write_text(PLAN.replace("ITEMS", items))
    return tmp_path


def saved(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    return dict(found.get("data", found))


def test_both_ranks_are_profiled(project: Path) -> None:
    code, said = advisor(project, "profile", "-o", "run", *torchrun(100_000))
    assert code == 0, said
    profile = saved(project / "run" / "profile.json")
    model = profile["model"]
    assert profile["complete"], profile["notes"]
    assert (model["distributed"], model["world_size"], model["backend"]) == ("ddp", 2, "nccl")
    assert 10 <= profile["step_us"]["n"] <= 20  # on a busy machine some steps are left out


def test_a_plan_is_proved_in_both_ranks(project: Path) -> None:
    code, said = advisor(
        project, "apply", "--plan", "plan.yaml", "-o", "run", "--max-time", "1s", *torchrun(100_000), limit_s=280
    )
    assert code in (0, 4), said  # 4: on a small net it may be no faster beyond noise
    measured = saved(project / "run" / "measure.json")
    assert (measured["ranks"], measured["batch_size"], len(measured["losses"])) == (2, 128, 43)
    assert saved(project / "run" / "trials.json")["stack"]["plain_us"]


def test_both_ranks_train_to_the_end_with_a_plan(project: Path) -> None:
    code, said = advisor(project, "run", "--plan", "plan.yaml", *torchrun(40))
    assert code == 0, said
    assert f"training with {', '.join(CHANGES)}" in said
    assert "training without" not in said
    assert [(project / f"rank{rank}").read_text() for rank in range(2)] == ["alike", "alike"]
