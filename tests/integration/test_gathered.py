"""A real run on a CPU: what rules ask for is gathered, so that they are judged and not left 'not evaluated'."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest

from advisor import resources, rules
from advisor.analysis import metrics
from advisor.core.environment import Environment
from advisor.core.findings import Outcome
from advisor.core.metrics import MetricTable
from advisor.core.profile import StepProfile
from advisor.loop.session import Session
from advisor.profiling.after.assemble import assemble
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.launcher import launch

MACHINE = Environment(
    device="cpu", copy_gbps=10.0, matrix_tflops={"fp32": 0.1, "bf16": 0.4}, cpu_count=2, torch_compile=True
)

# Two breaks in a function that is compiled once, a block that runs again in backward, and a first step that stops to think.
SCRIPT = """
import sys, time, types
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
torch.set_num_threads(1)
sys.modules["cupy"] = types.ModuleType("cupy")
class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4 * 36, 5)
    def forward(self, x):
        x = x.relu()
        torch._dynamo.graph_break()
        x = self.fc(x.flatten(1))
        torch._dynamo.graph_break()
        return x * 2
body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
head = torch.compile(Head(), backend="eager")
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.05)
for step in range(10_000):
    optimizer.zero_grad()
    out = head(checkpoint(body, torch.randn(8, 1, 8, 8), use_reentrant=False))
    if not step:
        time.sleep(1.0)
    nn.functional.cross_entropy(out, torch.randint(0, 5, (8,))).backward()
    optimizer.step()
"""


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> tuple[StepProfile, MetricTable]:
    folder = tmp_path_factory.mktemp("gathered")
    (folder / "train.py").write_text(textwrap.dedent(SCRIPT))
    session = Session(mode="profile", run_dir=str(folder / "run"), script="train.py", warmup=5, steps=6)
    before = Path.cwd()
    os.chdir(folder)
    try:
        words = ScriptCommand.parse(("train.py",))
        ended = launch(words, session, environment={"OMP_NUM_THREADS": "1"}, output=folder / "output.txt")
    finally:
        os.chdir(before)
    assert ended.stopped_by_advisor, (folder / "output.txt").read_text()
    profile = assemble(folder / "run", MACHINE)
    return profile, metrics(profile)


def test_metrics_are_known(gathered: tuple[StepProfile, MetricTable]) -> None:
    profile, table = gathered
    assert profile.complete, profile.notes
    known = {name: table[name].value for name in ("graph_breaks", "recompiles", "uses_cupy", "checkpointing")}
    assert known == {"graph_breaks": 2.0, "recompiles": 0.0, "uses_cupy": True, "checkpointing": True}
    assert table["torch_compile_available"].value is True
    assert table["half_rate_ratio"].value == pytest.approx(4.0)
    assert table.number("first_step_ratio")
    assert table["empty_cache_calls"].reason == "needs a CUDA GPU"


def test_rules_that_ask_for_them_are_judged(gathered: tuple[StepProfile, MetricTable]) -> None:
    profile, table = gathered
    findings = {f.rule: f for f in rules.evaluate(rules.load([resources.rules_dir()]), table, profile)}
    assert findings["graph-breaks"].outcome is Outcome.FIRED
    assert findings["recompiles"].outcome is Outcome.QUIET
    assert findings["slow-first-step"].outcome is not Outcome.UNKNOWN
    for rule in ("cupy-without-pool", "checkpointing-with-memory-to-spare"):
        # On a CPU they want only what a GPU has to tell.
        assert findings[rule].missing
        assert not {"uses_cupy", "checkpointing"} & {text.partition(":")[0] for text in findings[rule].missing}
