"""Starts the user's script as a child process and waits for it, without getting in its way. Never imports torch.

The child is in the terminal's own process group, with the supervisor's working directory, standard streams and
interpreter; only the environment carries something new: `PYTHONPATH` begins with the bootstrap folder, and
`ADVISOR_SESSION` names the orders.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode
from advisor.loop.records import PROGRESS_FILE, SESSION_FILE
from advisor.loop.session import LEAVING, SESSION_VARIABLE, Session, disabled
from advisor.loop.waiting import WAITING, Stage, Waiting
from advisor.profiling.beside import notebooks
from advisor.resources import BOOTSTRAP
from advisor.userfiles import trackers
from advisor.userfiles.protect import FILES_VARIABLE, SUPERVISOR_VARIABLE

ATTACHED_VARIABLE = "ADVISOR_ATTACHED"  # set by the process that is observed: what it starts is left alone
POLL_S = 0.1
LEAVING_S = 15.0  # for the exit handlers of native libraries, once Python's have run in a script that was stopped
GRACE_S = 5.0  # between asking a process tree to end and ending it


class BrokenScript(AdvisorError):
    """The script cannot be compiled. Its text is Python's own message, and the exit code is Python's: 1."""

    def __init__(self, message: str) -> None:
        super().__init__(message, exit_code=ExitCode.FINDINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptCommand:
    """What to run. `name` is the script or module as the user wrote it; `literal` says that `argv` is a command of the
    user's own (torchrun, a shell script), in which some descendant trains. `agent` starts the script as several ranks: it stands in
    the interpreter's place (distributed/starting.py)."""

    argv: tuple[str, ...]
    name: str
    arguments: tuple[str, ...] = ()
    literal: bool = False
    agent: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()  # for its environment

    @property
    def started(self) -> tuple[str, ...]:
        """The words of the process that is started."""
        return (*self.agent, *self.argv[1:]) if self.agent else self.argv

    @property
    def words(self) -> tuple[str, ...]:
        """What `parse` makes this command of again: a script, `-m` or a program first, then what follows it."""
        if self.name.endswith(notebooks.SUFFIX):  # the script was made of it
            return (self.name, *self.arguments)
        return self.argv if self.literal else self.argv[1:]

    @classmethod
    def parse(cls, words: Sequence[str], module: bool = False) -> ScriptCommand:
        """Make a command of `train.py args`, `-m pkg.mod args` (or `pkg.mod args` with `module`) or `torchrun … train.py`.

        The script is compiled, not run, so that a broken one is told at once.

        Raises:
            BrokenScript: with Python's own message, for a script with a syntax error.
            AdvisorError: when there is nothing to run, or it is missing, a folder, or unreadable.
        """
        if not module and words[:1] == ("-m",):
            words, module = words[1:], True
        if not words or not words[0]:
            raise AdvisorError("no script given", expected="a Python script, -m with a module, or a command")
        first, arguments = words[0], tuple(words[1:])
        if module:
            source = _module_file(first)
            if source is not None:
                _compile(source)
            return cls(argv=(sys.executable, "-m", first, *arguments), name=first, arguments=arguments)
        path = Path(first)
        if path.suffix == notebooks.SUFFIX:
            made = notebooks.as_script(path)
            _compile(made)
            return cls(argv=(sys.executable, str(made), *arguments), name=first, arguments=arguments)
        if path.is_dir() and not (path / "__main__.py").is_file():
            raise AdvisorError(f"{first} is a folder", expected="a Python script", fix=_scripts_in(path))
        # A program of Python's (torchrun) has an interpreter of its own, so it is run as it is.
        if is_script(path) or path.is_dir() or (_is_python(path) and shutil.which(first) is None):
            if not path.exists():
                raise AdvisorError(f"no script {first}", expected="a file that exists", fix=_nearest(path))
            _compile(path / "__main__.py" if path.is_dir() else path)
            return cls(argv=(sys.executable, first, *arguments), name=first, arguments=arguments)
        # As the shell finds it, else beside the interpreter: an environment that is not activated has its torchrun there.
        found = shutil.which(first)
        program = found or shutil.which(first, path=str(Path(sys.executable).parent))
        if program is None:
            raise AdvisorError(
                f"neither a script nor a command: {first}", expected="a Python script or a program", fix=_nearest(path)
            )
        refused = _isolating(Path(program), arguments)
        if refused:
            raise AdvisorError(
                f"{first} {refused} keeps advisor out of the script",
                expected="an interpreter that reads PYTHONPATH and runs sitecustomize",
                fix=f"Leave {refused} away while measuring.",
            )
        argv = (first if found else program, *arguments)
        return cls(argv=argv, name=script_name((first, *arguments)), arguments=arguments, literal=True)


def script_name(words: Sequence[str]) -> str:
    """The script or module in the words of a command, or the program where it names neither."""
    first, *arguments = words
    if first == "-m" and arguments:
        return arguments[0]
    if is_script(Path(first)):
        return first
    return next((word for word in arguments if word.endswith(".py")), first)


def is_script(path: Path) -> bool:
    """Whether it is named as Python's source files are."""
    return path.suffix.lower() in (".py", ".pyw")


def _isolating(program: Path, arguments: Sequence[str]) -> str:
    """The interpreter's option that makes it pass over what attaches advisor (-I, -E, -S), or nothing."""
    if not re.fullmatch(r"(python|pypy)[\d.]*", program.name):
        return ""
    words = iter(arguments)
    for word in words:
        if not re.fullmatch(r"-[a-zA-Z]+", word) or word[1] in "cm":
            return ""
        if word in ("-W", "-X"):
            next(words, None)
        elif word[1] not in "WX" and set(word) & set("IES"):
            return word
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """How the child ended. `code` is what a shell would show (128 + n for signal n); `signal` is n, or 0."""

    code: int
    signal: int = 0
    stopped_by_advisor: bool = False
    timed_out: bool = False
    interrupted: bool = False  # the user has asked for an end, by a signal, whatever the script made of it
    hung: bool = False  # it was stopped by advisor and did all it had to do, but native code kept it from ending
    seconds: float = 0.0
    files_written: tuple[str, ...] = ()  # told by the child in `file` events
    reached: Stage = Stage.STEPS
    first_step_s: float | None = None  # from the start
    fault: str = ""  # what advisor has switched itself off for in it
    gave_up: str = ""  # why it was ended before it had shown a step


def launch(
    command: ScriptCommand,
    session: Session,
    *,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    timeout_s: float | Callable[[], float | None] | None = None,
    environment: Mapping[str, str] | None = None,
    output: Path | None = None,
    ahead: Callable[[], subprocess.Popen[Any] | None] | None = None,
    cwd: Path | None = None,
    before_path: str = "",
) -> Exit:
    """Write the session's orders, run the command to its end, and pass on what it tells.

    A process whose training is thrown away is ended once nothing can be measured in it any more (waiting.py).

    Args:
        on_progress: called in this thread with each event that the child appends to `progress.jsonl`, and with those of
            waiting.py's that say what is waited for.
        timeout_s: end the child and all its descendants after this time; what may change meanwhile is asked for.
        environment: variables to set beside the inherited ones.
        output: append the child's stdout and stderr to this file; None leaves both untouched.
        cwd: the child's working directory; None for this process's own.
        before_path: folders to go before the user's own `PYTHONPATH`.
        ahead: gives, once the orders lie ready, a process of the command that was started ahead of them (relay.py), if there is one.

    Returns:
        How the child ended. On an exception, of `on_progress` too, the child's tree is ended first.

    Raises:
        AdvisorError: when the run folder cannot be written or the command cannot be started.
    """
    folder = session.folder
    progress = _Progress(folder / PROGRESS_FILE)
    started = time.monotonic()
    own = os.environ.get("PYTHONPATH", "")
    extra = {"PYTHONPATH": os.pathsep.join(part for part in (before_path, own) if part)} if before_path else {}
    variables = child_environment(command, session, {**(environment or {}), **extra})
    waiting = Waiting(session, watched=SESSION_VARIABLE in variables)
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
            cwd=cwd,
            stdout=stream,
            stderr=subprocess.STDOUT if stream is not None else None,
        )
    except OSError as error:
        raise AdvisorError(f"cannot start {command.started[0]} ({error.strerror})") from None
    finally:
        if stream is not None:
            stream.close()
    timed_out = stopped = hung = False
    left = 0.0  # when the stopped script's own clean-up was over
    files: list[str] = []

    def pass_on() -> None:
        nonlocal stopped, left
        for event in progress.read():
            waiting.told(event)
            stopped = stopped or event.get("event") == "stopped"
            if event.get("event") == LEAVING and event.get("pid") == child.pid:
                left = time.monotonic()
            if event.get("event") == "file" and "path" in event:
                files.append(str(event["path"]))
            if on_progress is not None:
                on_progress(event)
        if (line := waiting.line()) and on_progress is not None:
            on_progress({"event": WAITING, "text": line})

    try:
        with _forwarding(child) as asked:
            while True:
                try:
                    code = child.wait(timeout=POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    pass
                pass_on()
                limit_s = timeout_s() if callable(timeout_s) else timeout_s
                if limit_s is not None and time.monotonic() - started > limit_s and not timed_out:
                    timed_out = True
                    end_tree(child)
                elif waiting.over() and not (timed_out or hung):
                    end_tree(child)
                elif left and time.monotonic() - left > LEAVING_S and not (timed_out or hung):
                    hung = True
                    end_tree(child)
        pass_on()
    except BaseException:
        end_tree(child)
        raise
    if hung:
        code = 0  # it had come to the end that was asked for
    number = -code if code < 0 else 0
    return Exit(
        code=128 + number if number else code,
        signal=number,
        stopped_by_advisor=stopped,
        timed_out=timed_out,
        interrupted=bool(asked),
        hung=hung,
        seconds=time.monotonic() - started,
        files_written=tuple(dict.fromkeys(files)),
        reached=waiting.stage,
        first_step_s=waiting.first_step_s,
        fault=waiting.fault,
        gave_up=waiting.gave_up,
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


def end_tree(child: subprocess.Popen[Any]) -> None:
    """End a child and all its descendants: asked first, killed after five seconds. Returns when the child is gone."""
    if child.poll() is not None:
        return
    tree = [child.pid, *_descendants(child.pid)]
    with suppress(OSError):
        child.terminate()
    with suppress(subprocess.TimeoutExpired):
        child.wait(timeout=GRACE_S)
    # Descendants outlive a killed parent, so they are taken from the list made before.
    for pid in [*_descendants(child.pid), *tree[1:]]:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    if child.poll() is None:
        child.kill()
        child.wait()


class _Progress:
    """Reads `progress.jsonl` as it grows; a line that is not whole yet is left for the next time."""

    def __init__(self, path: Path) -> None:
        self._path, self._rest = path, b""
        try:
            self._offset = path.stat().st_size  # what an earlier child told is not this child's
        except OSError:
            self._offset = 0

    def read(self) -> Iterator[dict[str, Any]]:
        try:
            with open(self._path, "rb") as stream:
                stream.seek(self._offset)
                data = stream.read()
        except OSError:
            return
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a line cut off by a kill
            if isinstance(event, dict):
                yield event


@contextmanager
def _forwarding(child: subprocess.Popen[Any]) -> Iterator[list[int]]:
    """Signals that are meant for the script reach it once, and are in the list. A second Ctrl-C kills it."""
    asked: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield asked  # Python delivers signals to the main thread only
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        if asked.count(number) > 1:
            child.kill()
        elif not _terminal_sends_to_group():
            child.send_signal(number)

    def forward(number: int, frame: FrameType | None) -> None:
        asked.append(number)
        child.send_signal(number)

    handlers: dict[int, Any] = {signal.SIGINT: interrupt, signal.SIGTERM: forward}
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup stays nohup
        handlers[signal.SIGHUP] = forward
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _terminal_sends_to_group() -> bool:
    """True when this process is in the foreground of a terminal: its Ctrl-C has then reached the child as well."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _descendants(pid: int) -> list[int]:
    """All processes below `pid`, by /proc; none where there is no /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = entry.read_text()
        except OSError:
            continue
        # "pid (command) state ppid …": the command may hold spaces and parentheses.
        children.setdefault(int(text[text.rindex(")") + 1 :].split()[1]), []).append(int(entry.parent.name))
    found, queue = [], [pid]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _compile(path: Path) -> None:
    try:
        source = path.read_bytes()
    except OSError as error:
        raise AdvisorError(f"{path} cannot be read ({error.strerror})", expected="a readable script") from None
    if source[:4] == b"PK\x03\x04":
        return  # a zip application
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the script will show its own
        try:
            compile(source, str(path), "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            told = "".join(traceback.format_exception_only(type(error), error)).rstrip()
            raise BrokenScript(told if getattr(error, "filename", None) else f"{path}: {told}") from None


def _module_file(name: str) -> Path | None:
    """The file that `-m name` would run, when it lies below the working directory; else Python itself shall say."""
    base = Path(*name.split("."))
    for candidate in (base / "__main__.py", base.with_suffix(".py") if base.suffix == "" else base):
        if candidate.is_file():
            return candidate
    return None


def _is_python(path: Path) -> bool:
    """A file without suffix that says it is Python's in its first line."""
    try:
        with open(path, "rb") as stream:
            line = stream.readline(200)
    except OSError:
        return False
    return line.startswith(b"#!") and b"python" in line


def _nearest(path: Path) -> str:
    try:
        names = [entry.name for entry in (path.parent if path.parent.name else Path()).iterdir()]
    except OSError:
        return f"There is no folder {path.parent}."
    near = difflib.get_close_matches(path.name, [name for name in names if name.endswith(".py")], n=1, cutoff=0.5)
    return f"Did you mean {path.with_name(near[0])}?" if near else ""


def _scripts_in(path: Path) -> str:
    names = sorted(entry.name for entry in path.glob("*.py"))[:3]
    return f"It holds {', '.join(names)}." if names else ""
