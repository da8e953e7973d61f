"""The user's script as a search starts it, again and again: its orders, what it tells, its time, its files put back."""

from __future__ import annotations

import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from advisor.core.units import time_text
from advisor.distributed import starting
from advisor.distributed.fallen import Fallen
from advisor.distributed.place import LOST, REFUSED
from advisor.loop.session import Session
from advisor.loop.waiting import WAITING, WaitStage, missing, patience_s
from advisor.profiling.beside import bytecode
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.launcher import Exit
from advisor.trials import records, spent
from advisor.userfiles import restore

_HUNG = "a process of the script finished its work but hung in native exit handlers, so advisor ended it"
_CRASHED = "a process of the script finished its work but crashed in native code as it ended; what it measured counts"
# A rank's lines begin with its number where torchrun tells the error.
_RANK, _TRACEBACK, _ERROR = (
    re.compile(r"^\[rank\d+\]: ?"),
    "Traceback (most recent call last)",
    re.compile(r"[A-Za-z_][\w.]*(: |$)"),
)
_READ_BYTES = 1 << 16  # from the end of the output: an error of torch's may take pages
Say = Callable[[str], None]
Launch = Callable[..., Exit]

# Steps before the first candidate: discovery looks for three, libraries set themselves up in the first.
WARMUP_STEPS = 5
# A process that trains on after all its limits is ended.
GRACE_S = 60.0


@dataclass(frozen=True, slots=True)
class Ended:
    """How one process of the script ended."""

    exit: Exit

    @property
    def fault(self) -> str:
        """What advisor has switched itself off for in it; "" while it has not."""
        return self.exit.fault

    @property
    def failed(self) -> bool:
        """It did not come to a good end, its own or ours."""
        return self.exit.code != 0 or self.exit.timed_out


@dataclass(slots=True, eq=False)
class Script:
    """All processes of one search, one after the other; and what is known of the script from them."""

    command: ScriptCommand
    run_dir: Path
    launch: Launch
    say: Say
    first_step_s: float | None = None  # what a process has taken to its first step; None where none was seen before
    notes: list[str] = field(default_factory=list)
    model_hash: str = ""
    seconds: Counter[str] = field(default_factory=Counter)  # by phase of spent.py
    interrupted: bool = False
    displaced: bool = False  # a file of the user's could not be put back
    failed: bool = False  # whatever candidate is on
    fault: str = ""  # of advisor's own: no process can be measured
    stepless: str = ""  # why processes have no steps
    refused: str = ""  # why a rank has refused to divide it
    rank_failed: str = ""  # the rank that ended first or held the others up, and how
    on_trial: str = ""  # the change that the latest process has said that it tries, and has no verdict on
    _told_reason: str = ""  # of the latest verdict
    code: int = 0  # the latest process's own exit code; 0 where advisor ended it
    _starts_s: list[float] = field(default_factory=list)  # what search processes took until their first trial
    _until_unix_s: float = 0.0  # of the latest process, when its trials are over
    _fallen: Fallen = field(default_factory=Fallen)  # of the latest process's ranks
    _said_from: int = 0  # in the file of its output, where the latest process's begins

    @property
    def last_line(self) -> str:
        """What the latest process said last, of an error its first line; "" where it wrote nothing."""
        return last_line(self.run_dir / records.OUTPUT_FILE, since=self._said_from)

    @property
    def over(self) -> bool:
        """No further process may be started: the user has said so, or it would find other files than the first."""
        return self.interrupted or self.displaced or bool(self.fault or self.stepless)

    @property
    def why_over(self) -> str:
        """The reason for `over`, as people read it; "" where there is none."""
        if self.interrupted:
            return "interrupted"
        return "files could not be put back" if self.displaced else self.fault or self.stepless

    @property
    def why_unmeasured(self) -> str:
        """Why the latest process gave no measurement: what it said last, as an error's first line is."""
        return self.why_over or self.last_line or "it ended before its steps were timed"

    @property
    def start_s(self) -> float:
        """What search processes took until their first trial; 0.0 before the first one has told."""
        return fmean(self._starts_s) if self._starts_s else 0.0

    def start(self, mode: str, *, timeout_s: float, phase: str = "", **orders: Any) -> Ended:
        """Run the script in this mode to its end; its time counts as `phase`, or as the phases that a search tells of.

        Afterwards the user's files are as they were, or `displaced` is set. Ctrl-C, and a request to end, set `interrupted`.
        """
        began = time.monotonic()
        session = self.orders(mode, **orders)
        try:
            ended = self.launch(
                self.command,
                session,
                on_progress=self.told,
                timeout_s=timeout_s,
                environment=bytecode.variables(),
                output=self.run_dir / records.OUTPUT_FILE,
            )
        except KeyboardInterrupt:
            ended = Exit(code=130, signal=int(signal.SIGINT))
        finally:
            self.put_back()
        return self.ended(ended, time.monotonic() - began, phase)

    def orders(self, mode: str, **orders: Any) -> Session:
        """The orders of a process that begins now, or goes on with these."""
        (self.run_dir / records.TRIALS_DIR / records.SPENT_FILE).unlink(missing_ok=True)
        self._fallen = Fallen()
        self._until_unix_s = float(orders.get("deadline_unix_s") or 0.0)
        with suppress(OSError):
            self._said_from = (self.run_dir / records.OUTPUT_FILE).stat().st_size
        return Session(
            mode=mode,
            script=self.command.words[0],
            argv=self.command.words[1:],
            protect_files=True,
            first_step_s=patience_s(self.first_step_s),
            **{"run_dir": str(self.run_dir), "warmup": WARMUP_STEPS, **orders},
        )

    def ended(self, ended: Exit, wall_s: float, phase: str = "", *, started: bool = True) -> Ended:
        """A process has ended so, after this time in its latest orders; the files are back. `started`: with these, not with others."""
        self._account(wall_s, phase, started=started)
        told = {_HUNG: ended.hung, _CRASHED: ended.crashed}
        self.notes += [note for note, is_so in told.items() if is_so and note not in self.notes]
        if ended.interrupted or ended.code == 130 or ended.signal == signal.SIGINT:
            self.interrupted = True
        of_ours = ended.timed_out or ended.stopped_by_advisor or ended.fault or ended.gave_up
        self.code = 0 if of_ours else ended.code
        if ended.code and not (ended.timed_out or self.interrupted or self.rank_failed or self.refused):
            said = _tail(self.run_dir / records.OUTPUT_FILE, self._said_from)
            self.rank_failed = self._fallen.told or starting.dead_rank(said)
        self._look_for_steps(ended)
        return Ended(ended)

    def _left(self) -> str:
        """What is left of a search that has an end, as a message goes on."""
        left_s = self._until_unix_s - time.time()
        return f" (at most {time_text(left_s * 1e6)} left for trials)" if left_s > 0 else ""

    def _look_for_steps(self, ended: Exit) -> None:
        """No further process is started where this one had no step, and not by the script's doing or somebody's wish."""
        if ended.reached is WaitStage.STEPS or self.interrupted:
            return
        if ended.fault:
            self.fault = f"advisor switched itself off in the script: {ended.fault}"
        elif ended.gave_up:
            self._is_stepless(ended.gave_up)
        elif not (ended.code or ended.stopped_by_advisor or ended.timed_out):
            self._is_stepless(f"the script came to its end: {missing(ended.reached)}")

    def _is_stepless(self, why: str) -> None:
        """Where its profile had steps, it is advisor that has lost them."""
        if self.first_step_s is None:
            self.stepless = why
        else:
            self.fault = f"{why} (the first one came {self.first_step_s:.0f} s after the start when it was profiled)"

    def put_back(self) -> None:
        """The user's files are as they were before the search, or `displaced` is set and a note says which are not."""
        for problem in restore.restore(self.run_dir):
            self.notes.append(f"could not be put back: {problem}")
            self.displaced = self.failed = True
        starting.clear(self.run_dir)

    def _account(self, wall_s: float, phase: str, *, started: bool) -> None:
        told = {} if phase else records.spent(self.run_dir)
        by_phase = {phase: wall_s} if phase else spent.of_process(wall_s, told)
        self.seconds.update(by_phase)
        if told:
            self._starts_s.append(by_phase[spent.START] if started else self.first_step_s or 0.0)

    def told(self, event: dict[str, Any]) -> None:
        """One event of a process."""
        kind, name = event.get("event"), event.get("title") or event.get("transform")
        self._fallen.note(event)
        if kind == "trial":
            self.on_trial = str(event.get("transform"))
            pairs = event.get("pairs")
            again = f"going on with {name} ({pairs} pairs so far)" if pairs else ""
            self.say(again or f"trying {name}{self._left()}")
        elif kind == "verdict":
            self.on_trial = ""
            self.model_hash = str(event.get("model") or self.model_hash)
            reason = str(event.get("reason"))
            status = "open" if records.UNDECIDED in reason else event.get("status")
            self.say(f"{name}: {status}, {'as above' if reason == self._told_reason else reason}")
            self._told_reason = reason
        elif kind == "postponed":
            self.say(f"{name}: {event.get('reason')}; advisor tries it again after CUDA graphs")
        elif kind == WAITING:
            self.say(str(event.get("text")))
        elif kind == REFUSED:
            self.refused = f"{event.get('text')}. {event.get('fix') or ''}".rstrip()
        elif kind == LOST:
            self.rank_failed = self.rank_failed or str(event.get("error"))
        elif kind == "fault":
            self.say(f"advisor switched itself off in the script: {event.get('error')}")


def last_line(path: Path, *, since: int = 0) -> str:
    """The last line of the script's output; where Python has told an error last, the first line of that one's own text.

    Behind it come hints, which may speak of something else: of custom operators where generated code asserts on a weight's strides.

    Args:
        path: of the output.
        since: bytes of it to leave out, at its beginning.
    """
    lines = [_RANK.sub("", line) for line in _tail(path, since).splitlines()]
    told = [at for at, line in enumerate(lines) if line.startswith(_TRACEBACK)]
    if told:
        error = next((line for line in lines[told[-1] + 1 :] if line.strip() and not line.startswith(" ")), "")
        if _ERROR.match(error):
            return error.strip()[:300]
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def _tail(path: Path, since: int) -> str:
    """The end of the file behind so many bytes; "" where it cannot be read."""
    try:
        with open(path, "rb") as stream:
            stream.seek(max(since, stream.seek(0, 2) - _READ_BYTES))
            return stream.read().decode("utf-8", "replace")
    except OSError:
        return ""
