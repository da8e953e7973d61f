"""Starts the user's script as a child process and waits for it, without getting in its way. Never imports torch.

The child is in the terminal's own process group, with the supervisor's working directory, standard streams and
interpreter; only the environment carries something new: `PYTHONPATH` begins with the bootstrap folder, and
`ADVISOR_SESSION` names the orders.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.core import storage
from advisor.core.errors import AdvisorError
from advisor.loop.records import PROGRESS_FILE, SESSION_FILE
from advisor.loop.session import LEAVING, SESSION_VARIABLE, Session, disabled
from advisor.loop.waiting import WAITING, Waiting, WaitStage
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.progress import Progress
from advisor.profiling.beside.tree import end_tree, forwarding
from advisor.resources import BOOTSTRAP
from advisor.userfiles import trackers
from advisor.userfiles.protect import FILES_VARIABLE, SUPERVISOR_VARIABLE

ATTACHED_VARIABLE = "ADVISOR_ATTACHED"  # set by the process that is observed: what it starts is left alone
POLL_S = 0.1
# What native code that goes wrong ends a process with: a profiler, or a thread while the interpreter is taken apart around it.
NATIVE_FAULTS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)
LEAVING_S = 15.0  # for the exit handlers of native libraries, once Python's have run in a script that was stopped


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How the child ended. `code` is what a shell would show (128 + n for signal n); `signal` is n, or 0."""

    code: int
    signal: int = 0
    stopped_by_advisor: bool = False
    timed_out: bool = False
    interrupted: bool = False  # the user has asked for an end, by a signal, whatever the script made of it
    hung: bool = False  # it was stopped by advisor and did all it had to do, but native code kept it from ending
    crashed: bool = False  # so it was, and did, and native code crashed as it ended
    seconds: float = 0.0
    files_written: tuple[str, ...] = ()  # told by the child in `file` events
    reached: WaitStage = WaitStage.STEPS
    first_step_s: float | None = None  # from the start
    fault: str = ""  # what advisor has switched itself off for in it
    gave_up: str = ""  # why it was ended before it had shown a step


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A copy of the user's project that the child runs in."""

    folder: Path  # its working directory
    python_path: str  # folders to go before the user's own `PYTHONPATH`


def launch(
    command: ScriptCommand,
    session: Session,
    *,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    timeout_s: float | Callable[[], float | None] | None = None,
    environment: Mapping[str, str] | None = None,
    output: Path | None = None,
    ahead: Callable[[], subprocess.Popen[Any] | None] | None = None,
    elsewhere: Elsewhere | None = None,
) -> Exit:
    """Write the session's orders, run the command to its end, and pass on what it tells.

    A process whose training is thrown away is ended once nothing can be measured in it any more (waiting.py).

    Args:
        on_progress: called in this thread with each event that the child appends to `progress.jsonl`, and with those of
            waiting.py's that say what is waited for.
        timeout_s: end the child and all its descendants after this time; what may change meanwhile is asked for.
        environment: variables to set beside the inherited ones.
        output: append the child's stdout and stderr to this file; None leaves both untouched.
        ahead: gives, once the orders lie ready, a process of the command that was started ahead of them (relay.py), if there is one.
        elsewhere: where the child runs; None for this process's own folder.

    Returns:
        How the child ended. On an exception, of `on_progress` too, the child's tree is ended first.

    Raises:
        AdvisorError: when the run folder cannot be written or the command cannot be started.
    """
    folder = session.folder
    progress = Progress(folder / PROGRESS_FILE)
    started = time.monotonic()
    variables = child_environment(command, session, {**(environment or {}), **_path(elsewhere)})
    told = _Told(progress, Waiting(session, watched=SESSION_VARIABLE in variables), on_progress)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        storage.save(folder / SESSION_FILE, session)
        stream = open(output, "ab") if output is not None else None  # noqa: SIM115 – closed once the child has it
    except OSError as error:
        raise AdvisorError(f"cannot write to {folder} ({error.strerror})", fix="Name another folder with -o.") from None
    try:
        child = (ahead() if ahead is not None else None) or subprocess.Popen(
            command.started,
            env=variables,
            cwd=None if elsewhere is None else elsewhere.folder,
            stdout=stream,
            stderr=subprocess.STDOUT if stream is not None else None,
        )
    except OSError as error:
        raise AdvisorError(f"cannot start {command.started[0]} ({error.strerror})") from None
    finally:
        if stream is not None:
            stream.close()
    try:
        return told.until_ended(child, started, timeout_s if callable(timeout_s) else lambda: timeout_s)
    except BaseException:
        end_tree(child)
        raise


def _path(elsewhere: Elsewhere | None) -> dict[str, str]:
    if elsewhere is None or not elsewhere.python_path:
        return {}
    own = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(part for part in (elsewhere.python_path, own) if part)}


class _Told:
    """What one child has told so far."""

    def __init__(
        self, progress: Progress, waiting: Waiting, on_progress: Callable[[dict[str, Any]], None] | None
    ) -> None:
        self._progress, self._waiting, self._on_progress = progress, waiting, on_progress
        self._stopped = False
        self._left = 0.0  # when the stopped script's own clean-up was over
        self._files: list[str] = []

    def _pass_on(self, pid: int) -> None:
        for event in self._progress.read():
            self._waiting.told(event)
            self._stopped = self._stopped or event.get("event") == "stopped"
            if event.get("event") == LEAVING and event.get("pid") == pid:
                self._left = time.monotonic()
            if event.get("event") == "file" and "path" in event:
                self._files.append(str(event["path"]))
            if self._on_progress is not None:
                self._on_progress(event)
        if (line := self._waiting.line()) and self._on_progress is not None:
            self._on_progress({"event": WAITING, "text": line})

    def until_ended(self, child: subprocess.Popen[Any], started: float, timeout_s: Callable[[], float | None]) -> Exit:
        """Pass on what the child tells until it has ended, or has to."""
        timed_out = hung = False
        with forwarding(child) as asked:
            while True:
                try:
                    code = child.wait(timeout=POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    pass
                self._pass_on(child.pid)
                if asked:
                    self._waiting.asked()
                limit_s = timeout_s()
                if limit_s is not None and time.monotonic() - started > limit_s and not timed_out:
                    timed_out = True
                    end_tree(child)
                elif self._waiting.over() and not (timed_out or hung):
                    end_tree(child)
                elif self._left and time.monotonic() - self._left > LEAVING_S and not (timed_out or hung):
                    hung = True
                    end_tree(child)
        self._pass_on(child.pid)
        crashed = self._stopped and not timed_out and -code in NATIVE_FAULTS
        if hung or crashed:
            code = 0  # it had come to the end that was asked for
        number = -code if code < 0 else 0
        return Exit(
            code=128 + number if number else code,
            signal=number,
            stopped_by_advisor=self._stopped,
            timed_out=timed_out,
            interrupted=bool(asked),
            hung=hung,
            crashed=crashed,
            seconds=time.monotonic() - started,
            files_written=tuple(dict.fromkeys(self._files)),
            reached=self._waiting.stage,
            first_step_s=self._waiting.first_step_s,
            fault=self._waiting.fault,
            gave_up=self._waiting.gave_up,
        )


def child_environment(command: ScriptCommand, session: Session, extra: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: this process's, the orders, and the bootstrap folder in front of `PYTHONPATH`."""
    variables = {**os.environ, **extra, **dict(command.variables)}
    if disabled(variables):
        return variables  # a true no-op
    old = variables.get("PYTHONPATH", "")
    # An empty entry would put the working directory on the child's path: no trailing separator.
    variables["PYTHONPATH"] = os.pathsep.join(part for part in (str(BOOTSTRAP), old) if part)
    variables[SESSION_VARIABLE] = str((session.folder / SESSION_FILE).resolve())
    variables[SUPERVISOR_VARIABLE] = "0" if command.literal or command.agent else str(os.getpid())
    variables.pop(ATTACHED_VARIABLE, None)  # but not where an outer run, that is thrown away, sets files aside
    if session.protect_files:
        variables[FILES_VARIABLE] = str(session.protecting.resolve())
        variables.update(trackers.offline(session.protecting))
    return variables
