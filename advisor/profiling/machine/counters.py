"""DRAM bytes over time, read from the GPU's performance monitors while the script runs (pmsampling.py)."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from types import TracebackType

from advisor.core.errors import AdvisorError
from advisor.core.trace import DramSamples
from advisor.profiling.machine import cupti
from advisor.profiling.machine.cupti import CountersUnavailable
from advisor.profiling.machine.ownprocess import last_words, run_module
from advisor.profiling.machine.pmsampling import INTERVAL_NS, LEAST_SAMPLES, PmSampler, UnknownMetrics

READ, WRITTEN = METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
MAX_SAMPLES = 100_000  # two seconds at 20 µs; a longer window gets a longer interval
# A data image takes all samples of a window, with room for one that lasts longer than announced: what libcupti 13.0 has not
# decoded when an image is full is lost to the next (seen on an H200: 20,000 of 61,000).
ROOM = 2.0


class DramCounters:
    """DRAM counters of one GPU. Made before the window (enabling takes a moment); `start` and `stop` are cheap.

    Args:
        device_index: CUDA ordinal in this process.
        window_s: about how long a window will last; sets the sampling interval so that its samples fit.

    Raises:
        CountersUnavailable: no library, no permission, no such counter, or another profiler holds them.
    """

    def __init__(self, device_index: int = 0, *, window_s: float = 1.0) -> None:
        self.interval_ns = max(INTERVAL_NS, int(window_s * 1e9 / MAX_SAMPLES))
        capacity = max(LEAST_SAMPLES, int(ROOM * window_s * 1e9 / self.interval_ns))
        self._sampler = PmSampler(device_index, interval_ns=self.interval_ns, capacity=capacity)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def library(self) -> cupti.Cupti:
        """What reads them."""
        return self._sampler.library

    @property
    def note(self) -> str:
        """What a reader must know of the last window's samples: those that were lost."""
        if self._sampler.outgrown:
            return "the window was longer than announced; its end may have no DRAM samples"
        return "the hardware buffer filled up; the window's end has no DRAM samples" if self._sampler.overflowed else ""

    def start(self) -> None:
        """The GPU samples from now on.

        Raises:
            CountersUnavailable: CUPTI refused.
        """
        self._sampler.start()

    def stop(self) -> DramSamples:
        """Sampling has ended; returns the samples since `start`, ordered by time, bytes per sample.

        Time stamps are in units of CUPTI's choice. A first sample that also holds the time before `start` is left out.

        Raises:
            CountersUnavailable: CUPTI refused.
        """
        found = self._sampler.stop()
        return DramSamples(
            start_ns=found.start, end_ns=found.end, read_bytes=found.values[READ], write_bytes=found.values[WRITTEN]
        )

    def close(self) -> None:
        """The GPU's counters are free for others again. May be called twice; never raises."""
        self._sampler.close()

    def __enter__(self) -> DramCounters:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self) -> None:
        try:
            self._sampler.open(METRICS)
        except UnknownMetrics as error:
            raise CountersUnavailable(
                f"{self.library.path.name} (CUPTI {self.library.version}) offers no DRAM byte counters for this GPU",
                expected="CUPTI of CUDA 12.9 or newer",
                fix="Use a torch built for CUDA 12.9 or newer.",
            ) from error


def available(device_index: int = 0) -> tuple[bool, str]:
    """Whether `DramCounters(device_index)` can be made in this process now, and if not, why. Never raises."""
    try:
        DramCounters(device_index).close()
    except AdvisorError as error:
        return False, str(error)
    except Exception as error:
        return False, f"hardware counters failed ({type(error).__name__}: {error})"
    return True, ""


def preflight(device_index: int = 0, *, timeout_s: float = 60.0) -> tuple[bool, str]:
    """`available`, tried in a process of its own, so that a library that crashes or hangs cannot harm the training.

    The process is this interpreter's, with this environment. Never raises.
    """
    try:
        child = run_module("advisor.profiling.machine.counters", "--device", str(device_index), timeout_s=timeout_s)
        answer = json.loads(child.stdout.splitlines()[-1])
        return bool(answer["available"]), str(answer["reason"])
    except subprocess.TimeoutExpired:
        return False, f"trying the hardware counters took more than {timeout_s:.0f} s"
    except OSError as error:
        return False, f"trying the hardware counters failed ({error})"
    except (IndexError, KeyError, TypeError, ValueError):
        return False, f"trying the hardware counters failed ({last_words(child)})"


def main() -> int:
    """`python -m advisor.profiling.machine.counters`: print as JSON whether the counters can be read, and why not."""
    parser = argparse.ArgumentParser(prog="python -m advisor.profiling.machine.counters", description=main.__doc__)
    parser.add_argument("--device", type=int, default=0, help="CUDA ordinal")
    arguments = parser.parse_args()
    usable, reason = available(arguments.device)
    print(json.dumps({"available": usable, "reason": reason}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
