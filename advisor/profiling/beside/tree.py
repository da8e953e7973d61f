"""A child and all below it: ended together, and given the signals that are meant for the script."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

GRACE_S = 5.0  # between asking a process tree to end and ending it


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


@contextmanager
def forwarding(child: subprocess.Popen[Any]) -> Iterator[list[int]]:
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
