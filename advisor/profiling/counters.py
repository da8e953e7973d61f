"""DRAM bytes over time, read from the GPU's performance monitors while the script runs (CUPTI PM sampling).

Every `interval_ns` the hardware writes its counters into a buffer, with no replay and no serialisation of kernels; the
buffer is decoded after the window. Which clock the time stamps are of differs by version of CUPTI: see clock.py.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import subprocess
import sys
from ctypes import c_char_p, c_double
from types import TracebackType

from advisor.core.errors import AdvisorError
from advisor.core.trace import DramSamples
from advisor.profiling import cupti
from advisor.profiling.cupti import CountersUnavailable, Cupti
from advisor.profiling.ownprocess import last_words, run_module

METRICS = (b"dram__bytes_read.sum", b"dram__bytes_write.sum")
INTERVAL_NS = 20_000  # finer than most kernels of interest; 50,000 samples/s cost 0.2 % of a ResNet-50 step on an H200
MAX_SAMPLES = 100_000  # two seconds at 20 µs; a longer window gets a longer interval
HARDWARE_BUFFER_BYTES = 512 << 20  # holds two seconds at 20 µs on a GPU with 80 memory sub-partitions
LONG_FIRST = 1.5  # the first sample may begin when the counters were enabled or last stopped: milliseconds, not µs
# A data image takes all samples of a window, with room for one that lasts longer than announced: what libcupti 13.0 has not
# decoded when an image is full is lost to the next (seen on an H200: 20,000 of 61,000).
ROOM = 2.0
LEAST_SAMPLES = 20_000


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
        self.capacity = max(LEAST_SAMPLES, int(ROOM * window_s * 1e9 / self.interval_ns))
        self.note = ""  # set by `stop` when samples were lost
        self._config: ctypes.Array[ctypes.c_char] | None = None
        self._names = (c_char_p * len(METRICS))(*METRICS)
        self._host: int | None = None
        self._sampler: int | None = None
        self.library = cupti.load()
        try:
            self._open(device_index)
        except BaseException:
            self.close()
            raise

    def start(self) -> None:
        """The GPU samples from now on.

        Raises:
            CountersUnavailable: CUPTI refused.
        """
        self.library.call("cuptiPmSamplingStart", cupti.PmSamplingObject(pPmSamplingObject=self._sampler))

    def stop(self) -> DramSamples:
        """Sampling has ended; returns the samples since `start`, ordered by time, bytes per sample.

        Time stamps are in units of CUPTI's choice. A first sample that also holds the time before `start` is left out.

        Raises:
            CountersUnavailable: CUPTI refused.
        """
        self.library.call("cuptiPmSamplingStop", cupti.PmSamplingObject(pPmSamplingObject=self._sampler))
        samples = self._decode()
        if len(samples.start_ns) > 1:
            first, second = (samples.end_ns[i] - samples.start_ns[i] for i in (0, 1))
            if first > LONG_FIRST * second:
                for column in (samples.start_ns, samples.end_ns, samples.read_bytes, samples.write_bytes):
                    del column[0]
        return samples

    def close(self) -> None:
        """The GPU's counters are free for others again. May be called twice; never raises."""
        sampler, self._sampler = self._sampler, None
        host, self._host = self._host, None
        for name, parameters in (
            ("cuptiPmSamplingDisable", cupti.PmSamplingObject(pPmSamplingObject=sampler) if sampler else None),
            ("cuptiProfilerHostDeinitialize", cupti.HostDeinitialize(pHostObject=host) if host else None),
        ):
            if parameters is not None:
                with contextlib.suppress(CountersUnavailable):  # at the end of a process the driver may be gone already
                    self.library.call(name, parameters)

    def __enter__(self) -> DramCounters:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open(self, device_index: int) -> None:
        lib = self.library
        lib.call("cuptiProfilerInitialize", cupti.ProfilerInitialize())
        chip = cupti.DeviceGetChipName(deviceIndex=device_index)
        lib.call("cuptiDeviceGetChipName", chip)
        availability = self._availability(device_index)
        host = cupti.HostInitialize(
            profilerType=cupti.PM_SAMPLING,
            pChipName=chip.pChipName,
            pCounterAvailabilityImage=ctypes.addressof(availability),
        )
        lib.call("cuptiProfilerHostInitialize", host)
        self._host = host.pHostObject
        config = self._config = config_image(lib, host.pHostObject, self._names)
        enable = cupti.PmSamplingEnable(deviceIndex=device_index)
        lib.call("cuptiPmSamplingEnable", enable)
        self._sampler = enable.pPmSamplingObject
        lib.call(
            "cuptiPmSamplingSetConfig",
            cupti.PmSamplingSetConfig(
                pPmSamplingObject=self._sampler,
                configSize=len(config),
                pConfig=ctypes.addressof(config),
                hardwareBufferSize=HARDWARE_BUFFER_BYTES,
                samplingInterval=self.interval_ns,
                triggerMode=cupti.GPU_TIME_INTERVAL,
                hwBufferAppendMode=cupti.KEEP_OLDEST,
            ),
        )

    def _availability(self, device_index: int) -> ctypes.Array[ctypes.c_char]:
        query = cupti.GetCounterAvailability(deviceIndex=device_index)
        self.library.call("cuptiPmSamplingGetCounterAvailability", query)
        image = ctypes.create_string_buffer(query.counterAvailabilityImageSize)
        query.pCounterAvailabilityImage = ctypes.addressof(image)
        self.library.call("cuptiPmSamplingGetCounterAvailability", query)
        return image

    def _decode(self) -> DramSamples:
        """Empty the hardware buffer, one counter data image at a time."""
        lib, samples = self.library, DramSamples()
        size = cupti.PmSamplingGetCounterDataSize(
            pPmSamplingObject=self._sampler, pMetricNames=self._names, numMetrics=len(METRICS), maxSamples=self.capacity
        )
        lib.call("cuptiPmSamplingGetCounterDataSize", size)
        image = ctypes.create_string_buffer(size.counterDataSize)
        self.note = ""
        while True:
            lib.call(
                "cuptiPmSamplingCounterDataImageInitialize",
                cupti.PmSamplingCounterDataImageInitialize(
                    pPmSamplingObject=self._sampler, counterDataSize=len(image), pCounterData=ctypes.addressof(image)
                ),
            )
            decode = cupti.PmSamplingDecodeData(
                pPmSamplingObject=self._sampler,
                pCounterDataImage=ctypes.addressof(image),
                counterDataImageSize=len(image),
            )
            lib.call("cuptiPmSamplingDecodeData", decode)
            if decode.overflow:
                self.note = "the hardware buffer filled up; the window's end has no DRAM samples"
            read = self._read(image, samples)
            if read >= self.capacity:
                self.note = "the window was longer than announced; its end may have no DRAM samples"
            if decode.decodeStopReason != cupti.COUNTER_DATA_FULL or read == 0:
                return samples

    def _read(self, image: ctypes.Array[ctypes.c_char], samples: DramSamples) -> int:
        """Append the image's completed samples; returns how many there were, dropped ones included."""
        lib, at = self.library, ctypes.addressof(image)
        info = cupti.PmSamplingGetCounterDataInfo(pCounterDataImage=at, counterDataImageSize=len(image))
        lib.call("cuptiPmSamplingGetCounterDataInfo", info)
        values = (c_double * len(METRICS))()
        when = cupti.PmSamplingGetSampleInfo(
            pPmSamplingObject=self._sampler, pCounterDataImage=at, counterDataImageSize=len(image)
        )
        what = cupti.HostEvaluateToGpuValues(
            pHostObject=self._host,
            pCounterDataImage=at,
            counterDataImageSize=len(image),
            ppMetricNames=self._names,
            numMetrics=len(METRICS),
            pMetricValues=values,
        )
        for index in range(info.numCompletedSamples):
            when.sampleIndex = what.rangeIndex = index
            lib.call("cuptiPmSamplingCounterDataGetSampleInfo", when)
            start, end = int(when.startTimestamp), int(when.endTimestamp)
            if start == 0 or end <= start:  # the first sample after a start has no beginning
                continue
            lib.call("cuptiProfilerHostEvaluateToGpuValues", what)
            samples.start_ns.append(start)
            samples.end_ns.append(end)
            samples.read_bytes.append(float(values[0]))
            samples.write_bytes.append(float(values[1]))
        return int(info.numCompletedSamples)


def config_image(lib: Cupti, host: int, names: ctypes.Array[c_char_p]) -> ctypes.Array[ctypes.c_char]:
    """The hardware's set-up for collecting `names` in one pass. Needs no GPU, only a host object for the chip.

    Raises:
        CountersUnavailable: a metric is not known for the chip, or they do not fit into one pass.
    """
    try:
        lib.call(
            "cuptiProfilerHostConfigAddMetrics",
            cupti.HostConfigAddMetrics(pHostObject=host, ppMetricNames=names, numMetrics=len(names)),
        )
    except CountersUnavailable as error:
        raise CountersUnavailable(
            f"{lib.path.name} (CUPTI {lib.version}) offers no DRAM byte counters for this GPU",
            expected="CUPTI of CUDA 12.9 or newer",
            fix="Use a torch built for CUDA 12.9 or newer.",
        ) from error
    size = cupti.HostGetConfigImageSize(pHostObject=host)
    lib.call("cuptiProfilerHostGetConfigImageSize", size)
    image = ctypes.create_string_buffer(size.configImageSize)
    at = ctypes.addressof(image)
    lib.call(
        "cuptiProfilerHostGetConfigImage",
        cupti.HostGetConfigImage(pHostObject=host, configImageSize=len(image), pConfigImage=at),
    )
    passes = cupti.HostGetNumOfPasses(configImageSize=len(image), pConfigImage=at)
    lib.call("cuptiProfilerHostGetNumOfPasses", passes)
    if passes.numOfPasses != 1:
        raise CountersUnavailable(f"the DRAM counters need {passes.numOfPasses} passes on this GPU", expected="1")
    return image


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
        child = run_module("advisor.profiling.counters", "--check", "--device", str(device_index), timeout_s=timeout_s)
        answer = json.loads(child.stdout.splitlines()[-1])
        return bool(answer["available"]), str(answer["reason"])
    except subprocess.TimeoutExpired:
        return False, f"trying the hardware counters took more than {timeout_s:.0f} s"
    except OSError as error:
        return False, f"trying the hardware counters failed ({error})"
    except (IndexError, KeyError, TypeError, ValueError):
        return False, f"trying the hardware counters failed ({last_words(child)})"


def main() -> int:
    """`python -m advisor.profiling.counters`: try the counters, or prove them on a copy of known size."""
    parser = argparse.ArgumentParser(prog="python -m advisor.profiling.counters", description=main.__doc__)
    parser.add_argument("--device", type=int, default=0, help="CUDA ordinal")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", action="store_true", help="print availability as JSON")
    action.add_argument(
        "--selftest", action="store_true", help="count a known copy on the GPU, and what counting costs"
    )
    arguments = parser.parse_args()
    if arguments.selftest:
        from advisor.profiling import counters_selftest

        return counters_selftest.run(arguments.device)
    usable, reason = available(arguments.device)
    print(json.dumps({"available": usable, "reason": reason}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
