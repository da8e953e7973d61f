"""Real scripts under the launcher and plainly: what a script can see of itself and of the world must be the same."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import clocks
import pytest

from advisor.core import storage
from advisor.loop import rankrecords
from advisor.loop.records import FACTS_FILE, STEPS_FILE, TRACE_FILE, FactsRecord, StepsRecord, load_trace
from advisor.loop.session import Session
from advisor.loop.waiting import WAITING, Waiting, WaitStage
from advisor.profiling.beside import launcher
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.launcher import Exit, launch
from advisor.resources import BOOTSTRAP

ROOT = Path(__file__).resolve().parents[2]


def write(folder: Path, text: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text))
    return path


def run(
    folder: Path,
    *words: str,
    steps: int = 4,
    keep_running: bool = False,
    protect_files: bool = False,
    first_step_s: float = 0.0,
    timeout_s: float | None = None,
    on_progress: Callable[[dict[str, object]], None] | None = None,
    **variables: str,
) -> tuple[Exit, str, Path]:
    """Under the launcher, in `folder`: how it ended, what it printed, the run folder."""
    run_dir = folder / "run"
    session = Session(
        mode="profile",
        run_dir=str(run_dir),
        script=words[0],
        warmup=4,
        steps=steps,
        keep_running=keep_running,
        protect_files=protect_files,
        first_step_s=first_step_s,
    )
    output = folder / "output.txt"
    before = Path.cwd()
    os.chdir(folder)
    try:
        ended = launch(
            ScriptCommand.parse(words),
            session,
            timeout_s=timeout_s,
            on_progress=on_progress,
            environment={"OMP_NUM_THREADS": "1", **variables},
            output=output,
        )
    finally:
        os.chdir(before)
    return ended, output.read_text(), run_dir


LOOP = """
import torch
torch.set_num_threads(1)
from torch import nn
torch.manual_seed(3)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
def train(count):
    losses = []
    for _ in range(count):
        x, y = torch.randn(8, 1, 8, 8), torch.randint(0, 5, (8,))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
"""

# The worker is spawned, so it unpickles by the script's own names; what torch costs is under the guard, out of its start.
OWN_VIEW = (
    """
import json, os, random, sys
class Item:
    def __init__(self, values):
        hooks = [type(finder).__name__ for finder in sys.meta_path]
        self.value, self.hooked = sum(values), "ADVISOR_ATTACHED" in os.environ and "_After" in hooks
class Data:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index
if __name__ == "__main__":
"""
    + textwrap.indent(LOOP, "    ")
    + """
    import numpy
    from torch.utils.data import DataLoader
    before = (torch.initial_seed(), random.random(), float(numpy.random.rand()) * 0)
    losses = train(40)  # on a busy machine not every step is a clean one
    batches = list(DataLoader(Data(), batch_size=4, num_workers=1, collate_fn=Item, multiprocessing_context="spawn"))
    random.seed(1); numpy.random.seed(1)
    print(json.dumps({
        "argv": sys.argv, "file": __file__, "name": __name__, "path": sys.path, "spec": str(__spec__),
        "cwd": os.getcwd(), "losses": losses,
        "spawned": [[type(item).__module__, item.value, item.hooked] for item in batches],
        "draws": [torch.rand(3).tolist(), random.random(), float(numpy.random.rand())], "seed": before[0],
        "loader": type(torch.__loader__).__name__, "own_loader": "exec_module" in vars(torch.__loader__),
        "stdin": sys.stdin.isatty(), "modules": "sitecustomize" in sys.modules,
        "patched": [name for name, value in (("call", nn.Module.__call__), ("backward", torch.autograd.backward))
                    if "advisor" in getattr(getattr(value, "__code__", None), "co_filename", "")],
    }))
    sys.exit(7)
"""
)


def test_a_script_sees_the_same_world_and_draws_the_same_numbers(tmp_path: Path) -> None:
    write(tmp_path, OWN_VIEW)
    plain = subprocess.Popen(
        [sys.executable, "train.py", "--lr", "0.1", "--help"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    ended, output, run_dir = run(tmp_path, "train.py", "--lr", "0.1", "--help", keep_running=True)
    plainly, _ = plain.communicate()
    assert plain.returncode == ended.code == 7, output
    # Behind it multiprocessing may warn, on stderr.
    told = [line for line in output.splitlines() if line.startswith("{")]
    expected, seen = json.loads(plainly), json.loads(told[-1])
    expected["modules"] = seen["modules"]  # Python leaves the module in place that ran at its start
    for view in (expected, seen):  # torch 2.8 puts a folder there that it has made for itself
        view["path"] = [place for place in view["path"] if not re.search(r"/tmp\w{8}$", place)]
    assert seen == expected
    assert seen["spawned"] == [["__main__", 6, False], ["__main__", 22, False]]
    assert not ended.stopped_by_advisor
    assert storage.load(run_dir / STEPS_FILE, StepsRecord).complete


@pytest.mark.long
def test_a_script_is_stopped_once_measured(tmp_path: Path) -> None:
    write(
        tmp_path,
        LOOP
        + """
import atexit
atexit.register(print, "atexit ran")
try:
    train(1000)
    print("not stopped")
finally:
    print("finally ran")
""",
    )
    ended, output, run_dir = run(tmp_path, "train.py", steps=6)
    assert (ended.code, ended.signal, ended.stopped_by_advisor) == (0, 0, True)
    assert "finally ran" in output
    assert "atexit ran" in output
    assert "not stopped" not in output
    assert "Traceback" not in output
    record = storage.load(run_dir / STEPS_FILE, StepsRecord)
    assert record.complete
    assert record.kind == "optimizer"
    assert record.step_us is not None
    assert record.step_us.n == 6
    assert len(record.losses) == len(record.loader_us) == 6
    assert record.backwards == (1,) * 6
    assert len(record.traced_wall_us) == 3
    facts = storage.load(run_dir / FACTS_FILE, FactsRecord)
    assert facts.model.roots == ("Sequential",)
    assert facts.model.batch_size == 8
    assert facts.model.convs[0].followed_by_bn


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.long), "fork"])
def test_a_rank_that_the_script_starts_itself_is_measured(tmp_path: Path, method: str) -> None:
    """As in PyTorch's own examples: the process that was started trains nothing, and no launcher has set RANK."""
    write(
        tmp_path,
        """
import os
import torch
def rank(number, folder):
    from torch.distributed import init_process_group
    init_process_group("gloo", f"file://{folder}/store", rank=number, world_size=1)
"""
        + textwrap.indent(LOOP, "    ")
        + f"""
    train(1000)
if __name__ == "__main__":
    torch.multiprocessing.start_processes(rank, (os.getcwd(),), nprocs=1, start_method="{method}")
    print("goes on")
""",
    )
    ended, output, run_dir = run(tmp_path, "train.py")
    assert (ended.code, ended.stopped_by_advisor) == (0, True), output
    assert "goes on" in output
    assert "Traceback" not in output
    record = storage.load(run_dir / STEPS_FILE, StepsRecord)
    assert record.complete
    assert record.kind == "optimizer"


def test_neither_a_new_process_nor_an_argument_nor_a_bare_except_hides_a_script(tmp_path: Path) -> None:
    """It replaces itself, has an argument that is the name of a launcher, and catches whatever stops it: in one run, which is long."""
    again = "import os, sys\nif os.environ.setdefault('AGAIN', '0') == '0':\n"
    again += "    os.environ['AGAIN'] = '1'\n    os.execv(sys.executable, [sys.executable, *sys.argv])\n"
    loop = """
for _ in range(1000):
    try:
        train(1)
    except:
        pass
print("not stopped")
"""
    write(tmp_path, again + LOOP + loop)
    ended, output, run_dir = run(tmp_path, "train.py", "--backend", "deepspeed", steps=3)
    assert ended.code == 0
    assert ended.stopped_by_advisor
    assert "not stopped" not in output
    assert storage.load(run_dir / STEPS_FILE, StepsRecord).complete


# The C library's exit handlers run when Python is gone: this one never returns.
HANGS = """
import ctypes
libc = ctypes.CDLL(None)
libc.on_exit(ctypes.cast(libc.pause, ctypes.c_void_p), None)
"""


def test_a_script_that_hangs_in_native_exit_handlers_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "LEAVING_S", 1.0)
    write(tmp_path, HANGS + LOOP + "train(1000)\n")
    ended, _, run_dir = run(tmp_path, "train.py", steps=3)
    assert ended.hung
    assert (ended.code, ended.signal, ended.timed_out, ended.stopped_by_advisor) == (0, 0, False, True)
    assert ended.seconds < 60
    assert (run_dir / "steps.json").exists()


def test_a_script_that_crashes_in_native_code_as_it_ends_was_measured(tmp_path: Path) -> None:
    write(tmp_path, HANGS.replace("pause", "abort") + LOOP + "train(1000)\n")
    ended, _, run_dir = run(tmp_path, "train.py", steps=3)
    assert ended.crashed
    assert (ended.code, ended.signal, ended.stopped_by_advisor) == (0, 0, True)
    assert (run_dir / "steps.json").exists()
    write(tmp_path, LOOP + "train(2)\nimport os\nos.abort()\n")
    ended, _, _ = run(tmp_path, "train.py", steps=30)
    assert (ended.crashed, ended.code) == (False, 134)  # its own


def test_loaders_end_before_the_interpreter_does(tmp_path: Path) -> None:
    """A thread of a loader that works in native code while the interpreter is taken apart ends the process, and the frames that the stop
    has passed hold the loader's iterator."""
    held = """
import atexit
from torch.utils.data import DataLoader
batches = iter(DataLoader(list(range(8)), num_workers=1))
next(batches)
workers = list(batches._workers)
atexit.register(lambda: print("shut down", batches._shutdown, [w.is_alive() for w in workers]))
"""
    write(tmp_path, LOOP + held + "train(1000)\n")
    _, output, _ = run(tmp_path, "train.py", steps=3)
    assert "shut down True [False]" in output


@pytest.mark.long
def test_a_clean_up_of_the_scripts_own_may_take_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exit handlers, `finally` blocks and threads: also handlers from before torch's import, which run last."""
    monkeypatch.setattr(launcher, "LEAVING_S", 2.5)
    slow = """
import atexit, threading, time

def upload(name):
    time.sleep(3)
    open(name, "w").write("up")

atexit.register(upload, "by-atexit")
"""
    ending = """
try:
    train(1000)
finally:
    threading.Thread(target=upload, args=("by-thread",)).start()
    upload("by-finally")
"""
    write(tmp_path, slow + LOOP + ending)
    ended, _, _ = run(tmp_path, "train.py", steps=3)
    assert not ended.hung
    assert (ended.code, ended.stopped_by_advisor) == (0, True)
    assert sorted(path.name for path in tmp_path.glob("by-*")) == ["by-atexit", "by-finally", "by-thread"]


def test_what_was_gathered_is_on_disk_when_a_short_script_dies(tmp_path: Path) -> None:
    write(tmp_path, LOOP + "train(6)\nimport os\nos._exit(3)\n")
    ended, _, run_dir = run(tmp_path, "train.py", steps=50)
    assert ended.code == 3
    record = storage.load(run_dir / STEPS_FILE, StepsRecord)
    assert record.steps_seen >= 4
    assert not record.complete
    assert record.wall_us is not None
    assert (run_dir / FACTS_FILE).exists()


def test_a_script_that_ends_in_its_warm_up_gives_a_provisional_record(tmp_path: Path) -> None:
    write(tmp_path, LOOP + "train(3)\nraise ValueError('the script is broken')\n")
    ended, output, run_dir = run(tmp_path, "train.py")
    assert ended.code == 1
    assert "ValueError: the script is broken" in output
    record = storage.load(run_dir / STEPS_FILE, StepsRecord)
    assert record.provisional
    assert record.wall_us is not None
    assert record.wall_us.n >= 1
    assert record.steps_seen == 3
    assert any("warm-up" in note for note in record.notes)


def test_a_script_without_steps_says_so(tmp_path: Path) -> None:
    write(tmp_path, "import torch\ntorch.ones(3).sum()\n")
    ended, _, run_dir = run(tmp_path, "train.py")
    assert ended.code == 0
    record = storage.load(run_dir / STEPS_FILE, StepsRecord)
    assert (record.kind, record.steps_seen, record.step_us) == ("none", 0, None)


@pytest.mark.parametrize(
    ("body", "code", "number"),
    [
        ("import sys; sys.exit(7)", 7, 0),
        ("import os; os._exit(0)", 0, 0),
        ("import sys; sys.exit('a message')", 1, 0),
        ("raise RuntimeError('x')", 1, 0),
        ("import ctypes; ctypes.string_at(0)", 139, signal.SIGSEGV),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", 137, signal.SIGKILL),
        ("raise KeyboardInterrupt", 130, signal.SIGINT),
    ],
)
def test_exit_codes_and_signals_are_the_scripts_own(tmp_path: Path, body: str, code: int, number: int) -> None:
    write(tmp_path, body)
    ended, _, run_dir = run(tmp_path, "train.py")
    assert (ended.code, ended.signal) == (code, number)
    assert not (run_dir / STEPS_FILE).exists()  # torch was never imported


def test_the_users_own_sitecustomize_runs_once(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    write(site, "import builtins; builtins.runs = getattr(builtins, 'runs', 0) + 1", "sitecustomize.py")
    write(tmp_path, "import builtins, sitecustomize\nprint('runs', builtins.runs, sitecustomize.__file__)")
    ended, output, _ = run(tmp_path, "train.py", PYTHONPATH=str(site))
    assert ended.code == 0
    assert f"runs 1 {site}" in output


def test_a_broken_sitecustomize_of_the_user_is_shown_and_advisor_still_attaches(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    write(site, "raise ValueError('their fault')", "sitecustomize.py")
    write(tmp_path, "import sys\nprint([type(finder).__name__ for finder in sys.meta_path][0])")
    ended, output, _ = run(tmp_path, "train.py", PYTHONPATH=str(site))
    assert ended.code == 0
    assert "their fault" in output
    assert "_After" in output


def test_a_module_named_advisor_in_the_script_goes_first(tmp_path: Path) -> None:
    write(tmp_path, "name = 'the script' + chr(39) + 's own'", "advisor.py")
    write(tmp_path, "import torch, advisor\nprint(advisor.name)")
    ended, output, _ = run(tmp_path, "train.py", keep_running=True)
    assert ended.code == 0
    assert "a module named advisor of its own" in ended.fault
    assert "the script's own" in output
    assert "[advisor] switched off" in output


def test_a_fault_of_advisor_leaves_the_training_alone(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    # The planted fault: the judge of intervals fails at the fifth step.
    write(
        site,
        """
        import sys, importlib.util
        class Plant:
            def find_spec(self, name, path=None, target=None):
                if name != "advisor.profiling.inside.driver":
                    return None
                sys.meta_path.remove(self)
                from advisor.loop.interval import Usual
                judge = Usual.judge
                def faulty(self, interval, *, first):
                    if self.intervals == 5:
                        raise ZeroDivisionError("planted")
                    return judge(self, interval, first=first)
                Usual.judge = faulty
                return None
        sys.meta_path.insert(0, Plant())
        """,
        "sitecustomize.py",
    )
    write(tmp_path, LOOP + "print('trained', len(train(20)))\n")
    ended, output, run_dir = run(tmp_path, "train.py", PYTHONPATH=str(site), steps=50, keep_running=True)
    assert (ended.code, ended.reached, ended.fault) == (0, WaitStage.STEPS, "ZeroDivisionError: planted")
    assert "trained 20" in output
    assert output.count("[advisor]") == 1
    assert "ZeroDivisionError: planted" in output
    record = storage.load(run_dir / STEPS_FILE, StepsRecord)
    assert not record.complete
    assert record.wall_us is not None


# A script that would go on for as long as the test may take.
FOR_EVER = "\nimport time\nfor _ in range(1000):\n    time.sleep(0.1)\n"


def test_a_process_in_which_advisor_cannot_be_attached_is_ended(tmp_path: Path) -> None:
    """As where a dependency is missing."""
    site = tmp_path / "site"
    site.mkdir()
    write(
        site,
        """
        import sys
        class Missing:
            def find_spec(self, name, path=None, target=None):
                if name == "advisor.profiling.inside.driver":
                    raise ModuleNotFoundError("No module named 'planted'")
        sys.meta_path.insert(0, Missing())
        """,
        "sitecustomize.py",
    )
    write(tmp_path, "import torch" + FOR_EVER)
    ended, output, _ = run(tmp_path, "train.py", PYTHONPATH=str(site))
    assert "switched off" in output
    assert ended.fault == "ModuleNotFoundError: No module named 'planted'"
    assert (ended.code, ended.timed_out) == (143, False)


def test_a_script_that_cannot_be_started_in_a_search_says_why(tmp_path: Path) -> None:
    write(tmp_path, "name = 'mine'", "advisor.py")
    write(tmp_path, "print('never')")
    ended, output, _ = run(tmp_path, "train.py", protect_files=True)
    assert (ended.code, "never" in output) == (3, False)
    assert "a module named advisor of its own" in ended.fault


@pytest.mark.parametrize(
    ("script", "waits", "reached", "reason"),
    [
        ("import cupy", {"CUPY_S": 0.3}, WaitStage.PYTHON, "uses CuPy without torch"),
        ("import json", {"TORCH_S": 0.3}, WaitStage.PYTHON, "the script has imported neither torch nor CuPy"),
        ("import torch", {"first_step_s": 0.3}, WaitStage.TORCH, "no training step was seen"),
    ],
)
def test_a_script_that_has_no_steps_is_ended_with_the_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    waits: dict[str, float],
    reached: WaitStage,
    reason: str,
) -> None:
    told: list[dict[str, object]] = []
    limit_s = waits.get("first_step_s", 0.0)
    for name in ("TELL_S", "CUPY_TOLD_S"):
        monkeypatch.setattr(f"advisor.loop.waiting.{name}", 0.1)
    for name in waits.keys() - {"first_step_s"}:
        monkeypatch.setattr(f"advisor.loop.waiting.{name}", waits[name])
    write(tmp_path, "", "cupy.py")
    write(tmp_path, script + FOR_EVER)
    if limit_s:  # torch's import is not what is waited for
        monkeypatch.setattr(Waiting, "nothing_left", after_stage(WaitStage.TORCH, Waiting.nothing_left))
    ended, _, _ = run(tmp_path, "train.py", first_step_s=limit_s, on_progress=told.append)
    assert reason in ended.gave_up
    assert (ended.code, ended.reached, ended.fault) == (143, reached, "")
    assert WAITING in [event["event"] for event in told]


def after_stage(stage: WaitStage, judge: Callable[[Waiting, float], str]) -> Callable[[Waiting, float], str]:
    return lambda waiting, now: judge(waiting, now) if waiting.stage >= stage else ""


def test_disabled_is_a_true_no_op(tmp_path: Path) -> None:
    write(
        tmp_path,
        "import os\nprint(sorted(k for k in os.environ if k.startswith('ADVISOR')), os.environ.get('PYTHONPATH'))",
    )
    ended, output, _ = run(tmp_path, "train.py", ADVISOR_DISABLE="1", PYTHONPATH="/x")
    assert ended.code == 0
    assert output == "['ADVISOR_DISABLE'] /x\n"


def test_subprocesses_of_the_script_are_left_alone(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        import subprocess, sys
        probe = "import torch; print(torch.autograd.backward.__code__.co_filename)"
        exec(probe)
        print("below", subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True).stdout)
        """,
    )
    _, output, _ = run(tmp_path, "train.py")
    script, below = output.splitlines()[:2]
    assert script.endswith(os.path.join("advisor", "loop", "hooks.py"))
    assert below.startswith("below ")
    assert below.endswith(os.path.join("torch", "autograd", "__init__.py"))


def test_two_threads_that_train_at_the_same_time_are_profiled_and_end(tmp_path: Path) -> None:
    script = """
    import threading, torch
    from torch import nn
    torch.set_num_threads(1)
    def train():
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(100_000):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(torch.randn(8, 1, 8, 8)), torch.randint(0, 5, (8,))).backward()
            optimizer.step()
    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("both have ended")
    """
    write(tmp_path, script)
    ended, output, run_dir = run(tmp_path, "train.py")
    assert (ended.code, ended.timed_out) == (0, False), output
    assert "both have ended" in output
    assert "[advisor]" not in output
    assert load_trace(run_dir / TRACE_FILE).ops.name


def test_a_timeout_ends_the_whole_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock(clocks.Clock):
        """Time is up once the script has got as far as `pid`, and not before."""

        def monotonic(self) -> float:
            return 1e6 if (tmp_path / "pid").exists() else 0.0

    monkeypatch.setattr(launcher, "time", Clock())
    write(
        tmp_path,
        """
        import os, subprocess, sys, time
        below = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10**6)"])
        open("pid.part", "w").write(str(below.pid))
        os.rename("pid.part", "pid")
        time.sleep(10**6)
        """,
    )
    ended, _, _ = run(tmp_path, "train.py", timeout_s=6)
    assert ended.timed_out
    assert ended.code == 143
    pid = int((tmp_path / "pid").read_text())
    clocks.until(lambda: not alive(pid))


def alive(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits to be collected does not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


SUPERVISOR = """
import sys
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.launcher import launch
from advisor.loop.session import Session
from advisor.loop.waiting import WAITING, Waiting, WaitStage
ended = launch(ScriptCommand.parse([sys.argv[1]]), Session(mode="profile", run_dir="run", script=sys.argv[1]))
sys.exit(ended.code)
"""


def supervise(folder: Path, **options: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, "train.py"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # no terminal, so a signal to the supervisor alone has to be passed on
        **options,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_the_script_once(tmp_path: Path, number: signal.Signals) -> None:
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored in this session (nohup), and a child inherits that")
    write(
        tmp_path,
        """
        import signal, sys, time
        got = []
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, frame: got.append(number))
        print("ready", flush=True)
        while not got:
            time.sleep(0.02)
        time.sleep(0.3)  # a second one would be here by now, most of the time
        print("got", len(got), int(got[0]), flush=True)
        sys.exit(9)
        """,
    )
    process = supervise(tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output, _ = process.communicate()
    assert output == f"got 1 {int(number)}\n"
    assert process.returncode == 9


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_script_that_ends_well_when_it_is_asked_to_was_asked_to(tmp_path: Path, number: signal.Signals) -> None:
    write(
        tmp_path,
        f"""
        import os, signal, time
        got = []
        signal.signal({int(number)}, lambda number, frame: got.append(number))
        os.kill(os.getppid(), {int(number)})
        while not got:
            time.sleep(0.02)
        """,
    )
    ended, _, _ = run(tmp_path, "train.py")
    assert (ended.code, ended.signal, ended.interrupted) == (0, 0, True)


def test_a_second_interrupt_kills_a_script_that_does_not_react(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        import signal, time
        signal.signal(signal.SIGINT, lambda number, frame: print("and no reaction", flush=True))
        print("ready", flush=True)
        while True:
            time.sleep(60)
        """,
    )
    process = supervise(tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stdout.readline() == "and no reaction\n"
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 137


def test_stdin_is_the_scripts_own(tmp_path: Path) -> None:
    write(tmp_path, "print('read', input())")
    process = supervise(tmp_path)
    output, _ = process.communicate("a line\n")
    assert output == "read a line\n"


@pytest.mark.long
def test_a_command_whose_descendant_trains(tmp_path: Path) -> None:
    write(tmp_path, LOOP + "train(1000)\nprint('not stopped')\n")
    (tmp_path / "go.sh").write_text(f"cd .\n{sys.executable} train.py\necho after\n")
    ended, output, run_dir = run(tmp_path, "sh", "go.sh", steps=3)
    assert ended.code == 0
    assert ended.stopped_by_advisor
    assert output.endswith("after\n")
    assert "not stopped" not in output
    assert storage.load(run_dir / STEPS_FILE, StepsRecord).complete


@pytest.mark.long
@pytest.mark.parametrize(
    "starts",
    [
        "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
        "import subprocess, sys; sys.exit(subprocess.call([sys.executable, *sys.argv[1:]]))",
    ],
)
def test_a_program_of_pythons_that_starts_the_script_is_not_taken_for_it(tmp_path: Path, starts: str) -> None:
    write(tmp_path, LOOP + "train(1000)")
    write(tmp_path, starts, "environment.py")
    ended, _, run_dir = run(tmp_path, sys.executable, "environment.py", "train.py")
    assert ended.code == 0
    assert ended.stopped_by_advisor
    assert storage.load(run_dir / STEPS_FILE, StepsRecord).complete


@pytest.mark.parametrize(
    ("words", "started"),
    [
        (["train.py", "torchrun"], ("", "train.py")),
        (["train.py", "-c", "config.yaml", "-m", "resnet50"], ("", "train.py")),
        (["-u", "-X", "dev", "/bin/torchrun", "train.py"], ("", "/bin/torchrun")),
        (["-Xtracemalloc", "-Wignore", "train.py"], ("", "train.py")),
        (["-um", "accelerate.commands.launch", "train.py"], ("m", "accelerate.commands.launch")),
        (["-c", "import train", "pip"], ("c", "import train")),
        (["-cimport train"], ("c", "import train")),
        (["--check-hash-based-pycs=always", "train.py"], ("", "train.py")),
        ([], ("c", "")),
    ],
)
def test_what_python_runs(words: list[str], started: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing is wanted of the bootstrap here, and so it can be run.
    monkeypatch.delenv("ADVISOR_SESSION", raising=False)
    monkeypatch.setattr(sys, "path", [*sys.path])
    bootstrap = runpy.run_path(str(BOOTSTRAP / "sitecustomize.py"))
    assert bootstrap["_started"](["python", *words]) == started


@pytest.mark.long
def test_all_ranks_of_torchrun_stop_at_the_same_step(tmp_path: Path) -> None:
    write(
        tmp_path,
        """
        import os, time, torch, torch.distributed as dist
        torch.set_num_threads(1)
        from torch import nn
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        done = 0
        try:
            for _ in range(1000):
                optimizer.zero_grad()
                loss = model(torch.randn(3 + rank, 4)).sum()
                time.sleep(0.03 * rank)
                loss.backward()
                done += 1
                optimizer.step()
            print("not stopped")
        finally:
            open(f"rank{rank}", "w").write(str(done))
        """,
    )
    words = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py")
    ended, output, run_dir = run(tmp_path, *words, steps=5)
    assert ended.code == 0, output
    assert ended.stopped_by_advisor
    assert "not stopped" not in output
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank1").read_text() == str(4 + 5 + 1 + 3)
    record = storage.load(run_dir / STEPS_FILE, StepsRecord)
    assert record.complete
    facts = storage.load(run_dir / FACTS_FILE, FactsRecord)
    assert (facts.model.distributed, facts.model.world_size, facts.model.backend) == ("ddp", 2, "gloo")
    assert facts.model.roots == ("Linear",)
    (told,) = rankrecords.notes(run_dir, 2, 3e4)  # for which each has left a record
    assert told.startswith("rank 1 takes 3")
