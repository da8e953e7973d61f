"""A script that starts its processes itself, searched in all of them: real processes over gloo."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import data_parallel
import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from advisor.distributed import board
from advisor.distributed.alone import alone
from advisor.loop.training import RootModule, Training
from advisor.transforms import registry
from advisor.transforms.base import Match, Transform, Undo
from advisor.trials.across_gate import AcrossGate
from advisor.trials.live.switch import Switch
from advisor.trials.numerics.replay import ReplayedCall

# A step is long but where gradients are views of buckets: what the search is to find, however noisy the machine.
SCRIPT = """
import os, sys, time
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def main(number, ranks, **options):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", **options)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(1200, 3, 4, 4), torch.randint(0, 4, (1200,)))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data), num_workers=1)
    net = DistributedDataParallel(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    step = 0
    for epoch in range(40):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
            views = all(p.grad.untyped_storage().nbytes() > p.grad.nbytes for p in net.parameters())
            time.sleep(0.002 if views else 0.05)
            FAULT
            optimizer.step()
            step += 1
    torch.distributed.destroy_process_group()

if __name__ == "__main__":
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        import torch.multiprocessing as mp
        address = f"file://{os.path.abspath('store')}-{os.getpid()}"
        mp.spawn(spawned, (2, address), nprocs=2)
"""
SPAWNED = (
    "def spawned(rank, ranks, address):\n    main(rank, ranks, init_method=address, rank=rank, world_size=ranks)\n"
)
TORCHRUN = ("--", sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def apply(folder: Path, *words: str, fault: str = "pass") -> subprocess.CompletedProcess[str]:
    script = SCRIPT.replace("FAULT", fault).replace(
        'if __name__ == "__main__"', SPAWNED + '\nif __name__ == "__main__"'
    )
    (folder / "train.py").write_text(script)
    options = ("--auto", "--only", "ddp_bucket_views", "--max-time", "3m")
    return subprocess.run(
        [sys.executable, "-m", "advisor", "apply", *options, *words, "train.py"],
        cwd=folder,
        env=data_parallel.environment(),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.long
@pytest.mark.parametrize("launcher", [TORCHRUN, ()], ids=["torchrun", "mp.spawn"])
def test_what_helps_is_found_in_all_ranks_and_proved(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    found = apply(tmp_path, *launcher)
    assert found.returncode == 0, found.stderr
    assert "gradients as views of DDP's buckets: kept" in found.stderr
    assert "status: kept" in next(tmp_path.glob("advisor-runs/*/plan.yaml")).read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("if step == 60 and torch.distributed.get_rank(): os.kill(os.getpid(), 9)", "rank 1 was ended by SIGKILL"),
        ("if step == 60 and torch.distributed.get_rank(): raise MemoryError('no room')", "rank 1"),
    ],
    ids=["killed", "raised"],
)
def test_a_rank_that_dies_in_the_search_ends_it_by_name(tmp_path: Path, fault: str, told: str) -> None:
    found = apply(tmp_path, *TORCHRUN, fault=fault)
    assert re.search(f"the search in all ranks has ended: {told}", found.stderr), found.stderr
    assert "Traceback" not in found.stderr


class Wrong(Transform):
    """In rank 1 alone, of the model or of how gradients are sent."""

    id = "set_to_none"

    def match(self, training: Training, parameters: Any) -> Match:
        return Match(applies=True)

    def apply(self, training: Training, parameters: Any) -> Undo:
        module = training.roots[0].module.module
        if distributed.get_rank() == 0:
            return Undo([lambda: None])
        hook = module.register_forward_hook(lambda module, args, output: output * 1.5)
        return Undo([hook.remove])


def gates(rank: int, folder: Path) -> Iterator[tuple[str, Any]]:
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 4)))
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(rank))
    training = Training(device=torch.device("cpu"), roots=[RootModule(module=net, name="Net")])
    place = board.of_run(folder, patience_s=60.0)
    gate = AcrossGate(training, None, place)

    def call() -> ReplayedCall:
        return ReplayedCall(training.roots[0], (x,), {}, [torch.ones(2, 4)], (False, torch.bfloat16))

    # Each rank replays by itself, another number of times: a collective inside would not end.
    with alone([net]):
        asked = distributed.get_world_size()  # as nn.SyncBatchNorm does
        for _ in range(2 + rank):
            net(x).sum().backward()
    assert (asked, distributed.get_world_size()) == (1, 2)
    yield "alone", net.module[0].weight.grad.norm().item()
    net.zero_grad()
    gate._gate._calls = [call()]
    wrong = Switch(training, Wrong(), {}, [])
    yield "wrong model", gate.judge(wrong.transform, wrong, "fp32", patience_s=60.0).detail
    wrong.off()

    net = DistributedDataParallel(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 4)))
    training.roots[0].module = net
    for name in ("ddp_bucket_views", "ddp_static_graph", "ddp_buckets", "ddp_fp16_gradients"):
        switch = Switch(training, registry.get(name), {"mb": "0.0001"}, [])

        def on(state: bool, switch: Switch = switch) -> str:
            switch.on() if state else switch.off()
            return ""

        gate._gate._calls = [call()]
        check = gate.judge_sent(switch.transform, on)
        effect = switch.transform.effect(training, None, None)
        yield name, [check.passed, effect.passed]
        net(x).sum().backward()
        yield f"{name} trains", net.module[2].weight.grad.sum().item()
        switch.off()
        net.zero_grad()
    gate._gate._calls = [call()]
    unsent = Switch(training, Unsent(), {}, [])
    check = gate.judge_sent(unsent.transform, lambda state: (unsent.on() if state else unsent.off()) or "")
    yield "unsent", [check.passed, check.detail]


class Unsent(Wrong):
    """Gradients are not sent at all."""

    def apply(self, training: Training, parameters: Any) -> Undo:
        training.roots[0].module.require_backward_grad_sync = False
        return Undo([lambda: setattr(training.roots[0].module, "require_backward_grad_sync", True)])


def test_the_gate_of_several_ranks(tmp_path: Path) -> None:
    found, why = data_parallel.in_two_processes(gates, tmp_path, backend="gloo")
    assert not why
    assert found["alone"][0] != found["alone"][1]
    assert all(detail.startswith("rank 1: ") for detail in found["wrong model"])
    for name in ("ddp_bucket_views", "ddp_static_graph", "ddp_buckets", "ddp_fp16_gradients"):
        assert found[name] == [[True, True]] * 2
        assert found[f"{name} trains"][0] == found[f"{name} trains"][1]
    assert [passed for passed, _ in found["unsent"]] == [False, False]
