"""torch.compile's trial begins when a process beside has compiled: its first step takes half a minute and more, in which the loop stands.

The graphs are recorded in one step of the loop as it stands, and compiled in another process, at the lowest priority, into Inductor's
caches on disk. Meanwhile other candidates have their turn; then the trial captures the same graphs and finds them there.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path

from advisor.core.findings import Recommendation
from advisor.loop.session import SESSION_VARIABLE
from advisor.loop.training import StepEvent
from advisor.profiling.machine.hostload import cpu_count
from advisor.transforms import capture
from advisor.transforms.ahead.recording import GRAPH, WHY_NOT, Recording
from advisor.transforms.targets import targets
from advisor.trials.live.loop import Loop
from advisor.trials.records import InTrial

# Of a machine with fewer cores the training has need of each.
LEAST_CORES = 4
MODES = {"compile": "default"}  # what autotunes would do it on the device, beside what is timed there
RECORDED_STEPS = 2  # the first one may have begun before the layer was on
_ROOT = Path(__file__).resolve().parents[3]  # that `advisor` is imported from
START = "import sys; sys.path[0] = {root!r}; from advisor.transforms.ahead.process import main; sys.exit(main(sys.argv[1:]))"

Steps = Generator[None, StepEvent, None]


class CompiledBeside:
    """Of one search process. `begin` once for a candidate, then `running` until its turn has come."""

    def __init__(self, loop: Loop, cores: int | None = None) -> None:
        self._loop = loop
        self._cores = cpu_count() if cores is None else cores
        self._on: tuple[str, ...] | None = None  # what was on when the graphs were recorded
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = ""

    def wanted(self, candidate: Recommendation) -> bool:
        """Whether this candidate's graphs are to be recorded now: once, and once more if what is kept has changed since."""
        return (
            candidate.transform in MODES
            and self._cores >= LEAST_CORES
            and self._on != self._loop.standing
            and not self.running
        )

    @property
    def running(self) -> bool:
        """The process beside is at work."""
        return self._process is not None and self._process.poll() is None

    def begin(self, candidate: Recommendation) -> Steps:
        """Record a step's graphs and start the process. What goes wrong is a note: the trial then compiles in the loop."""
        self._on = self._loop.standing
        self._folder = tempfile.mkdtemp(prefix="advisor-graphs-")
        atexit.register(self.end)
        # Should the script die of it, this is who is to blame.
        self._loop.note(InTrial(transform=candidate.transform, parameters=dict(candidate.parameters)))
        modules = targets(self._loop.training)
        try:
            undo = capture.set_mode(modules, Recording(MODES[candidate.transform], self._folder))
        except Exception as error:
            self._loop.notes.append(f"torch.compile's graphs could not be recorded: {error}")
            return
        try:
            for _ in range(RECORDED_STEPS):
                yield
        finally:
            undo.run()
            capture.release(modules)
        self.start()

    def wait(self, until_unix_s: float) -> Steps:
        """Let the loop run on until the process has ended, or this time has come (0: whatever it takes)."""
        while self.running and not 0 < until_unix_s <= time.time():
            yield

    def end(self) -> None:
        """Nobody needs what is compiled any more. May be called twice."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def start(self) -> None:
        folder = Path(self._folder)
        graphs = sorted(map(str, folder.glob(GRAPH.format("*"))))
        for why in sorted(folder.glob(WHY_NOT.format("*"))):
            self._loop.notes.append(f"a graph of torch.compile's was compiled in the loop: {why.read_text()}")
        if not graphs:
            return
        environment = {name: value for name, value in os.environ.items() if name != SESSION_VARIABLE}
        threads = max(1, min(8, self._cores // 4))
        environment.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(threads))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START.format(root=str(_ROOT)), *graphs],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # so that its compilers end with it
            )
        except OSError as error:
            self._loop.notes.append(f"no helper process for torch.compile: {error}")
            return
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, self._process.pid, 19)
