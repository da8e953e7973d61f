"""Ending the user's script from inside a step, as if it had called `sys.exit(0)`.

`StopTraining` is a SystemExit: `finally` blocks, `atexit` handlers and the script's own clean-up run, and the exit code
is 0. A script whose `except:` swallows it meets it again at its next step; after three times the process is ended
with `os._exit(0)`, its streams flushed, because it would otherwise train on for hours with the measurement done.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from contextlib import suppress

from advisor.loop.heap import classes, living
from advisor.loop.records import PROGRESS_FILE
from advisor.loop.session import LEAVING, Session, tell

MAX_RAISES = 3
# PyTorch's data loader waits up to five seconds for one worker after the other before it ends them by force: a minute for twelve
# that do not come, in each of a search's processes.
WORKER_S = 0.2


class StopTraining(SystemExit):
    """Raised inside `Optimizer.step()` when advisor has what it came for. `code` is 0."""

    def __init__(self, reason: str) -> None:
        super().__init__(0)
        self.reason = reason


class _Leaving:
    """Tells the supervisor when the interpreter of a script that was stopped is taken apart: exit handlers and `finally` blocks have
    run by then, and what is left is native code's. Holds all it needs, because modules are empty by that time.

    To be put into `sys`, which Python clears last, and always: a module of ours lives on in the frames that the stop has passed.
    """

    def __init__(self, session: Session) -> None:
        self._process, self._getpid, self._write, self._now = os.getpid(), os.getpid, os.write, time.time
        self._event = LEAVING
        self._file = os.open(session.folder / PROGRESS_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def __del__(self) -> None:
        if self._getpid() == self._process:  # a forked child has it too
            line = f'{{"t": {self._now()!r}, "event": "{self._event}", "pid": {self._process}}}\n'
            self._write(self._file, line.encode())


class _Request:
    """The stop that was asked for, if any; one a process."""

    reason: str = ""
    raised: int = 0


def stop(session: Session, reason: str) -> None:
    """End the script: call from a `Training.on_step` listener, once everything is written.

    Raises:
        StopTraining: always. The `stopped` event is in `progress.jsonl` before.
    """
    if not _Request.reason:
        tell(session, "stopped", reason=reason, pid=os.getpid())
        _hurry_workers()
        atexit.register(_end_loaders)
        with suppress(OSError):
            sys._advisor_leaving = _Leaving(session)  # type: ignore[attr-defined]  # ours, kept where nothing else is torn down sooner
    _Request.reason = reason or "done"
    insist()


def _hurry_workers() -> None:
    """Data loaders wait for each of their workers no longer than `WORKER_S`: what these still load is for nobody."""
    loader = sys.modules.get("torch.utils.data._utils")
    if loader is not None:
        loader.MP_STATUS_CHECK_INTERVAL = WORKER_S  # type: ignore[attr-defined]  # a constant of torch's that its types leave out


def _end_loaders() -> None:
    """Iterators of data loaders that the stop's own traceback still holds end as they would if they were let go of.

    A thread that is in native code while the interpreter is taken apart ends the process (`std::terminate`, exit code 134); the thread that
    pins batches is there for most of its time.
    """
    loader = sys.modules.get("torch.utils.data.dataloader")
    kind = getattr(loader, "_MultiProcessingDataLoaderIter", None)
    for iterator in living(classes(kind)) if kind is not None else ():
        with suppress(Exception):  # one that was never begun, or is at its end
            iterator._shutdown_workers()


def requested() -> bool:
    """True from the first `stop` on."""
    return bool(_Request.reason)


def insist() -> None:
    """Raise the stop again when it was swallowed; called at each step boundary.

    Raises:
        StopTraining: when a stop was asked for and the script is still training; outside the main thread a plain SystemExit,
            because `threading` ends a thread in silence by that very class only, and shows any other as a crash.
    """
    if not _Request.reason:
        return
    _Request.raised += 1
    if _Request.raised > MAX_RAISES:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(0)
    if threading.current_thread() is not threading.main_thread():
        raise SystemExit(0)
    raise StopTraining(_Request.reason)


def forget() -> None:
    """Withdraw the stop (tests)."""
    _Request.reason, _Request.raised = "", 0
