"""What each call of a replayed step costs the host: a look at its arguments, and a list's entry for its result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from advisor.cupy_loops.replay.calls import same

if TYPE_CHECKING:
    from advisor.cupy_loops.replay.recorder import Recorder

OTHERS_WAIT_S = 1.0  # for another thread that reads arrays of a step; a step is rarely as long


def wrapped(recorder: Recorder, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
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
        if entry is not None and entry.name == name and entry.quick and not kwargs and len(args) == entry.size:
            at = recorder.at
            for position, place in entry.arrays:
                if args[position] is not at[place]:
                    break
            else:
                for position, constant in entry.constants:
                    value = args[position]
                    if value is not constant and not same(value, constant):
                        break
                else:
                    result = at[entry.gives[0]]
                    recorder.cursor += 1
                    recorder.expected = entry.next
                    if entry.next is None:
                        recorder.inside = True
                        try:
                            recorder.end()
                        finally:
                            recorder.inside = False
                    return result
        recorder.inside = True
        try:
            return recorder.handle(name, plain, args, kwargs)
        finally:
            recorder.inside = False

    return call


def _wait(recorder: Recorder) -> None:
    """Another thread is about to read what may still be to be filled: it waits for the end of the step."""
    until = time.monotonic() + OTHERS_WAIT_S
    while recorder.cursor > recorder.launched and time.monotonic() < until:
        time.sleep(0)
