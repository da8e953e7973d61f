"""What each call of a replayed step costs the host: a look at its arguments, and a list's entry for its result.

Where the user has a compiler, quick.cpp does the same without Python; `State` and `wrapped` are then made of it.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from advisor.core import compiled
from advisor.cupy_loops.replay.calls import Entry, same
from advisor.loop.patches import Patches

_SOURCE = Path(__file__).with_name("quick.cpp")
OTHERS_WAIT_S = 1.0  # for another thread that reads arrays of a step; a step is rarely as long


class Replaying(Protocol):
    """Whoever replays steps, as far as a call has to know it."""

    thread: int
    patches: Patches
    inside: bool  # a call of the step's is being looked at
    expected: Entry | None  # the next call of a replayed step; None: between steps, or no step is replayed
    at: list[Any]  # by place: what the script holds of this step
    cursor: int  # how many calls of the step are answered
    launched: int  # and how many filled

    def handle(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One outermost call of the loop's."""

    def end(self) -> None:
        """All calls of the step are answered."""


class PlainState:
    """The state of a recorder, where it is Python's."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.expected: Entry | None = None
        self.at: list[Any] = []
        self.inside = False
        self.cursor = self.launched = 0


@lru_cache(maxsize=1)
def native() -> Any:
    """The compiled quick.cpp, or None. Compiles at first, for a second or two."""
    try:
        if compiled.hindrance():
            return None
        of = (_SOURCE.read_text(encoding="utf-8"), sys.version, str(compiled.FLAGS))
        name = "quick_" + hashlib.sha256("\0".join(of).encode()).hexdigest()[:16]
        return compiled.loaded(compiled.built(compiled.compiler(), _SOURCE, name), name)
    except (OSError, RuntimeError, ImportError, subprocess.SubprocessError):
        return None


def state() -> type[PlainState]:
    """The class that a recorder is one of."""
    found = native()
    kind: type[PlainState] = found.State if found is not None else PlainState
    return kind


def link(entries: list[Entry], made_of: type) -> None:
    """Each entry knows what answers it without Python, if the recorder's state is of that kind."""
    found = native()
    if found is None or not issubclass(made_of, found.State):
        return
    for entry in entries:
        if entry.quick:
            entry.native = found.Expect(
                entry.name, entry.size, entry.arrays, entry.positional, entry.named, entry.place, entry.value
            )
    for entry in entries:
        if entry.native is not None and entry.next is not None:
            entry.native.behind(entry.next, entry.next.native)


def wrapped(recorder: Replaying, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """What stands in the place of `plain`. The usual call, the recorded one with the recorded arrays, is answered right here; all others
    by `recorder.handle`.
    """
    get_ident, thread, patches = threading.get_ident, recorder.thread, recorder.patches

    def call(*args: Any, **kwargs: Any) -> Any:
        if recorder.inside or not patches.active or get_ident() != thread:
            if recorder.cursor > recorder.launched and get_ident() != thread:
                _wait(recorder)
            return plain(*args, **kwargs)
        entry = recorder.expected
        if entry is not None and entry.name == name and entry.quick and len(args) == entry.size:
            at, usual = recorder.at, True
            for position, place in entry.arrays:
                if args[position] is not at[place]:
                    usual = False
                    break
            if kwargs or entry.named:
                usual = usual and _named_alike(kwargs, entry.named)
            for position, constant in entry.positional if usual else ():
                value = args[position]
                if value is not constant and not same(value, constant):
                    usual = False
                    break
            if usual:
                recorder.cursor += 1
                recorder.expected = entry.next
                result = at[entry.place] if entry.place >= 0 else entry.value
                if entry.next is None:
                    _end(recorder)
                return result
        recorder.inside = True
        try:
            return recorder.handle(name, plain, args, kwargs)
        finally:
            recorder.inside = False

    found = native()
    return found.Quick(recorder, name, call, _end) if found is not None and isinstance(recorder, found.State) else call


def _named_alike(given: dict[str, Any], recorded: dict[str, Any]) -> bool:
    if given.keys() != recorded.keys():
        return False
    return all(value is recorded[name] or same(value, recorded[name]) for name, value in given.items())


def _end(recorder: Replaying) -> None:
    recorder.inside = True
    try:
        recorder.end()
    finally:
        recorder.inside = False


def _wait(recorder: Replaying) -> None:
    """Another thread is about to read what may still be to be filled: it waits for the end of the step."""
    until = time.monotonic() + OTHERS_WAIT_S
    while recorder.cursor > recorder.launched and time.monotonic() < until:
        time.sleep(0)
