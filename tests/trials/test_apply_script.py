"""Search, fresh pairs, stack and run through the real launcher, on a real script, with the real transforms."""

import dataclasses
import hashlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import searches
import torch

from advisor.core import storage
from advisor.core.findings import Recommendation
from advisor.core.plan import Plan, PlanHashes, PlanItem
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.launcher import launch
from advisor.trials import planfile, records, run, search

SCRIPT = """
import os, shutil, sys
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
epochs = int(sys.argv[1])


class Items(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        return torch.full((3, 8, 8), float(i % 7)) + torch.arange(64.0).view(8, 8) / 64, i % 5


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8 * 36, 5)

    def forward(self, x):
        return self.fc(F.relu(self.bn(self.conv(x))).flatten(1))


if __name__ == "__main__":
    shutil.rmtree("out", ignore_errors=True)
    os.makedirs("out")
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, foreach=False)
    loader = DataLoader(Items(), batch_size=8, shuffle=True)
    for epoch in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, f"out/epoch{epoch}.pt")
        if epoch:
            os.remove(f"out/epoch{epoch - 1}.pt")
        with open("history.csv", "a") as history:
            history.write(f"{epoch},{loss.item()}\\n")
    print("trained", epoch + 1)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    Path("out").mkdir()
    Path("out/best.pt").write_text("weeks of training")
    Path("history.csv").write_text("0,9.9\n")
    return tmp_path


def tree(folder):
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in folder.rglob("*")
        if p.is_file() and "runs" not in p.parts and "__pycache__" not in p.parts
    }


def environment():
    return {**os.environ, "PYTHONPATH": str(Path(search.__file__).parents[2]), "OMP_NUM_THREADS": "1"}


class Machine:
    """The real launcher with the real script, on a machine whose step times are known: 20 ms, with loader workers 12 ms.

    Every kind of child is started once; a further run of the same arm repeats what that one measured.
    """

    def __init__(self, place):
        self.place, self.plain_tree, self.modes, self.arms = place, tree(place), [], {}

    def __call__(self, command, session, **options):
        self.modes.append(session.mode)
        names = tuple(item.transform for item in session.kept)
        if session.mode != "measure":
            ended = launch(command, session, **options)
        elif names not in self.arms:
            ended = launch(command, session, **options)
            self.arms[names] = ended, storage.load(session.folder / records.MEASURE_FILE, records.Measurement)
        else:
            ended = self.arms[names][0]
        if session.mode == "measure":
            arm = self.arms[names][1]
            assert arm.complete, options["output"].read_text()
            step_us = 12e3 if "loader_workers" in arm.applied else 20e3
            times = tuple(step_us + 10 * (len(self.modes) + i % 3) for i in range(len(arm.step_us)))
            arm = dataclasses.replace(arm, step_us=times, wall_us=times, every_us=times)
            storage.save(session.folder / records.MEASURE_FILE, arm)
        return ended


@pytest.mark.long
def test_a_starved_script_gets_workers_and_keeps_its_files(place):
    machine = Machine(place)
    candidates = [
        Recommendation(transform="loader_workers", parameters={"workers": "2"}, title="workers"),
        Recommendation(transform="cudnn_benchmark", title="benchmark"),
    ]
    run_dir = place / "runs" / "a"
    run_dir.mkdir(parents=True)
    said = []
    log, plan, code = searches.searched(
        ScriptCommand.parse(["train.py", "500"]),
        candidates,
        None,
        run_dir=run_dir,
        say=said.append,
        max_pairs=3,
        launch=machine,
    )
    verdicts = {v.transform: v for v in log.verdicts}
    output = (run_dir / records.OUTPUT_FILE).read_text()
    # A live search hands the workers back, fresh runs settle them, another search goes on with them, the stack ends it.
    assert machine.modes == ["search", *["measure"] * 6, "search", *["measure"] * 4], (said, output)
    assert verdicts["loader_workers"].status == "kept", (verdicts, output)
    assert 0.38 < verdicts["loader_workers"].gain.low < 0.4 < verdicts["loader_workers"].gain.high
    assert verdicts["loader_workers"].numerics.passed
    assert verdicts["cudnn_benchmark"].status == "not applicable"
    assert log.stack.passed, log.stack
    assert log.stack.speedup == pytest.approx(20 / 12, rel=0.01)
    assert code == 0
    assert tree(place) == machine.plain_tree
    names = {Path(name).name for name in log.files_written}
    assert {"best.pt", "history.csv"} <= names

    # The plan trains to the end, and its checkpoint is the plain script's.
    plan_path = run_dir / records.PLAN_FILE
    assert planfile.read(plan_path) == plan
    (place / "runs" / "b").mkdir()
    code = run.run_plan(
        ScriptCommand.parse(["train.py", "2"]), plan_path, plan, run_dir=place / "runs" / "b", say=said.append
    )
    assert code == 0
    spec = importlib.util.spec_from_file_location("trained", place / "train.py")
    trained = importlib.util.module_from_spec(spec)
    sys.argv, before = ["train.py", "0"], sys.argv
    try:
        spec.loader.exec_module(trained)
    finally:
        sys.argv = before
    checkpoint = torch.load("out/epoch1.pt", weights_only=True)
    net = trained.Net()
    assert not any(net.load_state_dict(checkpoint["net"], strict=True))
    torch.optim.Adam(net.parameters(), foreach=False).load_state_dict(checkpoint["optimizer"])


def test_enable_inside_a_script_and_disable(place):
    plan = Plan(script="train.py", argv=(), created="", items=(PlanItem(transform="fused_optimizer", status="kept"),))
    planfile.write(place / "plan.yaml", plan)
    body = SCRIPT.replace("import torch\n", "import torch\nimport advisor\nadvisor.enable('plan.yaml')\n", 1)
    body += (
        "    print('fused', optimizer.param_groups[0]['fused'])\n"
        "    advisor.disable()\n"
        "    print('then', optimizer.param_groups[0]['fused'], type(net).__call__ is torch.nn.Module.__call__)\n"
    )
    Path("own.py").write_text(body)
    done = subprocess.run(
        [sys.executable, "own.py", "1"], capture_output=True, text=True, env=environment(), check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"fused True\nthen (None|False) True", done.stdout), done.stdout
    assert "training with fused_optimizer" in done.stderr
    assert not list(place.glob("**/progress.jsonl"))


@pytest.mark.long
def test_a_plan_for_another_model_trains_plainly_or_refuses(place):
    items = (PlanItem(transform="fused_optimizer", status="kept"),)
    plan = Plan(script="train.py", argv=(), created="", items=items, hashes=PlanHashes(model="of another model"))
    command = ScriptCommand.parse(["train.py", "1"])
    for name, strict, expected in (("lenient", False, 0), ("strict", True, 2)):
        run_dir = place / "runs" / name
        run_dir.mkdir(parents=True)
        said = []
        code = run.run_plan(command, place / "plan.yaml", plan, run_dir=run_dir, strict=strict, say=said.append)
        assert code == expected
        assert "another model" in (run_dir / "progress.jsonl").read_text()
