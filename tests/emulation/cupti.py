"""A libcupti that answers as NVIDIA's does, over samples that are made up."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

from advisor.profiling.machine import cupti

SAMPLER = 22
IMAGE_BYTES = 928
Sample = tuple[float, ...]  # start, end, a value for each metric


class FakeCupti:
    """A GPU that counts `metrics` and has taken `samples`, handed out in images of `chunk` samples.

    Attributes:
        refuse: function → the CUptiResult it fails with.
        passes: of metrics counted together.
        hosts: those that live, with what each counts.
    """

    def __init__(self, metrics: Sequence[str], samples: Sequence[Sample], chunk: int = 1000) -> None:
        self.path, self.version = Path("libcupti.so.13"), 130001
        self.metrics, self.samples, self.chunk = list(metrics), list(samples), chunk
        self.pending: list[Sample] = []
        self.image: list[Sample] = []
        self.calls: list[str] = []
        self.refuse: dict[str, int] = {}
        self.passes: Callable[[tuple[str, ...]], int] = lambda names: 1
        self.hosts: dict[int, tuple[str, ...]] = {}
        self.made = 0
        self.chosen = 0  # the host whose group the hardware counts
        self.enabled = False
        self.set_up = 0  # how often: the real one gives no samples after the first
        self.overflow, self.interval_ns = 0, 0

    def call(self, name: str, p: SimpleNamespace) -> None:
        self.calls.append(name)
        if name in self.refuse:
            raise cupti.refused(name, self.refuse[name])
        handler = getattr(self, name, None)
        if handler:
            handler(p)

    def cuptiDeviceGetChipName(self, p) -> None:
        p.pChipName = b"GH100"

    def cuptiPmSamplingGetCounterAvailability(self, p) -> None:
        p.counterAvailabilityImageSize = 64

    def cuptiProfilerHostInitialize(self, p) -> None:
        assert (p.profilerType, p.pChipName) == (cupti.PM_SAMPLING, b"GH100")
        assert p.pCounterAvailabilityImage
        self.made += 1
        p.pHostObject = self.made
        self.hosts[self.made] = ()

    def cuptiProfilerHostDeinitialize(self, p) -> None:
        del self.hosts[p.pHostObject]

    def cuptiProfilerHostConfigAddMetrics(self, p) -> None:
        names = tuple(p.ppMetricNames[i].decode() for i in range(p.numMetrics))
        if not set(names) <= set(self.metrics):
            raise cupti.refused("cuptiProfilerHostConfigAddMetrics", cupti.INVALID_METRIC_NAME)
        self.hosts[p.pHostObject] = names

    def cuptiProfilerHostGetConfigImageSize(self, p) -> None:
        p.configImageSize = IMAGE_BYTES

    def cuptiProfilerHostGetConfigImage(self, p) -> None:
        ctypes.c_uint64.from_address(p.pConfigImage).value = p.pHostObject

    def cuptiProfilerHostGetNumOfPasses(self, p) -> None:
        p.numOfPasses = self.passes(self.hosts[_host(p.pConfigImage)])

    def cuptiPmSamplingEnable(self, p) -> None:
        assert not self.enabled
        self.enabled = True
        p.pPmSamplingObject = SAMPLER

    def cuptiPmSamplingDisable(self, p) -> None:
        assert p.pPmSamplingObject == SAMPLER
        self.enabled = False

    def cuptiPmSamplingSetConfig(self, p) -> None:
        assert (p.pPmSamplingObject, p.configSize, p.triggerMode) == (SAMPLER, IMAGE_BYTES, cupti.GPU_TIME_INTERVAL)
        assert self.enabled
        self.set_up += 1
        self.chosen = _host(p.pConfig)
        assert self.passes(self.hosts[self.chosen]) == 1
        self.interval_ns = p.samplingInterval

    def cuptiPmSamplingStart(self, p) -> None:
        assert self.enabled
        self.pending = list(self.samples)

    def cuptiPmSamplingGetCounterDataSize(self, p) -> None:
        p.counterDataSize = 4096

    def cuptiPmSamplingCounterDataImageInitialize(self, p) -> None:
        assert p.counterDataSize == 4096
        self.image = []

    def cuptiPmSamplingDecodeData(self, p) -> None:
        self.image, self.pending = self.pending[: self.chunk], self.pending[self.chunk :]
        p.overflow = self.overflow
        p.decodeStopReason = cupti.COUNTER_DATA_FULL if self.pending else cupti.END_OF_RECORDS

    def cuptiPmSamplingGetCounterDataInfo(self, p) -> None:
        p.numTotalSamples = p.numPopulatedSamples = p.numCompletedSamples = len(self.image)

    def cuptiPmSamplingCounterDataGetSampleInfo(self, p) -> None:
        p.startTimestamp, p.endTimestamp = self.image[p.sampleIndex][:2]

    def cuptiProfilerHostEvaluateToGpuValues(self, p) -> None:
        assert p.pHostObject == self.chosen
        names = tuple(p.ppMetricNames[i].decode() for i in range(p.numMetrics))
        assert names == self.hosts[self.chosen]
        for i, name in enumerate(names):
            p.pMetricValues[i] = self.image[p.rangeIndex][2 + self.metrics.index(name)]


def _host(config_image: int) -> int:
    return ctypes.c_uint64.from_address(config_image).value
