"""`apply --goal memory`, as a user starts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from test_several_ranks import advisor

SCRIPT = """
import torch
from torch import nn
torch.set_num_threads(1)
torch.manual_seed(0)
block = lambda: nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
net = nn.Sequential(nn.Conv2d(3, 8, 3), *[block() for _ in range(6)], nn.AdaptiveAvgPool2d(1), nn.Flatten())
optimizer = torch.optim.Adam(net.parameters())
x, y = torch.randn(4, 3, 12, 12), torch.randint(0, 8, (4,))
for _ in range(4000):
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x), y).backward()
    optimizer.step()
"""


@pytest.mark.long
def test_a_step_is_made_to_hold_less_and_its_plan_trains(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("4000", "300"))
    # What it costs in time is this machine's affair: anything is allowed.
    found = advisor(tmp_path, "apply", "--auto", "--goal", "memory", "--max-cost", "99%", "-o", "run", "train.py")
    assert found.returncode == 0, found.stderr
    (item,) = yaml.safe_load((tmp_path / "plan.yaml").read_text())["items"]
    assert (item["transform"], item["status"]) == ("recompute_norms", "kept")
    (verdict,) = json.loads((tmp_path / "run" / "trials.json").read_text())["verdicts"]
    assert verdict["memory_delta_bytes"] < 0
    trained = advisor(tmp_path, "run", "--plan", "plan.yaml", "train.py")
    assert trained.returncode == 0
    assert "training with recompute_norms" in trained.stderr
