"""The whole chain as a user runs it, on a CPU: the command line, real processes, a real script, files on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import yaml
from clocks import until

ROOT = Path(__file__).resolve().parents[2]

# The optimizer's loop over many small parameters, a convolution and a batch norm are there to be found. What a fused optimizer
# gains is planted in the step times that verdicts rest on: on a loaded machine real ones decide one way or the other.
SCRIPT = """
import sys
import torch
from torch import nn
torch.set_num_threads(1)
epochs = int(sys.argv[1])
torch.manual_seed(0)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4 * 36, 5)
        self.scales = nn.ParameterList([nn.Parameter(torch.full((5,), 1 / 40)) for _ in range(40)])
    def forward(self, x):
        x = self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))
        return x * torch.stack(tuple(self.scales)).sum(0)
net = Net()
if "--resume" in sys.argv:
    net.load_state_dict(torch.load("net.pt"), strict=True)
    print("resumed")
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, foreach=False)
def planted(step_times):
    import dataclasses
    def times(boundaries):
        found, step_us = step_times(boundaries), 15e3 if optimizer.param_groups[0].get("fused") else 40e3
        return dataclasses.replace(found, wall_us=tuple(step_us + 9 * (i % 30) for i in range(len(found.wall_us))), event_us=())
    return times
for name in ("advisor.trials.live.blocks", "advisor.trials.live.driver", "advisor.trials.measure"):
    if name in sys.modules:
        sys.modules[name].step_times = planted(sys.modules[name].step_times)
x, y = torch.randn(64, 8, 3, 8, 8), torch.randint(0, 5, (64, 8))
for epoch in range(epochs):
    for images, labels in zip(x, y):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
    torch.save(net.state_dict(), "net.pt")
print("trained", epochs)
"""

LOOP = """
import os, sys
import torch
net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(8, 4)).square().mean().backward()
        optimizer.step()
"""


# With cores to spare a search starts each process while the one before it runs; with two, as in CI, it does not. It is this machine for all that,
# whose rates are known.
MANY_CORES = """
from advisor.cli.main import main
from advisor.profiling.machine import environment, hostload
machine = environment.probe()
environment.probe = lambda: machine
hostload.cpu_count = lambda: 8
main()
"""


def advisor(
    folder: Path, *words: str, start: tuple[str, str] = ("-m", "advisor"), **variables: str
) -> subprocess.CompletedProcess[str]:
    """`advisor words` in `folder`."""
    return subprocess.run(
        [sys.executable, *start, *words],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def python(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment(**variables), capture_output=True, text=True
    )


def environment(**variables: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("ADVISOR_")}
    own = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100", "ADVISOR_LEDGER": os.devnull}
    return {**inherited, **own, **variables}


def write(folder: Path, text: str, name: str = "train.py") -> None:
    (folder / name).write_text(textwrap.dedent(text))


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "advisor-runs" not in path.parts and "__pycache__" not in path.parts
    }


def last_line(text: str) -> str:
    return text.strip().splitlines()[-1]


@pytest.fixture(scope="module")
def proved(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, subprocess.CompletedProcess[str], tuple[dict[str, str], dict[str, str]]]:
    """A folder in which the script was profiled, then applied with no script named; and its files before that and after."""
    folder = tmp_path_factory.mktemp("chain")
    write(folder, SCRIPT)
    (folder / "net.pt").write_text("weeks of training")
    before = tree(folder)
    profiled = advisor(folder, "profile", "-o", "first", "train.py", "500")
    assert profiled.returncode == 0, profiled.stderr
    (folder / "advisor-runs").mkdir()
    (folder / "first").rename(folder / "advisor-runs" / "first")
    (folder / "net.pt").write_text("weeks of training")
    applied = advisor(folder, "apply", "--auto", "--only", "fused_optimizer", "--max-pairs", "3", start=("-c", MANY_CORES),
                      ADVISOR_LEDGER=str(folder.with_name(f"{folder.name}-ledger.jsonl")))  # fmt: skip
    return folder, applied, (before, tree(folder))


def search_of(folder: Path) -> Path:
    """The search's run folder: later runs with its plan keep a copy of the plan, not of the trials."""
    (trials,) = (folder / "advisor-runs").glob("*/trials.json")
    return trials.parent


def test_profile_finds_what_is_slow_and_report_and_recommend_say_so_again(proved) -> None:
    folder, _, _ = proved
    saved = json.loads((folder / "advisor-runs/first/profile.json").read_text())
    profile = saved.get("data", saved)
    assert profile["complete"], profile["notes"]
    assert profile["step_us"]["n"] == 20
    assert profile["argv"] == ["500"]
    modes = {path.name: path.stat().st_mode for path in (folder / "advisor-runs/first").iterdir() if path.is_file()}
    assert len(set(modes.values())) == 1, modes
    recommended = advisor(folder, "recommend", "advisor-runs/first")
    assert recommended.returncode == 0, recommended.stderr
    assert "fused_optimizer" in recommended.stdout
    text = advisor(folder, "report", "advisor-runs/first").stdout
    assert "optimizer-loops-over-tensors" in text
    assert f"train.py:{SCRIPT[: SCRIPT.index('optimizer.step')].count(chr(10)) + 1}" in text
    assert advisor(folder, "report", "advisor-runs/first", "--html", "again.html").returncode == 0
    page = (folder / "again.html").read_text()
    assert "<html" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    (folder / "again.html").unlink()


def test_apply_keeps_a_planted_gain_and_leaves_the_files_alone(proved) -> None:
    folder, applied, (before, after) = proved
    assert applied.returncode == 0, applied.stderr
    told = applied.stderr
    assert told.index("put back afterwards (exceptions: `advisor apply --help`)") < told.index("trying"), told
    run = search_of(folder)
    plan = yaml.safe_load((run / "plan.yaml").read_text())
    assert [(item["transform"], item["status"]) for item in plan["items"]] == [("fused_optimizer", "kept")], plan
    assert plan["speedup"].startswith(("2.65×", "2.66×")), plan["speedup"]
    saved = json.loads((run / "trials.json").read_text())
    verdict = saved.get("data", saved)["verdicts"][0]
    assert 0.6 < verdict["gain"]["low"] <= verdict["gain"]["high"] < 0.65
    assert len(verdict["blocks"]["off_us"]) == 3
    assert verdict["predicted"] is not None
    assert all(verdict[check]["passed"] for check in ("effect", "numerics", "timing"))
    assert (
        "Fused optimizer" in (run / "report.html").read_text() or "fused optimizer" in (run / "report.html").read_text()
    )
    assert after.pop("plan.yaml")  # beside the script, as the README says
    assert after == before
    told, whole = (
        json.loads(line) for line in (folder.with_name(f"{folder.name}-ledger.jsonl")).read_text().splitlines()
    )
    assert (told["transform"], told["status"]) == ("fused_optimizer", "kept")
    assert told["predicted"]["high"] == pytest.approx(verdict["predicted"]["high"])
    assert (whole["proved"], whole["speedup"]) == (["fused_optimizer"], plan["speedup"])


@pytest.mark.long
def test_a_search_that_is_killed_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    """At random moments of a search with a process waiting for its turn: the supervisor alone, as the system kills it."""
    write(tmp_path, SCRIPT)
    (tmp_path / "net.pt").write_text("weeks of training")
    before, chance = tree(tmp_path), random.Random(146)
    for _ in range(6):
        words = ("apply", "--auto", "--only", "fused_optimizer", "train.py", "500")
        supervisor = subprocess.Popen(
            [sys.executable, "-c", MANY_CORES, *words], cwd=tmp_path, env=environment(),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        time.sleep(chance.uniform(6, 30))
        supervisor.kill()
        supervisor.wait()
        until(lambda: not processes_in(tmp_path))
        recovered = advisor(tmp_path, "doctor", "--recover")
        assert recovered.returncode == 0, recovered.stderr
        assert tree(tmp_path) == before


def processes_in(folder: Path) -> list[str]:
    """Command lines of the processes whose working directory this is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found.append((process / "cmdline").read_text())
    return found


def test_run_and_enable_train_with_the_plan_and_the_checkpoint_is_the_plain_scripts(proved) -> None:
    folder, _, _ = proved
    ran = advisor(folder, "run", "train.py", "2")
    assert (ran.returncode, last_line(ran.stdout)) == (0, "trained 2"), ran.stderr
    assert "training with fused_optimizer" in ran.stderr
    text = SCRIPT + 'print("fused", optimizer.param_groups[0].get("fused"))\n'
    write(folder, f'import advisor\nadvisor.enable(r"{search_of(folder) / "plan.yaml"}")\n' + text, "own.py")
    with_plan = python(folder, "own.py", "1")
    assert last_line(with_plan.stdout) == "fused True", with_plan.stderr
    # Switched off it is the plain script, and nothing is said.
    plain = python(folder, "own.py", "1", "--resume", ADVISOR_DISABLE="1")
    assert (plain.returncode, plain.stdout.split()) == (0, ["resumed", "trained", "1", "fused", "None"]), plain.stderr
    assert plain.stderr == ""


@pytest.mark.long
def test_a_plan_of_another_machine_is_proved_here_without_a_search(proved, tmp_path: Path) -> None:
    folder, _, (before, _) = proved
    text = (search_of(folder) / "plan.yaml").read_text()
    elsewhere, here = tmp_path / "elsewhere.yaml", tmp_path / "here"
    elsewhere.write_text(re.sub(r'environment: "[^"]*"', 'environment: "NVIDIA A100 sm_80 torch 2.9"', text))
    (folder / "net.pt").write_text("weeks of training")
    again = advisor(folder, "apply", "--plan", str(elsewhere), "-o", str(here), "--format", "json")
    assert again.returncode == 0, again.stderr
    assert "trying" not in again.stderr
    assert json.loads(again.stdout)["trials"]["stack"]["passed"]
    assert before.items() <= tree(folder).items()
    plan, of_the_search = yaml.safe_load((here / "plan.yaml").read_text()), yaml.safe_load(text)
    assert "All kept changes together" in advisor(folder, "report", str(here)).stdout
    assert [plan[key] for key in ("hashes", "items", "argv")] == [
        of_the_search[key] for key in ("hashes", "items", "argv")
    ]


@pytest.mark.long
@pytest.mark.parametrize("own", [False, True], ids=["torchrun", "mp.spawn"])
def test_a_plan_is_proved_in_all_processes_that_train_together(tmp_path: Path, own: bool) -> None:
    """They all end at the same step, however many of its steps each takes for clean: one that went on would wait for ever."""
    write(tmp_path, """
        import os, sys, torch
        def train(rank=-1):
            torch.distributed.init_process_group("gloo", **OWN | {"rank": rank, "world_size": 2} if rank >= 0 else {})
            net = torch.nn.parallel.DistributedDataParallel(torch.nn.Conv2d(3, 4, 3))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for step in range(10**6):
                optimizer.zero_grad()
                net(torch.randn(2, 3, 8, 8)).sum().backward()
                optimizer.step()
                if torch.distributed.get_rank() and step % 2:
                    net.eval(), net(torch.randn(2, 3, 8, 8)), net.train()
        OWN = {"init_method": f"file://{os.path.abspath('group')}"}
        if __name__ == "__main__":
            if os.path.exists("group"):
                os.remove("group")
            torch.multiprocessing.spawn(train, nprocs=2) if sys.argv[1:] else train()
    """)  # fmt: skip
    (tmp_path / "plan.yaml").write_text("schema_version: 1\nitems: [{transform: channels_last, status: kept}]")
    command = ["train.py", "own"] if own else ["--", "torchrun", "--nproc-per-node", "2", "train.py"]
    found = advisor(tmp_path, "apply", "--plan", "plan.yaml", "-o", "run", "--max-time", "1s", *command)
    measured = json.loads((tmp_path / "run" / "measure.json").read_text())
    assert (measured["ranks"], measured["batch_size"], len(measured["losses"])) == (2, 4, 43), found.stderr
    assert json.loads((tmp_path / "run" / "trials.json").read_text())["stack"]["plain_us"]


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(("run", "--plan", "plan.yaml"), id="run"),
        pytest.param(("profile", "-q", "--keep-running", "-o", "run"), id="profile", marks=pytest.mark.long),
    ],
)
def test_what_the_script_has_let_go_of_is_gone_before_the_interpreter_ends(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    """A process group that hangs on a model has threads, and one of those that frees a tensor after that ends the process."""
    write(tmp_path, """
        import atexit
        held = []
        @atexit.register  # before advisor's, which come with torch: it is called behind them
        def left():
            print("left", sum(each() is not None for each in held), "of", len(held))
        from weakref import ref
        import torch
        def main():
            net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.Flatten(), torch.nn.LazyLinear(2))
            net(torch.randn(2, 3, 8, 8))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            for _ in range(60):
                optimizer.zero_grad()
                net(torch.randn(2, 3, 8, 8)).square().mean().backward()
                optimizer.step()
            held.extend((ref(net), ref(net[0]), ref(optimizer)))
        main()
    """)  # fmt: skip
    items = ", ".join(
        f"{{transform: {name}, status: kept}}" for name in ("amp_bf16", "channels_last", "fused_optimizer")
    )
    (tmp_path / "plan.yaml").write_text(f"schema_version: 1\nitems: [{items}]")
    ran = advisor(tmp_path, *words, "train.py")
    assert ran.returncode == 0, ran.stderr
    assert last_line(ran.stdout) == "left 0 of 3", ran.stderr


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("schema_version: 1", "schema_version: 99", "schema_version"),
        ("transform: fused_optimizer", "transform: warp_drive", "warp_drive"),
        ("items:", "items: [", "plan.yaml"),
    ],
)
def test_a_plan_that_cannot_be_read_is_one_line(proved, tmp_path: Path, old: str, new: str, said: str) -> None:
    folder, _, _ = proved
    text = (search_of(folder) / "plan.yaml").read_text()
    assert old in text
    (tmp_path / "plan.yaml").write_text(text.replace(old, new))
    ran = advisor(folder, "run", "--plan", str(tmp_path / "plan.yaml"), "train.py", "1")
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert said in ran.stderr
    assert len(ran.stderr.strip().splitlines()) == 1, ran.stderr


@pytest.mark.long
def test_a_plan_of_another_model_trains_the_plain_script(proved) -> None:
    folder, _, _ = proved
    write(folder, SCRIPT.replace("nn.Conv2d(3, 4, 3)", "nn.Conv2d(3, 4, 3, bias=False)"), "other.py")
    ran = advisor(folder, "run", "other.py", "1")
    assert (ran.returncode, last_line(ran.stdout)) == (0, "trained 1"), ran.stderr
    assert "model" in ran.stderr
    assert "training with" not in ran.stderr


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        pytest.param("raise torch.OutOfMemoryError('boom')", 1, "exit code 1", marks=pytest.mark.long),
        ("os._exit(9)", 9, "exit code 9"),
        pytest.param("os.kill(os.getpid(), 9)", 137, "SIGKILL", marks=pytest.mark.long),
    ],
)
def test_a_script_that_fails_keeps_its_exit_code_and_what_was_measured(
    tmp_path: Path, end: str, code: int, said: str
) -> None:
    write(tmp_path, LOOP + f"train(12)\n{end}\n")
    found = advisor(tmp_path, "profile", "-o", "run", "train.py")
    assert found.returncode == code
    assert said in found.stderr
    assert (tmp_path / "run" / "profile.json").exists()
    assert (tmp_path / "run" / "report.html").exists()
    if code == 1:
        applied = advisor(tmp_path, "apply", "--auto", "train.py")
        assert applied.returncode == 1
        assert "OutOfMemoryError: boom" in applied.stderr  # the reason; all it printed is in the run folder
        (output,) = (tmp_path / "advisor-runs").glob("*/script-output.log")
        assert "Traceback" in output.read_text()


@pytest.mark.long
def test_a_short_script_is_measured_in_a_second_run_that_writes_nothing(tmp_path: Path) -> None:
    write(tmp_path, LOOP + "train(16)\nopen('log.txt', 'a').write('once\\n')\nprint('done')\n")
    found = advisor(tmp_path, "profile", "train.py")
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr
    assert "second run" in found.stderr
    assert "Where the time goes" in found.stderr
    assert (tmp_path / "log.txt").read_text() == "once\n"


@pytest.mark.long
def test_a_script_that_only_infers_is_profiled_and_told_that_nothing_can_be_tried(tmp_path: Path) -> None:
    write(tmp_path, """
        import torch
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
        with torch.no_grad():
            for _ in range(12):
                net(torch.randn(8, 3, 32, 32))
        print("done")
    """)  # fmt: skip
    found = advisor(tmp_path, "apply", "--auto", "train.py")
    assert found.returncode == 0, found.stderr
    assert "the script trains nothing" in found.stderr
    kept = json.loads(next((tmp_path / "advisor-runs").glob("*/profile.json")).read_text())
    assert (kept["step_kind"], kept["cost"]["traced_steps"]) == ("forward", 1)
    assert {row["phase"] for row in kept["kernels"]} <= {"forward", "other"}


@pytest.mark.long
def test_the_last_step_of_a_handful_is_traced(tmp_path: Path) -> None:
    write(tmp_path, LOOP + "import time\nfor _ in range(5):\n    time.sleep(0.1)\n    train(1)\nprint('done')\n")
    found = advisor(tmp_path, "profile", "-o", "run", "train.py")
    assert (found.returncode, found.stdout) == (0, "done\n"), found.stderr
    kept = json.loads((tmp_path / "run" / "profile.json").read_text())
    assert (kept["steps_seen"], kept["cost"]["traced_steps"], kept["complete"]) == (5, 1, True)
    assert kept["kernels"]
    assert any("so few steps" in note for note in kept["notes"])


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("profile", "trian.py"), 2, "Did you mean train.py?"),
        (("profile", "broken.py"), 1, "SyntaxError"),
        pytest.param(("profile", "nothing.py"), 0, "has imported neither torch nor CuPy", marks=pytest.mark.long),
        (("apply", "--auto", "nothing.py"), 4, "has imported neither torch nor CuPy"),
        (("apply", "--auto"), 2, "no run"),
        (("apply", "--auto", "--only", "warp_drive", "train.py"), 2, "warp_drive"),
        (("apply", "--plan", "none.yaml"), 2, "none.yaml"),
        (("apply", "--plan", "plan.yaml", "--min-gain", "2%", "train.py"), 2, "--min-gain has no meaning"),
        (("run", "train.py"), 2, "no plan"),
        (("run", "--plan", "none.yaml", "train.py"), 2, "none.yaml"),
        (("recommend", "nowhere"), 2, "nowhere"),
        (("report", "newer"), 2, "schema"),
        (("report", "torn"), 2, "profile.json"),
        (("kernels", "verify"), 5, "GPU"),
    ],
)
def test_bad_input_gets_one_clear_line_and_its_exit_code(
    tmp_path: Path, words: tuple[str, ...], code: int, said: str
) -> None:
    write(tmp_path, LOOP)
    write(tmp_path, "x = = 1", "broken.py")
    write(tmp_path, "print('hello')", "nothing.py")
    for name, text in (("newer", '{"schema_version": 99}'), ("torn", '{"schema_version": 1, "da')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "profile.json").write_text(text)
    found = advisor(tmp_path, *words, CUDA_VISIBLE_DEVICES="")
    assert found.returncode == code, found.stderr
    assert said in found.stderr
    assert "Traceback" not in found.stderr
