"""A process that trains in a run that is thrown away: guarded files, trackers offline, and no life after its supervisor's."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from pathlib import Path

from advisor.userfiles import trackers
from advisor.userfiles.guard import Guard

# In the environment of the script and of what it starts:
SUPERVISOR_VARIABLE = "ADVISOR_SUPERVISOR"  # the pid whose direct child is the script; "0": any descendant may be it
# The run folder in which every Python process below, from its first line on, sets aside what it is about to change.
FILES_VARIABLE = "ADVISOR_FILES"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def protect(run_dir: Path) -> Guard:
    """Guard this process, and keep its trackers offline or in the run folder, whatever the script has set until here.

    Call once a process, after torch's import.
    """
    # Files first: should anything behind this fail, the script goes on without advisor, and the guard stays.
    here = Guard.of(run_dir)
    _end_with_supervisor()
    os.environ.update(trackers.offline(run_dir))
    return here


def _end_with_supervisor() -> None:
    """On Linux this process gets SIGTERM when the advisor that started it dies: nobody else would end its run."""
    supervisor = os.environ.get(SUPERVISOR_VARIABLE, "")
    if supervisor != str(os.getppid()):
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if supervisor != str(os.getppid()):  # it died just before
        os.kill(os.getpid(), signal.SIGTERM)
