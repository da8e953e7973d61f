"""What a search will need and can be made while the machine is measured and the script profiled: the C++ that launches the bundled kernels,
half a minute's work once a machine, and a minute beside a script that uses its cores. Else the first trial waits for it."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

# Fewer cores than this are the script's: a compiler beside it would be in the profile.
LEAST_CORES = 4
MODULE = "advisor.ops.sites.native"
# Where NVIDIA's driver is, on Linux and in WSL: asking torch takes seconds, in which the compiler is at work.
DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))


def compile_ahead() -> subprocess.Popen[bytes] | None:
    """Another process compiles what is not in the cache yet, until this one ends; None where there is no use or no room for it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    if hidden or not any(map(Path.exists, DRIVERS)) or (os.cpu_count() or 1) < LEAST_CORES:
        return None
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that its compiler ends with it
        )
    except OSError:  # it is made later then, where it is needed
        return None
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, 19)
    atexit.register(end, process)
    return process


def end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
