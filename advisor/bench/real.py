"""`advisor bench real FOLDER`: trainings that other people wrote, as they are, tuned by hand, and after `advisor apply --auto`.

Each lies behind a runner, `run_NAME.sh`: it makes the training's data, goes to its repository and starts the script behind `$PREFIX`
(`python3` where that is not set). Nothing of theirs is in this project; results have names and figures. One training a GPU at a time.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from advisor.bench import fresh, results
from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.profile import StepProfile
from advisor.core.verdict import Status, TrialLog
from advisor.pipeline.shared import OWN_GPU
from advisor.resources import kernels_dir
from advisor.runs import PROFILE_FILE
from advisor.trials import proof, records
from advisor.trials.fresh import lengths

# What is tried by hand, by name; the best of what works is what advisor is held against.
BY_HAND: dict[str, tuple[str, ...]] = {
    "eager": fresh.HAND_TUNED,
    "compile": (*fresh.HAND_TUNED, "compile"),
}
PLAIN = "plain"
GRACE_S = 40.0  # for a search that was interrupted to put files back and to write what it has
LOG_FILE = "log.txt"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RealRow:
    """One training. Times are of whole steps, medians in milliseconds of fresh processes; None where not measured.

    Attributes:
        proved: the plan holds against the script as written: faster, and training alike.
        first_proof_s: from the script's first step until a plan was proved; start_s: from its start to that step.
        speedup, speedup_low, speedup_high: the script as written over the plan, with the interval; device_...: of the device's own time,
            where the step waits for its loader.
        hand: by what was tuned by hand, its step; hand_speedup: of the best of them, in runs of the same session.
        not_kept: "transform: status, why", of what was tried and not kept.
        apply_s: of the whole search, and `spent_s` of that, by phase.
        fault: why there is no result, the last line of the runner's output.
    """

    name: str
    script: str = ""
    proved: bool = False
    first_proof_s: float | None = None
    start_s: float | None = None
    plain_ms: float | None = None
    advisor_ms: float | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    device_speedup: float | None = None
    device_speedup_low: float | None = None
    device_speedup_high: float | None = None
    hand: dict[str, float] = field(default_factory=dict)
    hand_speedup: float | None = None
    kept: tuple[str, ...] = ()
    not_kept: tuple[str, ...] = ()
    detail: str = ""
    notes: tuple[str, ...] = ()
    apply_s: float | None = None
    spent_s: dict[str, float] = field(default_factory=dict)
    fault: str = ""
    torch: str
    date: str


def runners(folder: Path, pattern: str = "") -> dict[str, Path]:
    """The runners below `folder` by the name of their training, in order of path.

    Raises:
        AdvisorError: where there are none, or none with `pattern` in the name.
    """
    found = {path.stem.removeprefix("run_"): path.resolve() for path in sorted(folder.rglob("run_*.sh"))}
    if not found:
        raise AdvisorError(f"no runner in {folder}", expected="run_NAME.sh, which starts a training behind $PREFIX")
    chosen = {name: path for name, path in found.items() if any(part in name for part in pattern.split(","))}
    if not chosen:
        raise AdvisorError(f"nothing is named like {pattern!r}", expected="part of " + ", ".join(found))
    return chosen


def run(
    folder: Path,
    *,
    pattern: str = "",
    out: Path | None,
    baselines: Sequence[str],
    max_time_s: float,
    limit_s: float,
    runs: Path | None = None,
    say: Say,
) -> int:
    """Run each training; the file is written after each run of it, so that an end at any time loses nothing that was measured.

    Args:
        pattern: only trainings with this in their names; several parts are separated by commas.
        baselines: names of `BY_HAND`; with any the script as written runs by itself too.
        max_time_s: what each search may take, as `advisor apply --max-time`.
        limit_s: a run of a runner that takes longer is interrupted.
        runs: where what each run wrote is left, below the training's name.

    Raises:
        AdvisorError: without a GPU (exit code 5), or without runners.
    """
    import torch

    chosen = runners(folder, pattern)
    if not torch.cuda.is_available():
        raise AdvisorError("no benchmark here: no CUDA GPU", exit_code=ExitCode.GPU_REQUIRED)
    target = (out or results.folder() / "real.json").resolve()
    gpus = _visible(torch.cuda.device_count())
    book = Book(target, say)
    with contextlib.ExitStack() as stack:
        place = (
            runs.resolve() if runs else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="advisor-real-")))
        )
        waiting: queue.SimpleQueue[tuple[str, Path]] = queue.SimpleQueue()
        for item in chosen.items():
            waiting.put(item)
        orders = Orders(tuple(baselines), max_time_s, limit_s)
        lanes = [
            threading.Thread(target=_lane, args=(gpu, cores, waiting, place, book, orders), daemon=True)
            for gpu, cores in zip(gpus, _shares(len(gpus)), strict=True)
        ]
        for lane in lanes:
            lane.start()
        try:
            for lane in lanes:
                lane.join()
        except KeyboardInterrupt:
            orders.over.set()
            for lane in lanes:
                lane.join()
            raise
    return ExitCode.OK


@dataclass(frozen=True, slots=True)
class Orders:
    """What each training is run for. `over`: no further run begins, and the present ones are interrupted."""

    baselines: tuple[str, ...]
    max_time_s: float
    limit_s: float
    over: threading.Event = field(default_factory=threading.Event)


class Book:
    """The results on file: rows are put in place of earlier ones of the same training."""

    def __init__(self, target: Path, say: Say) -> None:
        self._target, self._say, self._lock = target, say, threading.Lock()

    def say(self, text: str) -> None:
        """A line for people, from any lane."""
        with self._lock:
            self._say(text)

    def put(self, row: RealRow) -> None:
        """On disk at once, beside what other processes have measured meanwhile."""
        with self._lock, results.alone(self._target):
            rows = {known["name"]: known for known in results.on_file(self._target)}
            rows[row.name] = storage.to_plain(row)
            results.write(self._target, "real", [rows[name] for name in sorted(rows)])


def _visible(count: int) -> list[str]:
    """The GPUs that this process may use, as a child's CUDA_VISIBLE_DEVICES names each."""
    named = [part.strip() for part in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if part.strip()]
    return named[:count] if len(named) >= count else [str(number) for number in range(count)]


def _shares(lanes: int) -> list[set[int]]:
    """The cores that this process may use, an equal part for each lane."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    each = len(cores) // lanes
    return [set(cores[i * each : (i + 1) * each]) for i in range(lanes)]


def _lane(
    gpu: str,
    cores: set[int],
    waiting: queue.SimpleQueue[tuple[str, Path]],
    place: Path,
    book: Book,
    orders: Orders,
) -> None:
    """One GPU and its cores: trainings one after the other, while there are any."""
    if cores:
        os.sched_setaffinity(0, cores)  # this thread's, and so of what it starts
    while not orders.over.is_set():
        try:
            name, runner = waiting.get_nowait()
        except queue.Empty:
            return
        try:
            RealTraining(name, runner, gpu, place / name, book, orders).measure()
        except (AdvisorError, OSError) as error:
            book.say(f"{name}: {error}")


@dataclass(frozen=True, slots=True)
class RealTraining:
    """One training on one GPU."""

    name: str
    runner: Path
    gpu: str
    folder: Path
    book: Book
    orders: Orders

    def measure(self) -> None:
        """`apply --auto`, then what people do by hand; the row is on file after each."""
        import torch

        row = RealRow(name=self.name, torch=torch.__version__, date=datetime.date.today().isoformat())
        search = self._folder("apply")
        command = ("apply", "--auto", "--max-time", f"{self.orders.max_time_s:g}s", "-o", str(search / "run"))
        self._start((sys.executable, "-m", "advisor", *command), search)
        row = searched(row, search)
        self.book.put(row)
        self.book.say(f"{self.name}: {told(row)}")
        if not self.orders.baselines or row.plain_ms is None:
            return
        warmup, steps = lengths(row.plain_ms / 1e3)
        plain = self._fresh(PLAIN, (), warmup, steps)
        for tuned in self.orders.baselines:
            if self.orders.over.is_set() or not plain.step_us:
                return
            row = by_hand(row, tuned, plain, self._fresh(tuned, BY_HAND[tuned], warmup, steps))
            self.book.put(row)

    def _fresh(self, kind: str, items: Sequence[str], warmup: int, steps: int) -> records.Measurement:
        """A fresh run with these changes; one without steps where it came to nothing."""
        folder = self._folder(kind)
        command = ["--out", str(folder / "run"), "--warmup", str(warmup), "--steps", str(steps)]
        command += ["--with", ",".join(items)] if items else []
        self._start((sys.executable, "-m", "advisor.bench.fresh", *command), folder)
        try:
            return storage.load(folder / "run" / records.MEASURE_FILE, records.Measurement)
        except AdvisorError:
            return records.Measurement()

    def _folder(self, kind: str) -> Path:
        folder = self.folder / kind
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def _start(self, prefix: Sequence[str], folder: Path) -> None:
        """The runner with this before its script, to its end or to the limit; its output, with the time of each line, in `folder`."""
        root = str(kernels_dir().parent)
        environment = dict(
            os.environ,
            PREFIX=" ".join(prefix),
            CUDA_VISIBLE_DEVICES=self.gpu,
            PYTHONPATH=os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", "")))),
            PYTHONUNBUFFERED="1",
            NO_COLOR="1",
        )
        self.book.say(f"{self.name}: {folder.name}")
        process = subprocess.Popen(
            ["bash", str(self.runner)],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that it ends with all that it has started
            preexec_fn=_interruptible,
        )
        writer = threading.Thread(target=_copy, args=(process, folder / LOG_FILE), daemon=True)
        writer.start()
        ends, told = time.monotonic() + self.orders.limit_s, False
        while process.poll() is None:
            late = time.monotonic() - ends
            if not told and (late > 0 or self.orders.over.is_set()):
                told, ends = True, min(ends, time.monotonic())
                _signal(process, signal.SIGINT)
            elif late > GRACE_S:
                _signal(process, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.5)
        _signal(process, signal.SIGKILL)  # what it has left behind
        writer.join(5.0)


def _interruptible() -> None:
    """What is begun in the background of a shell ignores Ctrl-C, and so would all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(process.pid, number)


def _copy(process: subprocess.Popen[bytes], path: Path) -> None:
    began = time.monotonic()
    assert process.stdout is not None  # it was asked for
    with path.open("wb", buffering=0) as log:
        for line in process.stdout:
            log.write(f"{time.monotonic() - began:7.1f} ".encode() + line)


def searched(row: RealRow, folder: Path) -> RealRow:
    """The row with what `apply` has left in `folder`."""
    try:
        log = storage.load(folder / "run" / records.TRIALS_FILE, TrialLog)
    except AdvisorError:
        return replace(row, fault=_last_line(folder / LOG_FILE))
    profile = None
    with contextlib.suppress(AdvisorError):
        profile = storage.load(folder / "run" / PROFILE_FILE, StepProfile)
    step = profile.step_us or profile.wall_us if profile is not None else None
    row = replace(
        row,
        script=" ".join((Path(log.script).name, *log.argv)),
        start_s=profile.start_s if profile is not None else None,
        plain_ms=step.median / 1e3 if step is not None else None,
        first_proof_s=log.proved_s,
        kept=tuple(v.transform for v in log.verdicts if v.status == Status.KEPT),
        not_kept=tuple(f"{v.transform}: {v.status}, {v.reason}" for v in log.verdicts if v.status != Status.KEPT),
        notes=log.notes,
        apply_s=log.seconds,
        spent_s=dict(log.spent),
        fault=log.fault,
    )
    elsewhere = [note for note in profile.notes if note.startswith(OWN_GPU)] if profile is not None else []
    if elsewhere:  # beside another training, it may be
        return replace(row, kept=(), first_proof_s=None, fault=elsewhere[0])
    stack = log.stack
    if stack is None:
        return row
    row = replace(row, proved=stack.passed is True, detail=stack.detail)
    if not stack.plain_us or not stack.stack_us:
        return row
    return replace(
        row,
        plain_ms=min(stack.plain_us) / 1e3,
        advisor_ms=min(stack.stack_us) / 1e3,
        speedup=stack.speedup,
        speedup_low=stack.speedup_low,
        speedup_high=stack.speedup_high,
        device_speedup=stack.device_speedup,
        device_speedup_low=stack.device_speedup_low,
        device_speedup_high=stack.device_speedup_high,
    )


def by_hand(row: RealRow, tuned: str, plain: records.Measurement, run: records.Measurement) -> RealRow:
    """The row with one more run that was tuned by hand, held against the script as written in the same session."""
    if not run.step_us:
        return row
    found = proof.ratio([plain], [run], flow=False)
    if found.bounds is None:
        return row
    hand = {**row.hand, tuned: found.fast_us[0] / 1e3}
    return replace(row, hand=hand, hand_speedup=max(row.hand_speedup or 0.0, found.bounds[1]))


def told(row: RealRow) -> str:
    """The result in a line."""
    if row.fault:
        return f"no result: {row.fault}"
    if not row.proved or row.speedup is None:
        return f"nothing proved in {row.apply_s or 0.0:.0f} s; {row.detail}"
    device = f", {row.device_speedup:.2f}× of the device's time" if row.device_speedup else ""
    return f"{row.speedup:.2f}× ({row.speedup_low:.2f} to {row.speedup_high:.2f}){device}, after {row.first_proof_s or 0.0:.0f} s"


def _last_line(path: Path) -> str:
    try:
        lines = [line[8:].strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return "it wrote nothing"
    return next((line[:200] for line in reversed(lines) if line), "it wrote nothing")
