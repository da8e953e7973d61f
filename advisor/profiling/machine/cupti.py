"""The part of CUPTI that PM sampling needs, bound by ctypes to the libcupti that the process already uses.

torch's wheels bring libcupti as a dependency, and a process must not hold two of them. Bindings on a package registry are
built for one CUPTI release and refuse another, so this one carries the parameter structures itself.

Sources: cupti_target.h, cupti_profiler_target.h, cupti_profiler_host.h and cupti_pmsampling.h of CUDA 12.6 to 13.5. They
differ, for these functions, in two appended fields only (see `Parameters.appended`).
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import sys
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_int, c_size_t, c_uint8, c_uint32, c_uint64, c_void_p
from pathlib import Path
from typing import Any, ClassVar

from advisor.core.errors import AdvisorError

SUCCESS, INVALID_PARAMETER, INVALID_METRIC_NAME = 0, 1, 17
PM_SAMPLING = 1  # CUpti_ProfilerType
GPU_TIME_INTERVAL = 1  # CUpti_PmSampling_TriggerMode: the interval is in nanoseconds
KEEP_OLDEST = 0  # CUpti_PmSampling_HardwareBuffer_AppendMode
COUNTER_DATA_FULL, END_OF_RECORDS = 1, 2  # CUpti_PmSampling_DecodeStopReason

_PERMISSION = (
    "the driver lets only administrators read performance counters",
    "Load the nvidia kernel module with NVreg_RestrictProfilingToAdminUsers=0, or give the process CAP_SYS_ADMIN"
    " (containers: --cap-add=SYS_ADMIN).",
)
_BUSY = ("another profiler holds the performance counters of this GPU", "Stop ncu, nsys, DCGM profiling or the like.")
# CUptiResult values that a user can meet here, in plain words: what was found, what to do.
_MEANING: dict[int, tuple[str, str]] = {
    7: _BUSY,
    8: ("CUPTI ran out of memory", ""),
    14: ("this libcupti does not fit the installed driver", "Use a driver as new as torch's CUDA."),
    15: ("CUPTI could not start: no CUDA driver or device", ""),
    17: ("this libcupti has no such metric for this GPU", "CUDA 12.9 or newer has the DRAM byte counters."),
    26: _BUSY,
    27: ("PM sampling is not supported on this GPU", ""),
    33: ("performance counters are not available on this virtual GPU", ""),
    35: _PERMISSION,
    39: _BUSY,
    40: ("the hypervisor does not allow performance counters on this virtual GPU", ""),
    41: ("performance counters are off in confidential-computing mode", ""),
    42: ("performance counters are not available on a mining GPU", ""),
    43: ("performance counters are not available on a MIG slice", ""),
    44: ("performance counters are not available with SLI", ""),
    45: ("performance counters are not available under WSL", ""),
    46: ("this libcupti does not know this GPU", "Use a torch built for a newer CUDA."),
}


class CountersUnavailable(AdvisorError):
    """Hardware counters cannot be read here; the text says why."""


class Parameters(ctypes.Structure):
    """Base of CUPTI's parameter structures: all begin with their own size and a private pointer.

    `appended` names the fields that later CUPTI releases added at the end, in order; a library of before refuses a
    structure with them, so the binding offers both sizes.
    """

    _fields_: ClassVar[Sequence[tuple[str, Any]]] = (("structSize", c_size_t), ("pPriv", c_void_p))
    appended: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def sizes(cls) -> tuple[int, ...]:
        """Values of `structSize`, newest release first: the end of the last field, without trailing padding."""
        names = ["structSize", "pPriv", *(name for name, _ in cls._fields_)]
        lasts = [getattr(cls, names[-1 - dropped]) for dropped in range(len(cls.appended) + 1)]
        return tuple(last.offset + last.size for last in lasts)


class ProfilerInitialize(Parameters):
    """CUpti_Profiler_Initialize_Params."""

    _fields_ = ()


class DeviceGetChipName(Parameters):
    """CUpti_Device_GetChipName_Params."""

    _fields_ = (("deviceIndex", c_size_t), ("pChipName", c_char_p))


class GetCounterAvailability(Parameters):
    """CUpti_PmSampling_GetCounterAvailability_Params."""

    _fields_ = (
        ("deviceIndex", c_size_t),
        ("counterAvailabilityImageSize", c_size_t),
        ("pCounterAvailabilityImage", c_void_p),
    )


class HostInitialize(Parameters):
    """CUpti_Profiler_Host_Initialize_Params. The last field came with CUDA 13.2."""

    _fields_ = (
        ("profilerType", c_int),
        ("pChipName", c_char_p),
        ("pCounterAvailabilityImage", c_void_p),
        ("pHostObject", c_void_p),
        ("pSinglePassMetricSetName", c_char_p),
    )
    appended = ("pSinglePassMetricSetName",)


class HostDeinitialize(Parameters):
    """CUpti_Profiler_Host_Deinitialize_Params."""

    _fields_ = (("pHostObject", c_void_p),)


class HostConfigAddMetrics(Parameters):
    """CUpti_Profiler_Host_ConfigAddMetrics_Params."""

    _fields_ = (("pHostObject", c_void_p), ("ppMetricNames", POINTER(c_char_p)), ("numMetrics", c_size_t))


class HostGetConfigImageSize(Parameters):
    """CUpti_Profiler_Host_GetConfigImageSize_Params."""

    _fields_ = (("pHostObject", c_void_p), ("configImageSize", c_size_t))


class HostGetConfigImage(Parameters):
    """CUpti_Profiler_Host_GetConfigImage_Params."""

    _fields_ = (("pHostObject", c_void_p), ("configImageSize", c_size_t), ("pConfigImage", c_void_p))


class HostGetNumOfPasses(Parameters):
    """CUpti_Profiler_Host_GetNumOfPasses_Params."""

    _fields_ = (("configImageSize", c_size_t), ("pConfigImage", c_void_p), ("numOfPasses", c_size_t))


class HostEvaluateToGpuValues(Parameters):
    """CUpti_Profiler_Host_EvaluateToGpuValues_Params."""

    _fields_ = (
        ("pHostObject", c_void_p),
        ("pCounterDataImage", c_void_p),
        ("counterDataImageSize", c_size_t),
        ("rangeIndex", c_size_t),
        ("ppMetricNames", POINTER(c_char_p)),
        ("numMetrics", c_size_t),
        ("pMetricValues", POINTER(c_double)),
    )


class PmSamplingEnable(Parameters):
    """CUpti_PmSampling_Enable_Params."""

    _fields_ = (("deviceIndex", c_size_t), ("pPmSamplingObject", c_void_p))


class PmSamplingObject(Parameters):
    """CUpti_PmSampling_Start_Params, _Stop_Params and _Disable_Params, which are alike."""

    _fields_ = (("pPmSamplingObject", c_void_p),)


class PmSamplingSetConfig(Parameters):
    """CUpti_PmSampling_SetConfig_Params. The last field came with CUDA 12.8."""

    _fields_ = (
        ("pPmSamplingObject", c_void_p),
        ("configSize", c_size_t),
        ("pConfig", c_void_p),
        ("hardwareBufferSize", c_size_t),
        ("samplingInterval", c_uint64),
        ("triggerMode", c_int),
        ("hwBufferAppendMode", c_int),
    )
    appended = ("hwBufferAppendMode",)


class PmSamplingGetCounterDataSize(Parameters):
    """CUpti_PmSampling_GetCounterDataSize_Params."""

    _fields_ = (
        ("pPmSamplingObject", c_void_p),
        ("pMetricNames", POINTER(c_char_p)),
        ("numMetrics", c_size_t),
        ("maxSamples", c_uint32),
        ("counterDataSize", c_size_t),
    )


class PmSamplingCounterDataImageInitialize(Parameters):
    """CUpti_PmSampling_CounterDataImage_Initialize_Params."""

    _fields_ = (("pPmSamplingObject", c_void_p), ("counterDataSize", c_size_t), ("pCounterData", c_void_p))


class PmSamplingDecodeData(Parameters):
    """CUpti_PmSampling_DecodeData_Params."""

    _fields_ = (
        ("pPmSamplingObject", c_void_p),
        ("pCounterDataImage", c_void_p),
        ("counterDataImageSize", c_size_t),
        ("decodeStopReason", c_int),
        ("overflow", c_uint8),
    )


class PmSamplingGetCounterDataInfo(Parameters):
    """CUpti_PmSampling_GetCounterDataInfo_Params."""

    _fields_ = (
        ("pCounterDataImage", c_void_p),
        ("counterDataImageSize", c_size_t),
        ("numTotalSamples", c_size_t),
        ("numPopulatedSamples", c_size_t),
        ("numCompletedSamples", c_size_t),
    )


class PmSamplingGetSampleInfo(Parameters):
    """CUpti_PmSampling_CounterData_GetSampleInfo_Params."""

    _fields_ = (
        ("pPmSamplingObject", c_void_p),
        ("pCounterDataImage", c_void_p),
        ("counterDataImageSize", c_size_t),
        ("sampleIndex", c_size_t),
        ("startTimestamp", c_uint64),
        ("endTimestamp", c_uint64),
    )


class Cupti:
    """A loaded libcupti. `version` is its API version (130001 for CUDA 13.0; two digits before CUDA 13)."""

    def __init__(self, library: ctypes.CDLL, path: Path) -> None:
        self.path = path
        self.library = library
        version = c_uint32()
        self.library.cuptiGetVersion(ctypes.byref(version))
        self.version = int(version.value)

    def call(self, name: str, parameters: Parameters) -> None:
        """Call `name` with `parameters`; output fields are filled in.

        A structure that CUPTI releases know in several sizes is offered newest first, since an older library refuses a
        size it does not know.

        Raises:
            CountersUnavailable: CUPTI refused, or the library has no such function.
        """
        function = getattr(self.library, name, None)
        if function is None:
            raise CountersUnavailable(
                f"{self.path.name} has no {name}",
                expected="CUPTI of CUDA 12.6 or newer",
                fix="Use a torch built for CUDA 12.9 or newer.",
            )
        result = SUCCESS
        for size in parameters.sizes():
            parameters.structSize = size
            result = int(function(ctypes.byref(parameters)))
            if result != INVALID_PARAMETER:
                break
        if result != SUCCESS:
            raise refused(name, result)


def refused(name: str, result: int) -> CountersUnavailable:
    """The error for CUPTI's `result` of calling `name`, in plain words where the cause is known."""
    found, fix = _MEANING.get(result, ("CUPTI refused", ""))
    return CountersUnavailable(f"{found} ({name}: CUptiResult {result})", fix=fix)


def find_library() -> Path:
    """The libcupti of this process: the loaded one, else the one installed beside torch, else the CUDA toolkit's.

    Raises:
        CountersUnavailable: none was found.
    """
    for candidate in (*loaded(), *installed(), *_toolkit()):
        if candidate.exists():
            return candidate
    raise CountersUnavailable(
        "no libcupti was found",
        expected="the one that a CUDA build of torch installs",
        fix='Install a CUDA build of torch, or `pip install "cnn-advisor[counters]"`.',
    )


def load() -> Cupti:
    """Load libcupti and the libraries it opens by name.

    Raises:
        CountersUnavailable: no Linux, no CUDA driver, or no libcupti that loads. Without a driver some CUPTI releases
            crash on their first call, so the driver is tried first.
    """
    if not sys.platform.startswith("linux"):
        raise CountersUnavailable("hardware counters are read on Linux only")
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise CountersUnavailable("no CUDA driver (libcuda.so.1)") from None
    result = int(driver.cuInit(0))
    if result != 0:
        raise CountersUnavailable(f"the CUDA driver does not start (cuInit: CUresult {result})")
    path = find_library()
    for name in ("libnvperf_target.so", "libnvperf_host.so"):
        beside = path.with_name(name)
        if beside.exists():  # libcupti opens them by bare name; a system copy of another release would not fit
            _open(beside)
    return Cupti(_open(path), path)


def _open(path: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise CountersUnavailable(f"{path.name} does not load ({error})") from None


def loaded() -> list[Path]:
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return [Path(p) for p in sorted(set(re.findall(r"\s(/.*/libcupti\.so[.\d]*)$", maps, flags=re.MULTILINE)))]


def installed() -> list[Path]:
    """libcupti in the `nvidia` namespace packages (`nvidia/cu13/lib`, `nvidia/cuda_cupti/lib`), newest release first."""
    spec: Any = importlib.util.find_spec("nvidia")
    folders = [Path(p) for p in spec.submodule_search_locations or ()] if spec else []
    found = [path for folder in folders for path in folder.glob("*/lib/libcupti.so.*")]
    return sorted(found, key=lambda path: path.suffix, reverse=True)


def _toolkit() -> list[Path]:
    roots = [Path("/usr/local/cuda"), *sorted(Path("/usr/local").glob("cuda-*"), reverse=True)]
    return [path for root in roots for path in sorted(root.glob("extras/CUPTI/lib64/libcupti.so.*"))]
