"""The binding's structures against the C compiler's own view of NVIDIA's headers, and its calls against a fake library."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from advisor.profiling.machine import cupti

# (structSize, field → (offset, size)), printed by a C++ program compiled by g++ 12 for x86-64 against the headers of
# CUPTI 12.6.80, 12.8.90, 12.9.79, 13.0.85, 13.1.115, 13.2.86, 13.3.75, 13.4.92 and 13.5.25. All nine agree but for the
# fields appended later, which OLDER lists.
LAYOUT = {
    "ProfilerInitialize": (16, {}),
    "DeviceGetChipName": (32, {"deviceIndex": (16, 8), "pChipName": (24, 8)}),
    "GetCounterAvailability": (
        40,
        {"deviceIndex": (16, 8), "counterAvailabilityImageSize": (24, 8), "pCounterAvailabilityImage": (32, 8)},
    ),
    "HostInitialize": (
        56,
        {
            "profilerType": (16, 4),
            "pChipName": (24, 8),
            "pCounterAvailabilityImage": (32, 8),
            "pHostObject": (40, 8),
            "pSinglePassMetricSetName": (48, 8),
        },
    ),
    "HostDeinitialize": (24, {"pHostObject": (16, 8)}),
    "HostConfigAddMetrics": (40, {"pHostObject": (16, 8), "ppMetricNames": (24, 8), "numMetrics": (32, 8)}),
    "HostGetConfigImageSize": (32, {"pHostObject": (16, 8), "configImageSize": (24, 8)}),
    "HostGetConfigImage": (40, {"pHostObject": (16, 8), "configImageSize": (24, 8), "pConfigImage": (32, 8)}),
    "HostGetNumOfPasses": (40, {"configImageSize": (16, 8), "pConfigImage": (24, 8), "numOfPasses": (32, 8)}),
    "HostEvaluateToGpuValues": (
        72,
        {
            "pHostObject": (16, 8),
            "pCounterDataImage": (24, 8),
            "counterDataImageSize": (32, 8),
            "rangeIndex": (40, 8),
            "ppMetricNames": (48, 8),
            "numMetrics": (56, 8),
            "pMetricValues": (64, 8),
        },
    ),
    "PmSamplingEnable": (32, {"deviceIndex": (16, 8), "pPmSamplingObject": (24, 8)}),
    "PmSamplingObject": (24, {"pPmSamplingObject": (16, 8)}),
    "PmSamplingSetConfig": (
        64,
        {
            "pPmSamplingObject": (16, 8),
            "configSize": (24, 8),
            "pConfig": (32, 8),
            "hardwareBufferSize": (40, 8),
            "samplingInterval": (48, 8),
            "triggerMode": (56, 4),
            "hwBufferAppendMode": (60, 4),
        },
    ),
    "PmSamplingGetCounterDataSize": (
        56,
        {
            "pPmSamplingObject": (16, 8),
            "pMetricNames": (24, 8),
            "numMetrics": (32, 8),
            "maxSamples": (40, 4),
            "counterDataSize": (48, 8),
        },
    ),
    "PmSamplingCounterDataImageInitialize": (
        40,
        {"pPmSamplingObject": (16, 8), "counterDataSize": (24, 8), "pCounterData": (32, 8)},
    ),
    "PmSamplingDecodeData": (
        45,
        {
            "pPmSamplingObject": (16, 8),
            "pCounterDataImage": (24, 8),
            "counterDataImageSize": (32, 8),
            "decodeStopReason": (40, 4),
            "overflow": (44, 1),
        },
    ),
    "PmSamplingGetCounterDataInfo": (
        56,
        {
            "pCounterDataImage": (16, 8),
            "counterDataImageSize": (24, 8),
            "numTotalSamples": (32, 8),
            "numPopulatedSamples": (40, 8),
            "numCompletedSamples": (48, 8),
        },
    ),
    "PmSamplingGetSampleInfo": (
        64,
        {
            "pPmSamplingObject": (16, 8),
            "pCounterDataImage": (24, 8),
            "counterDataImageSize": (32, 8),
            "sampleIndex": (40, 8),
            "startTimestamp": (48, 8),
            "endTimestamp": (56, 8),
        },
    ),
}
OLDER = {"HostInitialize": 48, "PmSamplingSetConfig": 60}  # before CUDA 13.2 and 12.8


@pytest.mark.parametrize("name", sorted(LAYOUT))
def test_structures_are_laid_out_as_the_headers_say(name: str) -> None:
    structure = getattr(cupti, name)
    size, fields = LAYOUT[name]
    assert {f: (getattr(structure, f).offset, getattr(structure, f).size) for f in fields} == fields
    assert [f for f, _ in structure._fields_] == list(fields)
    assert structure.sizes() == ((size, OLDER[name]) if name in OLDER else (size,))


def test_every_structure_is_checked() -> None:
    assert set(LAYOUT) == {c.__name__ for c in cupti.Parameters.__subclasses__()}


class Library:
    """Stands for a libcupti of a release that knows one size of each structure."""

    def __init__(self, known: int, result: int = 0) -> None:
        self.known, self.result, self.offered = known, result, []

    def cuptiGetVersion(self, version: object) -> int:
        ctypes.cast(version, ctypes.POINTER(ctypes.c_uint32))[0] = 130001
        return 0

    def cuptiProfilerHostInitialize(self, parameters: object) -> int:
        size = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_size_t))[0]
        self.offered.append(size)
        return self.result if size == self.known else cupti.INVALID_PARAMETER


@pytest.mark.parametrize(("known", "offered"), [(56, [56]), (48, [56, 48])])
def test_an_older_library_is_offered_the_smaller_structure(known: int, offered: list[int]) -> None:
    library = Library(known)
    cupti.Cupti(library, Path("libcupti.so.13")).call("cuptiProfilerHostInitialize", cupti.HostInitialize())
    assert library.offered == offered


def test_a_refusal_is_not_tried_again_and_is_told_in_plain_words() -> None:
    library = Library(56, result=35)
    with pytest.raises(cupti.CountersUnavailable, match=r"administrators.*NVreg_RestrictProfilingToAdminUsers=0"):
        cupti.Cupti(library, Path("libcupti.so.13")).call("cuptiProfilerHostInitialize", cupti.HostInitialize())
    assert library.offered == [56]


def test_a_library_without_pm_sampling_is_told() -> None:
    with pytest.raises(cupti.CountersUnavailable, match=r"libcupti.so.11 has no cuptiPmSamplingEnable"):
        cupti.Cupti(Library(56), Path("libcupti.so.11")).call("cuptiPmSamplingEnable", cupti.PmSamplingEnable())


@pytest.mark.parametrize(
    ("result", "words"),
    [(7, "another profiler"), (26, "another profiler"), (27, "not supported"), (43, "MIG"), (999, "CUptiResult 999")],
)
def test_causes_in_plain_words(result: int, words: str) -> None:
    assert words in str(cupti.refused("cuptiPmSamplingEnable", result))


def test_no_driver_is_told_before_any_call_into_libcupti(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    def cdll(name: str, **_: object) -> None:
        opened.append(name)
        raise OSError(name)

    monkeypatch.setattr(cupti.ctypes, "CDLL", cdll)
    with pytest.raises(cupti.CountersUnavailable, match="no CUDA driver"):
        cupti.load()
    assert opened == ["libcuda.so.1"]


def test_other_systems_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupti.sys, "platform", "win32")
    with pytest.raises(cupti.CountersUnavailable, match="Linux only"):
        cupti.load()


def test_the_loaded_library_is_preferred_to_installed_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    loaded, installed = tmp_path / "loaded.so", tmp_path / "installed.so"
    installed.touch()
    monkeypatch.setattr(cupti, "loaded", lambda: [loaded])
    monkeypatch.setattr(cupti, "installed", lambda: [installed])
    assert cupti.find_library() == installed  # a deleted file that is still mapped cannot be opened again
    loaded.touch()
    assert cupti.find_library() == loaded


def test_the_loaded_library_is_found_in_paths_with_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    maps = (
        "7f00-7f01 r--p 00000000 08:01 42    /home/ada l/venv/nvidia/cu13/lib/libcupti.so.13\n"
        "7f01-7f02 r--p 00000000 08:01 43    /usr/lib/libc.so.6\n"
    )
    monkeypatch.setattr(cupti.Path, "read_text", lambda *_, **__: maps)
    assert cupti.loaded() == [Path("/home/ada l/venv/nvidia/cu13/lib/libcupti.so.13")]


def test_no_library_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("loaded", "installed", "_toolkit"):
        monkeypatch.setattr(cupti, place, list)
    with pytest.raises(cupti.CountersUnavailable, match=r"no libcupti was found; expected .*\. Install a CUDA build"):
        cupti.find_library()
