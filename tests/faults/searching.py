"""A search through the real launcher, on a real script whose candidates are planted faults, in a folder of the user's."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import planted_changes
import pytest
import searches

from advisor.core.findings import Recommendation
from advisor.core.transform_table import ROWS
from advisor.core.verdict import TrialLog, Verdict
from advisor.profiling.beside.command import ScriptCommand
from advisor.trials import budget, records

HERE = Path(__file__).resolve().parent

SCRIPT = """
import os, shutil, sys
import torch
import torch.nn.functional as F
from torch import nn
import planted_changes
from advisor.trials.live import limit

planted_changes.plant()
limit.ALARM_GRACE_S = 0.5
torch.set_num_threads(1)
torch.manual_seed(0)
device = torch.device(sys.argv[1])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 36, 5)

    def forward(self, x):
        return self.fc(F.relu(self.bn(self.conv(x))).flatten(1))


shutil.rmtree("out", ignore_errors=True)
os.makedirs("out")
net = Net().to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
x, y = torch.randn(16, 3, 8, 8, device=device), torch.randint(5, (16,), device=device)
for step in range(1_000_000):
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    if step == 3:
        torch.save(net.state_dict(), "out/epoch.pt")
        with open("history.csv", "a") as history:
            history.write("begun\\n")
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a search left and said."""

    log: TrialLog
    code: int
    said: tuple[str, ...]

    @property
    def verdicts(self) -> dict[str, Verdict]:
        """By transform."""
        return {v.transform: v for v in self.log.verdicts}


def tree(folder: Path) -> dict[str, str]:
    """Hashes of the user's files."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "runs" not in path.parts and "__pycache__" not in path.parts
    }


def search_with(
    folder: Path, monkeypatch: pytest.MonkeyPatch, device: str, *names: str, limit_s: float = 120.0
) -> Outcome:
    """Search with these of `planted_changes.CHANGES`, tried in alphabetical order, `limit_s` and three pairs of blocks each.

    Raises:
        AssertionError: when the user's files are not as before, or a file of the run cannot be read.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), str(HERE.parents[1])]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(budget, "TRIAL_LEAST_S", limit_s)
    monkeypatch.setattr(budget, "TRIAL_SHARE", 0.0)
    for name in names:
        monkeypatch.setitem(ROWS, name, planted_changes.row(name))
    (folder / "train.py").write_text(SCRIPT)
    (folder / "out").mkdir()
    (folder / "out" / "best.pt").write_text("weeks of training")
    (folder / "history.csv").write_text("0,9.9\n")
    before, run = tree(folder), folder / "runs" / "one"
    run.mkdir(parents=True)
    said: list[str] = []
    log, _, code = searches.searched(
        ScriptCommand.parse(["train.py", device]),
        [Recommendation(transform=name, title=name) for name in names],
        None,
        run_dir=run,
        say=said.append,
        time_s=300.0,
        max_pairs=3,
    )
    output = (run / records.OUTPUT_FILE).read_text()
    assert tree(folder) == before, output
    for path in run.rglob("*.json"):
        json.loads(path.read_text())
    assert {v.transform for v in log.verdicts} == set(names), (said, output)
    return Outcome(log, code, tuple(said))
