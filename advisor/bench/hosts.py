"""`advisor bench hosts`: what a training step costs the host with the bundled kernels in it and without CUDA graphs.

A kernel's row in `bench ops` has its call beside eager's as a bare function. Here both are in their networks, torchvision's, whose modules
cost eager more, and which a captured forward spares; the images are so few and small that the GPU has nothing to do. That is the worst case:
where the GPU bounds the step, or CUDA graphs are kept, none of it shows.
"""

from __future__ import annotations

import copy
import datetime
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from advisor.bench import results, timing
from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode, first_line
from advisor.core.units import counted
from advisor.loop.training import RootModule, Training
from advisor.ops import catalog, dispatch
from advisor.transforms import registry

NETWORKS = (
    "resnet18",
    "resnext50_32x4d",
    "regnet_y_400mf",
    "mobilenet_v3_small",
    "efficientnet_b0",
    "convnext_tiny",
    "densenet121",
    "vgg11",
    "shufflenet_v2_x1_0",
)
BATCH, SIZE = 4, 64
WARMUP, ROUNDS = 5, 40
FILE = "hosts.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRow:
    """One network's step: forward under bf16 autocast, channels_last, loss and backward, no optimizer.

    Attributes:
        plain_ms, advisor_ms: of the host until the step's last call has returned, beginning with an idle GPU; medians of `n` by turns.
        plain_spread, advisor_spread: (p90 - p10) / median.
        ran: calls into the kernels a step, by family.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    layout: str
    plain_ms: float
    advisor_ms: float
    plain_spread: float
    advisor_spread: float
    n: int
    ran: dict[str, int]
    torch: str
    date: str


def run(*, pattern: str, out: Path | None, say: Callable[[str], None]) -> int:
    """Measure each network whose name holds `pattern`; print a line each, and write after each.

    Raises:
        AdvisorError: without a GPU (exit code 5) or torchvision, or when `pattern` matches nothing.
    """
    if not torch.cuda.is_available():
        raise AdvisorError("no benchmark here: no CUDA GPU", exit_code=ExitCode.GPU_REQUIRED)
    chosen = [name for name in NETWORKS if pattern in name]
    if not chosen:
        raise AdvisorError(f"nothing is named like {pattern!r}", expected="part of " + ", ".join(NETWORKS))
    try:
        from torchvision import models
    except (ImportError, RuntimeError) as error:  # the latter of one that was built for another torch
        raise AdvisorError(
            f"the networks are torchvision's, which does not import: {first_line(error)}", fix="pip install torchvision"
        ) from None
    target = out or results.folder() / FILE
    rows = {row["name"]: row for row in results.on_file(target)}
    for number, name in enumerate(chosen):
        say(f"{name}: {number + 1} of {counted(len(chosen), 'network')}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row = measure(name, getattr(models, name)(), device="cuda")
        print(line(storage.to_plain(row)), flush=True)
        rows[name] = storage.to_plain(row)
        order = [*NETWORKS, *rows]
        results.write(target, "hosts", sorted(rows.values(), key=lambda found: order.index(found["name"])))
    return ExitCode.OK


def line(row: Mapping[str, Any]) -> str:
    """What is printed of a network."""
    return (
        f"{row['name']:20} as written {row['plain_ms']:6.2f} ms  with the kernels {row['advisor_ms']:6.2f} ms  "
        f"{row['plain_ms'] / row['advisor_ms']:.2f} x"
    )


def measure(name: str, model: torch.nn.Module, *, device: str) -> HostRow:
    """The row of a network, by turns with a copy of it that has the kernels wherever they are dispatched.

    Raises:
        AdvisorError: when no kernel ran.
    """
    torch._dynamo.reset()
    plain = model.to(device).to(memory_format=torch.channels_last).train()  # type: ignore[call-overload]  # an overload that torch has left out
    ours = copy.deepcopy(plain)
    place(ours, name)
    images = torch.randn(BATCH, 3, SIZE, SIZE, device=device).to(memory_format=torch.channels_last)
    targets = torch.randint(0, 1000, (BATCH,), device=device)

    def step(model: torch.nn.Module) -> None:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), targets)
        loss.backward()

    step(ours)  # which captures it
    dispatch.clear()
    step(ours)
    ran = {family: sum(counter.values()) for family, counter in dispatch.engaged.items() if counter}
    if not ran:
        raise AdvisorError(f"{name}: no kernel ran", exit_code=ExitCode.OWN_FAULT)

    def clear() -> None:
        for model in (plain, ours):
            model.zero_grad(set_to_none=True)

    contenders = {"plain": lambda: step(plain), "advisor": lambda: step(ours)}
    us = timing.host(contenders, warmup=WARMUP, rounds=ROUNDS, before=clear)
    return HostRow(
        name=name,
        shape=tuple(images.shape),
        dtype="bfloat16",
        layout="nhwc",
        plain_ms=us["plain"].median / 1e3,
        advisor_ms=us["advisor"].median / 1e3,
        plain_spread=(us["plain"].p90 - us["plain"].p10) / us["plain"].median,
        advisor_spread=(us["advisor"].p90 - us["advisor"].p10) / us["advisor"].median,
        n=us["advisor"].n,
        ran=ran,
        torch=torch.__version__,
        date=datetime.date.today().isoformat(),
    )


def place(model: torch.nn.Module, name: str) -> list[Any]:
    """Apply every transform that puts kernels into a captured forward, as `advisor apply` would; returns what undoes each."""
    device = next(model.parameters()).device
    training = Training(device=device, roots=[RootModule(module=model, name=name)], optimizers=[])
    found = [registry.get(family.transform) for family in catalog.FAMILIES if family.captured]
    return [transform.apply(training, {}) for transform in found if transform.match(training, {}).applies]
