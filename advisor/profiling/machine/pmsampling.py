"""The GPU's performance monitors over time (CUPTI PM sampling): any metrics that the hardware counts in one pass.

Every `interval_ns` the hardware writes its counters into a buffer, with no replay and no serialisation of kernels; the
buffer is decoded after the window. Which clock the time stamps are of differs by version of CUPTI: see clock.py.

One set of metrics a process: libcupti 13.0 on an H200 takes a second set-up, on the same object or on a new one, and gives no samples of it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Sequence
from ctypes import c_char_p, c_double
from dataclasses import dataclass, field

from advisor.profiling.machine import cupti
from advisor.profiling.machine.cupti import CountersUnavailable

INTERVAL_NS = 20_000  # finer than most kernels of interest; 50,000 samples/s cost 0.2 % of a ResNet-50 step on an H200
HARDWARE_BUFFER_BYTES = 512 << 20  # holds two seconds at 20 µs on a GPU with 80 memory sub-partitions
LONG_FIRST = 1.5  # the first sample may begin when the counters were enabled or last stopped: milliseconds, not µs
LEAST_SAMPLES = 20_000  # that a data image holds


class UnknownMetrics(CountersUnavailable):
    """This libcupti has no such metric for this GPU."""


@dataclass(slots=True)
class Samples:
    """What was counted: a value a metric and sample, ordered by time, in units of CUPTI's choice."""

    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _SetUp:
    """Of the hardware, for counting these metrics; what CUPTI has a pointer to is kept alive here."""

    names: tuple[str, ...]
    passes: int
    host: int
    image: ctypes.Array[ctypes.c_char]
    pointers: ctypes.Array[c_char_p]


class PmSampler:
    """One GPU's performance monitors: `passes` as often as there is something to ask, `open`, then `start` and `stop`, which are
    cheap, again and again, and `close`.

    Args:
        device_index: CUDA ordinal in this process.
        interval_ns: a sample's length.
        capacity: samples that are decoded at a time; a window that gave more has `outgrown` it.

    Raises:
        CountersUnavailable: no library, no permission, or a GPU without PM sampling.
    """

    def __init__(self, device_index: int = 0, *, interval_ns: int = INTERVAL_NS, capacity: int = LEAST_SAMPLES) -> None:
        self.interval_ns, self.capacity = interval_ns, capacity
        self.overflowed = False  # in the last window the hardware's buffer filled up: the end is missing
        self.outgrown = False  # it had more samples than `capacity`: the end may be missing
        self.library = cupti.load()
        self._device_index = device_index
        self._sampler: int | None = None
        self._chosen: _SetUp | None = None
        self.library.call("cuptiProfilerInitialize", cupti.ProfilerInitialize())
        chip = cupti.DeviceGetChipName(deviceIndex=device_index)
        self.library.call("cuptiDeviceGetChipName", chip)
        self._chip = chip.pChipName
        self._availability = self._available()

    def passes(self, names: Sequence[str]) -> int:
        """How often the same work would have to run for these metrics to be counted together. `open` takes those of one pass.

        Raises:
            UnknownMetrics: one of them is not known for this GPU.
            CountersUnavailable: CUPTI refused.
        """
        found = self._set_up(names)
        self._deinitialize(found.host)
        return found.passes

    def open(self, names: Sequence[str]) -> None:
        """The GPU's counters are this process's, and windows count these metrics. Takes a good part of a second. Once a process.

        Raises:
            UnknownMetrics: one of them is not known for this GPU.
            CountersUnavailable: they need several passes, no permission, or another profiler holds the counters.
        """
        chosen = self._chosen = self._set_up(names)
        if chosen.passes != 1:
            raise CountersUnavailable(f"{', '.join(names)} need {chosen.passes} passes on this GPU", expected="1")
        enable = cupti.PmSamplingEnable(deviceIndex=self._device_index)
        self.library.call("cuptiPmSamplingEnable", enable)
        self._sampler = enable.pPmSamplingObject
        self.library.call(
            "cuptiPmSamplingSetConfig",
            cupti.PmSamplingSetConfig(
                pPmSamplingObject=self._sampler,
                configSize=len(chosen.image),
                pConfig=ctypes.addressof(chosen.image),
                hardwareBufferSize=HARDWARE_BUFFER_BYTES,
                samplingInterval=self.interval_ns,
                triggerMode=cupti.GPU_TIME_INTERVAL,
                hwBufferAppendMode=cupti.KEEP_OLDEST,
            ),
        )

    def start(self) -> None:
        """The GPU samples from now on.

        Raises:
            CountersUnavailable: CUPTI refused.
        """
        self.library.call("cuptiPmSamplingStart", cupti.PmSamplingObject(pPmSamplingObject=self._sampler))

    def stop(self) -> Samples:
        """Sampling has ended; returns the samples since `start`.

        A first sample that also holds the time before `start` is left out.

        Raises:
            CountersUnavailable: CUPTI refused.
        """
        self.library.call("cuptiPmSamplingStop", cupti.PmSamplingObject(pPmSamplingObject=self._sampler))
        assert self._chosen is not None  # a window is of an open sampler
        samples = self._decode(self._chosen)
        if len(samples.start) > 1:
            first, second = (samples.end[i] - samples.start[i] for i in (0, 1))
            if first > LONG_FIRST * second:
                del samples.start[0], samples.end[0]
                for values in samples.values.values():
                    del values[0]
        return samples

    def close(self) -> None:
        """The GPU's counters are free for others again. May be called twice; never raises."""
        sampler, self._sampler = self._sampler, None
        chosen, self._chosen = self._chosen, None
        if sampler is not None:
            self._quietly("cuptiPmSamplingDisable", cupti.PmSamplingObject(pPmSamplingObject=sampler))
        if chosen is not None:
            self._deinitialize(chosen.host)

    def _set_up(self, names: Sequence[str]) -> _SetUp:
        """For counting `names` together, in one pass or in several. Its host object lives until `_deinitialize`."""
        lib = self.library
        initialize = cupti.HostInitialize(
            profilerType=cupti.PM_SAMPLING,
            pChipName=self._chip,
            pCounterAvailabilityImage=ctypes.addressof(self._availability),
        )
        lib.call("cuptiProfilerHostInitialize", initialize)
        host = initialize.pHostObject
        pointers = (c_char_p * len(names))(*(name.encode() for name in names))
        try:
            try:
                lib.call(
                    "cuptiProfilerHostConfigAddMetrics",
                    cupti.HostConfigAddMetrics(pHostObject=host, ppMetricNames=pointers, numMetrics=len(names)),
                )
            except CountersUnavailable as error:
                raise UnknownMetrics(error.found, expected=error.expected, fix=error.fix) from error
            size = cupti.HostGetConfigImageSize(pHostObject=host)
            lib.call("cuptiProfilerHostGetConfigImageSize", size)
            image = ctypes.create_string_buffer(size.configImageSize)
            at = ctypes.addressof(image)
            lib.call(
                "cuptiProfilerHostGetConfigImage",
                cupti.HostGetConfigImage(pHostObject=host, configImageSize=len(image), pConfigImage=at),
            )
            count = cupti.HostGetNumOfPasses(configImageSize=len(image), pConfigImage=at)
            lib.call("cuptiProfilerHostGetNumOfPasses", count)
        except BaseException:
            self._deinitialize(host)
            raise
        return _SetUp(names=tuple(names), passes=int(count.numOfPasses), host=host, image=image, pointers=pointers)

    def _deinitialize(self, host: int) -> None:
        self._quietly("cuptiProfilerHostDeinitialize", cupti.HostDeinitialize(pHostObject=host))

    def _quietly(self, name: str, parameters: cupti.Parameters) -> None:
        with contextlib.suppress(CountersUnavailable):  # at the end of a process the driver may be gone already
            self.library.call(name, parameters)

    def _available(self) -> ctypes.Array[ctypes.c_char]:
        query = cupti.GetCounterAvailability(deviceIndex=self._device_index)
        self.library.call("cuptiPmSamplingGetCounterAvailability", query)
        image = ctypes.create_string_buffer(query.counterAvailabilityImageSize)
        query.pCounterAvailabilityImage = ctypes.addressof(image)
        self.library.call("cuptiPmSamplingGetCounterAvailability", query)
        return image

    def _decode(self, chosen: _SetUp) -> Samples:
        """Empty the hardware buffer, one counter data image at a time."""
        lib = self.library
        samples = Samples(values={name: [] for name in chosen.names})
        size = cupti.PmSamplingGetCounterDataSize(
            pPmSamplingObject=self._sampler,
            pMetricNames=chosen.pointers,
            numMetrics=len(chosen.names),
            maxSamples=self.capacity,
        )
        lib.call("cuptiPmSamplingGetCounterDataSize", size)
        image = ctypes.create_string_buffer(size.counterDataSize)
        self.overflowed = self.outgrown = False
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
            self.overflowed |= bool(decode.overflow)
            read = self._read(chosen, image, samples)
            self.outgrown |= read >= self.capacity
            if decode.decodeStopReason != cupti.COUNTER_DATA_FULL or read == 0:
                return samples

    def _read(self, chosen: _SetUp, image: ctypes.Array[ctypes.c_char], samples: Samples) -> int:
        """Append the image's completed samples; returns how many there were, dropped ones included."""
        lib, at = self.library, ctypes.addressof(image)
        info = cupti.PmSamplingGetCounterDataInfo(pCounterDataImage=at, counterDataImageSize=len(image))
        lib.call("cuptiPmSamplingGetCounterDataInfo", info)
        values = (c_double * len(chosen.names))()
        when = cupti.PmSamplingGetSampleInfo(
            pPmSamplingObject=self._sampler, pCounterDataImage=at, counterDataImageSize=len(image)
        )
        what = cupti.HostEvaluateToGpuValues(
            pHostObject=chosen.host,
            pCounterDataImage=at,
            counterDataImageSize=len(image),
            ppMetricNames=chosen.pointers,
            numMetrics=len(chosen.names),
            pMetricValues=values,
        )
        for index in range(info.numCompletedSamples):
            when.sampleIndex = what.rangeIndex = index
            lib.call("cuptiPmSamplingCounterDataGetSampleInfo", when)
            start, end = int(when.startTimestamp), int(when.endTimestamp)
            if start == 0 or end <= start:  # the first sample after a start has no beginning
                continue
            lib.call("cuptiProfilerHostEvaluateToGpuValues", what)
            samples.start.append(start)
            samples.end.append(end)
            for name, value in zip(chosen.names, values, strict=True):
                samples.values[name].append(float(value))
        return int(info.numCompletedSamples)


def fitting(sampler: PmSampler, wanted: Iterable[Sequence[str]], *, beside: str) -> tuple[str, ...]:
    """`beside`, and of each of `wanted` the first metric that can still be counted with those before it in one pass, if there is one.

    Raises:
        CountersUnavailable: `beside` cannot be counted at all, or CUPTI refused.
    """
    try:
        passes = sampler.passes((beside,))
    except UnknownMetrics as error:
        raise CountersUnavailable(f"{sampler.library.path.name} has no {beside} for this GPU") from error
    if passes != 1:
        raise CountersUnavailable(f"{beside} needs {passes} passes on this GPU", expected="1")
    found: tuple[str, ...] = (beside,)
    for alternatives in wanted:
        if not set(alternatives) & set(found):
            found += next(((name,) for name in alternatives if _fits(sampler, (*found, name))), ())
    return found


def _fits(sampler: PmSampler, names: Sequence[str]) -> bool:
    try:
        return sampler.passes(names) == 1
    except UnknownMetrics:
        return False
