"""Data-parallel trainings of two processes, for the tests that run them on two CPU processes and on two GPUs.

`trained` trains one small net three times over the same data: with the kernels of every captured family, as PyTorch's own, and in fp64.
"""

from __future__ import annotations

import copy
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import distributed, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from advisor.loop.training import RootModule, Training
from advisor.ops import catalog, dispatch
from advisor.transforms import capture, registry

RANKS = 2
RATE = 0.05


class SEBlock(nn.Module):
    """Squeeze-and-excite, by a name that its transform knows."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.squeeze, self.excite = nn.Conv2d(channels, channels // 2, 1), nn.Conv2d(channels // 2, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.excite(F.relu(self.squeeze(self.pool(x)))))


class PixelNorm(nn.LayerNorm):
    """Over the channels of each pixel, as ConvNeXt has it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Net(nn.Module):
    """A stem, a residual block of a depthwise, a grouped and a 1x1 convolution with a gate, and a head behind other norms.

    `spare` is a layer that no forward calls.
    """

    def __init__(self, channels: int = 16, *, spare: bool = False) -> None:
        super().__init__()
        c = channels
        self.stem, self.bn0 = nn.Conv2d(3, c, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(c)
        self.depthwise, self.bn1 = nn.Conv2d(c, c, 3, padding=1, groups=c, bias=False), nn.BatchNorm2d(c)
        self.grouped, self.bn2 = nn.Conv2d(c, c, 3, padding=1, groups=c // 8, bias=False), nn.BatchNorm2d(c)
        self.gate, self.conv = SEBlock(c), nn.Conv2d(c, c, 1)
        self.full, self.bn3 = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.BatchNorm2d(c)
        self.shortcut = nn.Conv2d(c, c, 1, stride=2, bias=False)
        self.layer_norm, self.group_norm = PixelNorm(c), nn.GroupNorm(2, c)
        self.head = nn.Linear(2 * c, 4)
        self.spare = nn.Linear(8, 8) if spare else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.bn0(self.stem(x))), 2)
        y = self.gate(F.relu(self.bn1(self.depthwise(x))))
        x = F.relu(self.conv(F.relu(self.bn2(self.grouped(y)) + x)))
        x = F.relu(self.bn3(self.full(x)))
        y = F.avg_pool2d(F.silu(self.group_norm(self.layer_norm(x))), 2) + self.shortcut(x)
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(torch.cat([y, x], 1).mean((2, 3)))


def with_kernels(model: nn.Module, device: torch.device, images: torch.Tensor) -> dict[str, str]:
    """Every family's transform put on, as a plan does it; why those do not apply that do not.

    On a CPU, for which no transform matches, the families are put in without asking.
    """
    training = Training(device=device, roots=[RootModule(module=model, name="Net", args=(images,))])
    left: dict[str, str] = {}
    for family in (family for family in catalog.FAMILIES if family.captured):
        transform = registry.get(family.transform)
        match = transform.match(training, {})
        if match.applies or device.type == "cpu":
            transform.apply(training, {})
        else:
            left[family.id] = match.reason
    return left


def batch(rank: int, step: int, size: int, device: torch.device, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(n, 3, size, size, generator=drawn).to(device, memory_format=torch.channels_last)
    return images, torch.randint(0, 4, (n,), generator=drawn).to(device)


def trained(
    device: torch.device,
    *,
    channels: int = 16,
    size: int = 16,
    n: int = 2,
    steps: int = 3,
    half: bool = False,
    accumulate: bool = False,
    synchronised: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """What came of training on this rank's data: how far off both are from fp64, and whether all ranks agree. All numbers and text.

    Kernels run wherever they can, and not only where they are measured to win.

    Args:
        accumulate: two batches a step, the first inside `no_sync`. synchronised: batch norms are SyncBatchNorm.
        options: DistributedDataParallel's own.
    """
    rank = distributed.get_rank()
    torch._dynamo.reset()
    dispatch.clear()
    torch.manual_seed(0)
    net: nn.Module = Net(channels, spare=bool(options.get("find_unused_parameters")))
    if synchronised:
        net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
    net = net.to(device, memory_format=torch.channels_last).train()
    nets = net, copy.deepcopy(net), copy.deepcopy(net).double()
    before = [_vector(twin.parameters()) for twin in nets]
    ids = {"device_ids": [device.index]} if device.type == "cuda" else {}
    ours, plain, exact = (DistributedDataParallel(twin, **ids, **options) for twin in nets)
    losses: list[list[float]] = []

    def steps_of(twin: DistributedDataParallel) -> list[float]:
        found, kind = [], torch.float64 if twin is exact else torch.float32
        optimizer = torch.optim.SGD(twin.parameters(), lr=RATE, momentum=0.9)
        for step in range(steps):
            optimizer.zero_grad()
            for part in range(1 + accumulate):
                images, targets = batch(rank, 2 * step + part, size, device, n)
                with twin.no_sync() if accumulate and part == 0 else nullcontext():
                    with torch.autocast(device.type, torch.bfloat16, enabled=half and twin is not exact):
                        outputs = twin(images.to(kind))
                    loss = F.cross_entropy(outputs.to(kind), targets)
                    loss.backward()
            found.append(loss.item())
            optimizer.step()
        return found

    with dispatch.everything():
        left = with_kernels(ours, device, batch(rank, 0, size, device, n)[0])
        for twin in (ours, plain, exact):
            losses.append(steps_of(twin))
    moved = [_vector(twin.parameters()) - start for twin, start in zip(nets, before, strict=True)]
    layer = capture.current(ours)
    reports = layer.reports if layer is not None else {}
    return {
        "error": float((moved[0] - moved[2]).norm() / moved[2].norm()),
        "plain_error": float((moved[1] - moved[2]).norm() / moved[2].norm()),
        "buffers": _shift(nets[0], nets[2]),
        "plain_buffers": _shift(nets[1], nets[2]),
        "same_on_all_ranks": _agreed(nets[0]),
        "ranks_saw_other_data": _differs(losses[0][0], device),
        "losses": losses,
        "left": left,
        "graphs": layer.graphs if layer is not None else 0,
        "matched": {family: list(report.matched) for family, report in reports.items() if report.matched},
        "unmatched": {family: dict(report.unmatched) for family, report in reports.items() if report.unmatched},
        "engaged": {family: sum(counter.values()) for family, counter in dispatch.engaged.items() if counter},
        "fell_back": {family: dict(counter) for family, counter in dispatch.fell_back.items() if counter},
    }


def _vector(tensors: Any) -> torch.Tensor:
    return torch.cat([t.detach().double().flatten() for t in tensors])


def _shift(net: nn.Module, exact: nn.Module) -> float:
    """As tests/kernels/test_networks_gpu.py has it: a mean may be what cancellation has left of values of size one."""
    found, right = (_vector(b for b in twin.buffers() if b.is_floating_point()) for twin in (net, exact))
    return float((found - right).norm() / (right.norm() + right.numel() ** 0.5))


def _agreed(net: nn.Module) -> bool:
    """Whether all ranks have the very same weights."""
    mine = _vector(net.parameters())
    first = mine.clone()
    distributed.broadcast(first, 0)
    same = torch.tensor([float(torch.equal(mine, first))], device=mine.device)
    distributed.all_reduce(same, distributed.ReduceOp.MIN)
    return bool(same.item())


def _differs(value: float, device: torch.device) -> bool:
    both = [torch.zeros(1, dtype=torch.float64, device=device) for _ in range(RANKS)]
    distributed.all_gather(both, torch.tensor([value], dtype=torch.float64, device=device))
    return both[0].item() != both[1].item()


FOR_EVER_S = 10_000.0
START_S = 120  # two imports of torch, on a machine that does something else too
Work = Callable[[int, Path], Iterator[tuple[str, Any]]]


def _process(rank: int, work: Work, folder: str, backend: str, ranks: int, limit_s: float | None) -> None:
    limit_s = FOR_EVER_S if limit_s is None else limit_s
    faulthandler.dump_traceback_later(max(1.0, limit_s - 5), exit=False, file=sys.stderr)
    torch.set_num_threads(1)
    distributed.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=limit_s)
    )
    Path(folder, f"{rank}.begun").touch()
    for name, found in work(rank, Path(folder)):
        file = Path(folder, f"{rank}-{name}.part")
        file.write_text(json.dumps(found))
        file.rename(file.with_suffix(".json"))
    distributed.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


@contextmanager
def _killed(context: Any) -> Iterator[None]:
    try:
        yield
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()


def in_two_processes(
    work: Work, folder: Path, *, backend: str, limit_s: float | None = None
) -> tuple[dict[str, list[Any]], str]:
    """`in_processes`, in two."""
    return in_processes(work, folder, RANKS, backend=backend, limit_s=limit_s)


def in_processes(
    work: Work, folder: Path, ranks: int, *, backend: str, limit_s: float | None = None
) -> tuple[dict[str, list[Any]], str]:
    """What `work(rank, folder)` yields by name, one entry a rank; and why it ended before its end, empty where it did not.

    All processes are killed `limit_s` after all have begun: what each was doing is on its stderr by then. To begin they have START_S.
    None leaves it to pytest to end what hangs.
    """
    context = mp.spawn(_process, (work, str(folder), backend, ranks, limit_s), nprocs=ranks, join=False)
    assert context is not None
    deadline, begun, why = time.monotonic() + START_S, False, ""
    with _killed(context):
        try:
            while not context.join(timeout=0.2):
                if not begun and all((folder / f"{rank}.begun").exists() for rank in range(ranks)):
                    deadline, begun = time.monotonic() + (limit_s or 0.0), True
                if limit_s is not None and time.monotonic() >= deadline:
                    why = f"the processes hung: killed after {limit_s:g} s" if begun else f"not begun after {START_S} s"
                    break
        except Exception as error:
            why = str(error)
    found: dict[str, list[Any]] = {}
    for file in sorted(folder.glob("0-*.json")):
        name = file.stem[2:]
        files = [folder / f"{rank}-{name}.json" for rank in range(ranks)]
        if all(other.exists() for other in files):
            found[name] = [json.loads(other.read_text()) for other in files]
    return found, why


def environment() -> dict[str, str]:
    """For a child: this checkout, and nothing of an advisor that may run this process."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ADVISOR_")}
    return {**inherited, "PYTHONPATH": str(Path(__file__).parents[1]), "COLUMNS": "120", "ADVISOR_LEDGER": os.devnull}
