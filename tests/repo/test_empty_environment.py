"""The wheel in an environment with nothing but its declared dependencies: there each command of the README does what it says.

The dependencies are those that the wheel's own metadata names, and what they name in turn, as links into the environment of the
tests: what nobody declares is really absent, and nothing is fetched.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from installed import install
from packaging.requirements import Requirement

REPO = Path(__file__).resolve().parents[2]
README = (REPO / "README.md").read_text(encoding="utf-8")
# Adam tensor by tensor, over many small ones. What a fused one gains is planted in the step times that verdicts rest on: on a loaded machine
# real ones decide one way or the other.
SCRIPT = """
import argparse, dataclasses, os, sys
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.01)
lr = parser.parse_args().lr
torch.manual_seed(0)
torch.set_num_threads(1)
hidden = [layer for _ in range(20) for layer in (nn.Linear(16, 16), nn.ReLU())]
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), *hidden, nn.Linear(16, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=lr, foreach=False)
def planted(step_times):
    def times(boundaries):
        found, step_us = step_times(boundaries), 15e3 if optimizer.param_groups[0].get("fused") else 40e3
        return dataclasses.replace(found, wall_us=tuple(step_us + 9 * (i % 30) for i in range(len(found.wall_us))), event_us=())
    return times
for name in ("advisor.trials.live.blocks", "advisor.trials.live.driver", "advisor.trials.measure"):
    if name in sys.modules:
        sys.modules[name].step_times = planted(sys.modules[name].step_times)
images, labels = torch.randn(64, 1, 8, 8), torch.randint(0, 10, (64,))
for step in range(int(os.environ.get("STEPS", 10**6))):
    at = step % 8 * 8
    loss = nn.functional.cross_entropy(model(images[at : at + 8]), labels[at : at + 8])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained", lr)
"""
# The search is for the change that is planted, and no other.
SETTINGS = """
[tool.advisor.apply]
only = ["fused_optimizer"]
max-pairs = 3
"""
# What measuring this machine would find, for seconds in each command: beside other tests it would trust no rate, and keep none.
KNOWN = """
from dataclasses import replace
from advisor.profiling.machine import environment
rates = {"copy_gbps": 10.0, "matrix_tflops": {"fp32": 0.1, "bf16": 0.4}}
environment.keep(replace(environment.host_facts(), **rates, rates_provenance=environment.MEASURED))
"""
# Commands that start no script, one after the other in one process: what each of them imports, one of them does.
SEVERAL = """
import contextlib, io, json, sys
from advisor.cli.main import cli
said = []
for words in json.loads(sys.argv[1]):
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream):
        try:
            code = cli.main(words, prog_name="advisor")
        except SystemExit as ended:
            code = ended.code
    said.append((code or 0, stream.getvalue()))
print(json.dumps(said))
"""
# What the README names, run in this order. `{profiled}` and `{applied}` are run folders.
COMMANDS: dict[str, tuple[tuple[str, ...], int, str]] = {
    # command of the README: (what is typed, exit code, a part of what is said)
    "advisor doctor": (("doctor",), 0, "torch"),
    "advisor recommend RUN": (("recommend", "{profiled}"), 0, "train.py"),
    "advisor report RUN": (("report", "{applied}"), 0, "fused optimizer"),
    "advisor conv RUN": (("conv", "{profiled}"), 0, "No convolution was traced"),
    "advisor plan show": (("plan", "show"), 0, "fused_optimizer"),
    "advisor repro RUN": (("repro", "{profiled}"), 0, "aten::"),
    "advisor compare A B": (("compare", "{profiled}", "{applied}"), 0, "step"),
    "advisor runs": (("runs",), 0, "train-"),
    "advisor rules list": (("rules", "list"), 0, "optimizer-unfused"),
    "advisor rules metrics": (("rules", "metrics"), 0, "optimizer_fused"),
    "advisor rules show": (("rules", "show", "optimizer-unfused"), 0, "fused"),
    "advisor rules test": (("rules", "test"), 0, "cases"),
    "advisor rules lint": (("rules", "lint"), 0, ""),
    "advisor kernels list": (("kernels", "list"), 0, "conv3x3"),
    "advisor kernels verify": (("kernels", "verify"), 5, "GPU"),
    "advisor bench ops": (("bench", "ops"), 5, "GPU"),
    "advisor bench models": (("bench", "models"), 5, "GPU"),
    "advisor bench real": (("bench", "real", "."), 2, "no runner in"),
    "advisor bench hosts": (("bench", "hosts"), 5, "GPU"),
    "advisor bench scaling": (("bench", "scaling"), 5, "GPU"),
    "advisor bench cupy": (("bench", "cupy"), 2, "CuPy"),
    "advisor bench tune": (("bench", "tune"), 5, "GPU"),
    "advisor bench conv": (("bench", "conv"), 5, "GPU"),
    "advisor runs clean": (("runs", "clean", "--keep", "1", "--yes"), 0, ""),
}
QUICK_START = (
    "advisor profile train.py --lr 0.1",
    "advisor apply --auto train.py --lr 0.1",
    "advisor run train.py --lr 0.1",
)
# Forms of the three with what may be left away, and what other tests run.
ELSEWHERE = {
    "advisor profile SCRIPT [ARGS]": QUICK_START[0],
    "advisor apply [--auto] [SCRIPT [ARGS]]": QUICK_START[1],
    "advisor run [--plan PLAN] [SCRIPT [ARGS]]": QUICK_START[2],
    "advisor run": QUICK_START[2],
    "advisor apply --plan PLAN [SCRIPT [ARGS]]": "advisor apply --plan last",
    "advisor profile --trace FILE": "tests/unit/profiling/after/test_kineto.py",
    "advisor try --change ID SCRIPT": "tests/unit/cli/test_commands.py",
    "advisor try --patch FILE SCRIPT": "tests/unit/trials/test_patched.py",
    "advisor apply --plan last": "",  # by the test of the quick start
    "advisor run --gpus N SCRIPT": "tests/integration/test_several_ranks.py",
    "advisor apply --gpus N SCRIPT": "tests/integration/test_several_ranks.py",
    "advisor memory SCRIPT": "tests/integration/test_less_memory.py",
    "advisor scale RUN": "tests/unit/cli/test_commands.py",
    **dict.fromkeys(
        (f"advisor explain {what}" for what in ("RULE", "CHANGE", "RUN")), "tests/unit/cli/test_commands.py"
    ),
    "advisor undo": "tests/unit/cli/test_commands.py",
    "make demo": "tests/repo/test_demo.py",  # and .ci/run, as it stands
    "make test": ".ci/run",
    "pip install cnn-advisor": "",
    "pip install 'cnn-advisor[cuda13]'": "",
    "pip install .": "tests/installed.py",  # its wheel, with what it declares
    "pip install '.[cuda13]'": "",
    "pip install -e '.[test]'": "Makefile",
}


def named_in(page: str) -> Iterator[str]:
    """The commands of a page: a line each in its blocks, and those in its text; of `a|b` each."""
    for block in re.findall(r"```sh\n(.*?)```", page, re.DOTALL):
        yield from (line.split("  #")[0].split(" # ")[0].strip() for line in block.splitlines() if line.strip())
    for words in re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page, flags=re.DOTALL)):
        if not re.match(r"(advisor|pip) [a-z]|make (demo|test)$", words):
            continue
        *first, last = words.split(" ")
        yield from (" ".join((*first, one)) for one in last.split("\\|"))


def needed(requirements: Iterable[str]) -> dict[str, metadata.Distribution]:
    """What these requirements need here, and what that needs: by name."""
    found: dict[str, metadata.Distribution] = {}
    waiting = [(Requirement(text), "") for text in requirements]
    while waiting:
        wanted, _ = waiting.pop()
        if wanted.name.lower() in found or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
            continue
        distribution = metadata.distribution(wanted.name)
        assert wanted.specifier.contains(distribution.version, prereleases=True), wanted
        found[wanted.name.lower()] = distribution
        waiting += [(Requirement(text), wanted.name) for text in distribution.requires or ()]
    return found


def link(distributions: Iterable[metadata.Distribution], folder: Path) -> None:
    """Put their modules and metadata into `folder`."""
    for distribution in distributions:
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            target = folder / top
            if not target.exists():
                target.symlink_to(Path(str(distribution.locate_file(top))).resolve())


class Installed:
    """An environment with the wheel and what it declares, and a folder to work in."""

    def __init__(self, wheel: Path, folder: Path) -> None:
        self.scripts, packages = install(wheel, folder / "environment")
        (record,) = metadata.distributions(name="cnn-advisor", path=[str(packages)])
        link(needed(record.requires or ()).values(), packages)
        self.pytest = folder / "pytest"
        self.pytest.mkdir()
        link(needed(["pytest"]).values(), self.pytest)
        self.home = folder / "home"
        self.home.mkdir()
        (self.home / "train.py").write_text(SCRIPT)
        (self.home / "pyproject.toml").write_text(SETTINGS)

    def __call__(self, *words: str, code: int = 0, **variables: str) -> str:
        """What a program of the environment says, to stdout and to stderr."""
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ADVISOR"))}
        done = subprocess.run(
            [str(self.scripts / words[0]), *words[1:]],
            cwd=self.home,
            env={**kept, "COLUMNS": "160", **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        said = done.stdout + done.stderr
        assert done.returncode == code, said
        assert "Traceback" not in said
        return said

    def runs(self, holding: str) -> list[Path]:
        return sorted((self.home / "advisor-runs").glob(f"*/{holding}"))


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    (wheel,) = built.glob("*.whl")
    return Installed(wheel, tmp_path_factory.mktemp("empty"))


def test_every_command_of_the_readme_is_known_here() -> None:
    known = {*QUICK_START, *COMMANDS, *ELSEWHERE}
    assert sorted(set(named_in(README)) - known) == []
    assert sorted(known - set(named_in(README))) == []
    for place in ELSEWHERE.values():
        assert not place or place in known or (REPO / place).is_file()
    assert "make test\n" in (REPO / ".ci" / "run").read_text()
    assert '".[test]"' in (REPO / "Makefile").read_text()


def test_what_nobody_declares_is_not_needed_by_what_is() -> None:
    assert "pytest" not in needed(["torch"])
    assert {"numpy", "torch", "typing-extensions"} <= set(needed(["numpy", "torch"]))


@pytest.mark.slow
def test_the_environment_is_empty_but_for_what_is_declared(installed: Installed) -> None:
    code = "from importlib.util import find_spec as f; print([n for n in {names} if f(n)])"
    said = installed("python", "-c", code.format(names=("numpy", "torch", "pytest", "timm", "hypothesis", "packaging")))
    assert said.strip() == "['numpy', 'torch']"


@pytest.mark.slow
@pytest.mark.timeout(900)  # 60 s of one core, and as much more as others take of it
def test_the_quick_start_and_every_other_command(installed: Installed) -> None:
    """In one test, because each goes on from what the ones before have left."""
    assert all(command in README for command in QUICK_START)
    profile, apply, run = (command.split() for command in QUICK_START)
    installed("python", "-c", KNOWN)
    installed(*profile)
    (findings,) = installed.runs("findings.json")
    assert '"fused_optimizer"' in findings.read_text()
    assert "Proved: " in installed(*apply)
    (trials,) = installed.runs("trials.json")
    log = json.loads(trials.read_text())
    log = log.get("data", log)
    assert "fused_optimizer" in [v["transform"] for v in log["verdicts"] if v["status"] == "kept"]
    assert log["stack"]["passed"] is True
    trained = installed(*run, STEPS="20")
    assert "training with fused_optimizer" in trained
    assert "trained 0.1" in trained
    (profiled,) = [path.parent for path in installed.runs("profile.json") if path.parent != trials.parent]
    assert "Proved" in installed("advisor", "apply", "--plan", "last")
    typed = [
        [word.format(profiled=profiled, applied=trials.parent) for word in words] for words, _, _ in COMMANDS.values()
    ]
    found = json.loads(installed("python", "-c", SEVERAL, json.dumps(typed)))
    for words, (code, said), (_, expected, part) in zip(typed, found, COMMANDS.values(), strict=True):
        assert code == expected, (words, said)
        assert part.lower() in said.lower(), words
        assert "Traceback" not in said


@pytest.mark.slow
def test_the_pytest_plugin_beside_pytest_alone(installed: Installed) -> None:
    (installed.home / "test_training.py").write_text(
        """
import torch
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(read):
    def once():
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).sum()
        loss.backward()
        optimizer.step()
        if read:
            loss.item()
    return once
def test_right(perf):
    perf.measure(step(False)).assert_no_host_sync()
def test_planted(perf):
    perf.measure(step(True)).assert_no_host_sync()
"""
    )
    said = installed("python", "-m", "pytest", "-q", "test_training.py", code=1, PYTHONPATH=str(installed.pytest))
    assert "1 failed, 1 passed" in said
    assert "host synchronisations: 1 a step" in said
