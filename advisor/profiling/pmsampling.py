"""The GPU's performance monitors over time (CUPTI PM sampling): any metrics that the hardware counts in one pass.

Every `interval_ns` the hardware writes its counters into a buffer, with no replay and no serialisation of kernels; the
buffer is decoded after the window. Which clock the time stamps are of differs by version of CUPTI: see clock.py.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterable, Sequence
from ctypes import c_char_p, c_double
from dataclasses import dataclass, field

from advisor.profiling import cupti
from advisor.profiling.cupti import CountersUnavailable

INTERVAL_NS = 20_000  # finer than most kernels of interest; 50,000 samples/s cost 0.2 % of a ResNet-50 step on an H200
HARDWARE_BUFFER_BYTES = 512 << 20  # holds two seconds at 20 µs on a GPU with 80 memory sub-partitions
LONG_FIRST = 1.5  # the first sample may begin when the counters were enabled or last stopped: milliseconds, not µs
LEAST_SAMPLES = 20_000  # that a data image holds


class UnknownMetrics(CountersUnavailable):
    """This libcupti has no such metric for this GPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Metrics that are counted together, and the hardware's set-up for it.

    Attributes:
        names: of the metrics.
        passes: over the same work that counting them takes; PM sampling has only one.
    """

    names: tuple[str, ...]
    passes: int
    host: int
    image: ctypes.Array[ctypes.c_char]
    pointers: ctypes.Array[c_char_p]


@dataclass(slots=True)
class Samples:
    """What was counted: a value a metric and sample, ordered by time, in units of CUPTI's choice."""

    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)


class PmSampler:
    """One GPU's performance monitors.

    In this order: `group`, as often as there are things to count; `enable`, which takes a good part of a second and from which
    on nobody else can count; `choose` a group and `start` and `stop`, which are cheap, again and again; `disable`, or `close`.

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
        self._hosts: list[int] = []
        self._sampler: int | None = None
        self._group: Group | None = None
        self.library.call("cuptiProfilerInitialize", cupti.ProfilerInitialize())
        chip = cupti.DeviceGetChipName(deviceIndex=device_index)
        self.library.call("cuptiDeviceGetChipName", chip)
        self._chip = chip.pChipName
        self._availability = self._available()

    def group(self, names: Sequence[str]) -> Group:
        """The set-up for counting `names` together; of one pass or not. Lives until `release` or `close`.

        Raises:
            UnknownMetrics: one of them is not known for this GPU.
            CountersUnavailable: CUPTI refused.
        """
        lib = self.library
        initialize = cupti.HostInitialize(
            profilerType=cupti.PM_SAMPLING,
            pChipName=self._chip,
            pCounterAvailabilityImage=ctypes.addressof(self._availability),
        )
        lib.call("cuptiProfilerHostInitialize", initialize)
        host = initialize.pHostObject
        self._hosts.append(host)
        pointers = (c_char_p * len(names))(*(name.encode() for name in names))
        try:
            lib.call(
                "cuptiProfilerHostConfigAddMetrics",
                cupti.HostConfigAddMetrics(pHostObject=host, ppMetricNames=pointers, numMetrics=len(names)),
            )
        except CountersUnavailable as error:
            self._deinitialize(host)
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
        return Group(names=tuple(names), passes=int(count.numOfPasses), host=host, image=image, pointers=pointers)

    def release(self, group: Group) -> None:
        """The group will not be chosen any more. Never raises."""
        self._deinitialize(group.host)

    def enable(self) -> None:
        """The GPU's counters are this process's.

        Raises:
            CountersUnavailable: no permission, or another profiler holds them.
        """
        enable = cupti.PmSamplingEnable(deviceIndex=self._device_index)
        self.library.call("cuptiPmSamplingEnable", enable)
        self._sampler = enable.pPmSamplingObject

    def choose(self, group: Group) -> None:
        """Windows count this group from now on. Not while sampling.

        Raises:
            CountersUnavailable: CUPTI refused.
        """
        self.library.call(
            "cuptiPmSamplingSetConfig",
            cupti.PmSamplingSetConfig(
                pPmSamplingObject=self._sampler,
                configSize=len(group.image),
                pConfig=ctypes.addressof(group.image),
                hardwareBufferSize=HARDWARE_BUFFER_BYTES,
                samplingInterval=self.interval_ns,
                triggerMode=cupti.GPU_TIME_INTERVAL,
                hwBufferAppendMode=cupti.KEEP_OLDEST,
            ),
        )
        self._group = group

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
        assert self._group is not None  # a window counts the group that was chosen
        samples = self._decode(self._group)
        if len(samples.start) > 1:
            first, second = (samples.end[i] - samples.start[i] for i in (0, 1))
            if first > LONG_FIRST * second:
                del samples.start[0], samples.end[0]
                for values in samples.values.values():
                    del values[0]
        return samples

    def disable(self) -> None:
        """The GPU's counters are free for others again, until `enable`. May be called twice; never raises."""
        sampler, self._sampler = self._sampler, None
        if sampler is not None:
            self._quietly("cuptiPmSamplingDisable", cupti.PmSamplingObject(pPmSamplingObject=sampler))

    def close(self) -> None:
        """`disable`, and all groups are released. May be called twice; never raises."""
        self.disable()
        for host in list(self._hosts):
            self._deinitialize(host)

    def _deinitialize(self, host: int) -> None:
        if host in self._hosts:
            self._hosts.remove(host)
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

    def _decode(self, group: Group) -> Samples:
        """Empty the hardware buffer, one counter data image at a time."""
        lib = self.library
        samples = Samples(values={name: [] for name in group.names})
        size = cupti.PmSamplingGetCounterDataSize(
            pPmSamplingObject=self._sampler,
            pMetricNames=group.pointers,
            numMetrics=len(group.names),
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
            read = self._read(group, image, samples)
            self.outgrown |= read >= self.capacity
            if decode.decodeStopReason != cupti.COUNTER_DATA_FULL or read == 0:
                return samples

    def _read(self, group: Group, image: ctypes.Array[ctypes.c_char], samples: Samples) -> int:
        """Append the image's completed samples; returns how many there were, dropped ones included."""
        lib, at = self.library, ctypes.addressof(image)
        info = cupti.PmSamplingGetCounterDataInfo(pCounterDataImage=at, counterDataImageSize=len(image))
        lib.call("cuptiPmSamplingGetCounterDataInfo", info)
        values = (c_double * len(group.names))()
        when = cupti.PmSamplingGetSampleInfo(
            pPmSamplingObject=self._sampler, pCounterDataImage=at, counterDataImageSize=len(image)
        )
        what = cupti.HostEvaluateToGpuValues(
            pHostObject=group.host,
            pCounterDataImage=at,
            counterDataImageSize=len(image),
            ppMetricNames=group.pointers,
            numMetrics=len(group.names),
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
            for name, value in zip(group.names, values, strict=True):
                samples.values[name].append(float(value))
        return int(info.numCompletedSamples)


def packed(sampler: PmSampler, wanted: Iterable[Sequence[str]], *, beside: str) -> list[Group]:
    """Few groups of one pass each, all with the metric `beside` in them, that hold of each of `wanted` the first that can be counted.

    Each is put into the first group that has room for it. What this GPU does not have, or does not count beside `beside` in one
    pass, is left out.

    Raises:
        CountersUnavailable: `beside` cannot be counted at all, or CUPTI refused.
    """
    try:
        groups = [sampler.group((beside,))]
    except UnknownMetrics as error:
        raise CountersUnavailable(f"{sampler.library.path.name} has no {beside} for this GPU") from error
    if groups[0].passes != 1:
        raise CountersUnavailable(f"{beside} needs {groups[0].passes} passes on this GPU", expected="1")
    for alternatives in wanted:
        for name in alternatives:
            if any(name in group.names for group in groups) or _placed(sampler, groups, name, beside):
                break
    return groups


def _placed(sampler: PmSampler, groups: list[Group], name: str, beside: str) -> bool:
    """Whether `name` has found its place in one of `groups`, or in a new one."""
    for index, group in enumerate((*groups, None)):
        try:
            larger = sampler.group((*(group.names if group else (beside,)), name))
        except UnknownMetrics:
            return False
        if larger.passes == 1:
            if group is not None:
                sampler.release(group)
            groups[index : index + 1] = [larger]
            return True
        sampler.release(larger)
    return False
