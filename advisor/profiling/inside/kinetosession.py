"""How a session of Kineto is begun and ended in somebody else's process: silently, and so that the process may end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._autograd import _disable_profiler
from torch.autograd import profiler as autograd_profiler

from advisor.loop import graphs, heap

# Kineto reads its log level when it is set up first; above all its levels it prints nothing into the script's stderr.
_KINETO_LEVEL, _SILENT = "KINETO_LOG_LEVEL", "99"


# Kineto takes CUPTI down after a trace only when this is "1"; otherwise each launch goes on costing host time (docs/notes/profiling.md).
_TEARDOWN = "TEARDOWN_CUPTI"


TEARDOWN_LEAST_S, TEARDOWN_MOST_S = 0.02, 0.5  # for which the end of a trace waits for that


@contextlib.contextmanager
def quiet_kineto() -> Iterator[None]:
    """Kineto is silent if it is set up in here, unless the user has asked for its log."""
    if _KINETO_LEVEL in os.environ:
        yield
        return
    os.environ[_KINETO_LEVEL] = _SILENT
    try:
        yield
    finally:
        os.environ.pop(_KINETO_LEVEL, None)


def choose_teardown(ours: str, *, wanted: bool) -> str:
    """Kineto takes CUPTI down after the coming trace where that is `wanted`, and not beside captured graphs.

    Taken down and set up again beside captured graphs CUPTI has crashed (pytorch#112507); there few launches are left to cost
    anything. What the user, or torch, has set stays.

    Args:
        ours: what an earlier call returned; empty before the first.

    Returns:
        What is set now, or empty where it is not ours. It has to stay set: Kineto reads it at the next trace's start as well.
    """
    if os.environ.get(_TEARDOWN, "") != ours:
        return ""
    ours = os.environ[_TEARDOWN] = "1" if wanted and not graphs.alive() else "0"
    return ours


_chosen_teardown = ""  # of this process, as chosen for the latest trace


def teardown(*, wanted: bool) -> None:
    """As `choose_teardown`, before each trace of this process."""
    global _chosen_teardown
    _chosen_teardown = choose_teardown(_chosen_teardown, wanted=wanted)


def end_profiler(device: str) -> Any:
    """End the profiler; the process may end at any time afterwards. Returns torch's `_ProfilerResult`."""
    with contextlib.suppress(Exception):  # tells torch's own hooks; not in every version
        autograd_profiler._run_on_profiler_stop()
    threads = thread_count()
    results = _disable_profiler()
    if device == "cuda" and os.environ.get(_TEARDOWN) == "1":
        see_cupti_down(threads)
    return results


def script_profiles() -> bool:
    """Whether a torch profiler of the script's is prepared or running.

    Torch has one session. Preparing another ends it, starting one that was prepared before ours raises, and ending ours would end theirs;
    that theirs is prepared, as a schedule does some steps ahead, torch itself does not tell.
    """
    profiles = heap.living(heap.classes(autograd_profiler.profile))
    return any(getattr(found, "entered", False) and found.kineto_results is None for found in profiles)


def thread_count() -> int:
    """How many threads this process has; 0 where /proc does not say."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 0


def see_cupti_down(threads: int) -> None:
    """Call CUDA until Kineto has taken CUPTI down, which a thread beyond these `threads` does inside the calls that follow.

    A process that came to its end before would hang there for good, in the C library's exit handlers.
    """
    began = time.monotonic()
    while (waited := time.monotonic() - began) < TEARDOWN_MOST_S:
        torch.cuda.current_stream().query()
        time.sleep(0.001)
        if waited > TEARDOWN_LEAST_S and 0 < thread_count() <= threads:
            return
