"""Many trials of one kind in one running training: how often chance is kept, and how often a small gain is found.

Imported by the script below too, whose process tries the changes; they are planted in the registry beside advisor's own.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import planted_changes
import pytest
import torch

from advisor.core.findings import Recommendation, Semantics
from advisor.loop.session import Session
from advisor.loop.training import Training
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.launcher import launch
from advisor.transforms.base import Match, Transform, Undo
from advisor.trials import records

HERE = Path(__file__).resolve().parent
# The device, not the host, bounds a step of this: about 1.5 ms on an H200 by its bytes and flops.
SCRIPT = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
import repeated_trials

kind, count, share, device, size = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), torch.device(sys.argv[4]), int(sys.argv[5])
repeated_trials.plant(kind, count)
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.wide = nn.Conv2d(3, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3)
        self.fc = nn.Linear(64, 10)

    def forward(self, x):
        repeated_trials.PAUSE.take(x.device)
        return self.fc(F.relu(self.wide(F.relu(self.bn(self.conv(x))))).mean((2, 3)))


net = Net().to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
x, y = torch.randn(64, 3, size, size, device=device), torch.randint(10, (64,), device=device)


def step():
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()


repeated_trials.PAUSE.calibrate(step, share, device)
while True:
    step()
"""


class Pause:
    """Time on the device that each step loses, until the change that was tried last is on: what that one gains, each anew."""

    def __init__(self) -> None:
        self.seconds, self.cycles = 0.0, 0
        self.latest, self.on = "", set[str]()

    def calibrate(self, step: Callable[[], object], share: float, device: torch.device) -> None:
        """The pause is this share of a step that has it, by the median of nine times ten steps without it."""
        _seconds(step, device)
        plain = sorted(_seconds(step, device) for _ in range(9))[4]
        self.seconds = plain * share / (1.0 - share)
        if device.type == "cuda":
            probe = 10_000_000
            self.cycles = round(self.seconds * probe / _seconds(lambda: torch.cuda._sleep(probe), device))

    def take(self, device: torch.device) -> None:
        """In each forward."""
        if not self.seconds or self.latest in self.on:
            return
        if device.type == "cuda":
            torch.cuda._sleep(self.cycles)
        else:
            time.sleep(self.seconds)


PAUSE = Pause()


def _seconds(work: Callable[[], object], device: torch.device, times: int = 10) -> float:
    """What one of so many, back to back, takes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / times


class Nothing(Transform):
    """Changes nothing at all."""

    semantics = Semantics.EXACT

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        return Match(applies=bool(training.roots), reason="no model", sites=tuple(r.name for r in training.roots))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        return Undo()


class Spares(Nothing):
    """Takes the pause away, which is there again when the next of its kind is looked at."""

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        PAUSE.latest = self.id
        return super().match(training, parameters)

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        PAUSE.on.add(self.id)
        undo = Undo()
        undo.push(lambda: PAUSE.on.discard(self.id))
        return undo


def names(kind: str, count: int) -> tuple[str, ...]:
    """Of that many changes of a kind: nothing, or spares."""
    return tuple(f"{kind}_{number:03}" for number in range(count))


def plant(kind: str, count: int) -> None:
    """From here on the registry knows them."""
    planted_changes.register(names(kind, count), {"nothing": Nothing, "spares": Spares}[kind])


@dataclass(frozen=True, slots=True)
class Outcome:
    """How many of so many trials ended how, and what the script wrote."""

    statuses: Counter[str]
    gains: tuple[float, ...]
    output: str


def tried(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    count: int,
    *,
    share: float = 0.0,
    device: str = "cuda",
    size: int = 80,
) -> Outcome:
    """That many trials of the kind, each as a search makes it, one behind the other in one process. `share`: what one spares."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    (folder / "train.py").write_text(SCRIPT)
    command = ScriptCommand.parse(["train.py", kind, str(count), str(share), device, str(size)])
    wanted = names(kind, count)
    session = Session(
        mode="search",
        run_dir=str(folder / "run"),
        script=command.name,
        argv=command.arguments,
        candidates=tuple(Recommendation(transform=name, title=name) for name in wanted),
    )
    launch(command, session, timeout_s=6.0 * count + 100.0, output=folder / "output.log")
    verdicts = [v for v in records.verdicts(session.folder) if v.transform in wanted]
    gains = tuple(v.timing.numbers.get("gain", 0.0) for v in verdicts if v.timing is not None)
    return Outcome(Counter(v.status for v in verdicts), gains, (folder / "output.log").read_text())
