"""The doctor's judgement of each machine it may meet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_nvml import FakeNvml

from advisor.cli import examination, machinefacts
from advisor.cli.examination import Health
from advisor.cli.machinefacts import Facts
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError

LAPTOP = Facts(
    python=(3, 11, 7),
    torch="2.9.0",
    environment=Environment(
        device="cpu", torch="2.9.0+cpu", copy_gbps=20.0, matrix_tflops={"fp32": 0.2}, rates_provenance="measured"
    ),
    nvml_error="NVML library (libnvidia-ml.so.1) not found",
    compiler="/usr/bin/g++",
    c_compiler="/usr/bin/gcc",
    cache="/home/ada/.cache/advisor",
)
SERVER = Facts(
    python=(3, 12, 3),
    torch="2.11.0+cu130",
    environment=Environment(
        device="cuda",
        torch="2.11.0+cu130",
        cuda="13.0",
        cudnn="9.19.0",
        sm_arch=90,
        copy_gbps=4244.0,
        matrix_tflops={"fp32": 50.0, "bf16": 760.0},
        rates_provenance="measured",
    ),
    gpu={"name": "NVIDIA H200", "uuid": "GPU-1", "driver": "580.65.06"},
    driver_cuda=(13, 0),
    constants={"sm_clock_max_mhz": 1980.0},
    reading={"sm_clock_mhz": 1980.0, "temperature_c": 40.0, "clock_reasons": 0.0},
    gpm=True,
    processes=(),
    admin_only=False,
    counters=True,
    cupy=("cupy-cuda13x 14.2.0",),
    triton="3.5.0",
    compiler="/usr/bin/g++",
    c_compiler="/usr/bin/gcc",
    cache="/home/ada/.cache/advisor",
)


def check(facts: Facts, name: str) -> examination.Examined:
    return next(c for c in examination.judge(facts) if c.name == name)


def test_a_good_server_has_nothing_to_mend() -> None:
    assert {c.status for c in examination.judge(SERVER)} == {Health.OK}


def test_a_laptop_hears_of_its_missing_gpu_once() -> None:
    checks = examination.judge(LAPTOP)
    assert [c.name for c in checks if c.status is not Health.OK] == ["GPU"]
    assert not {"CuPy", "Driver", "GPM"} & {c.name for c in checks}


def env(**changes: object) -> Environment:
    assert SERVER.environment
    return replace(SERVER.environment, **changes)


CPU_BUILD = Environment(device="cpu", torch="2.9.0+cpu", copy_gbps=1.0)
BLIND = Environment(device="cpu", torch="2.9.0+cu130", copy_gbps=1.0)
LOW = {"sm_clock_mhz": 600.0, "clock_reasons": 2.0}


@pytest.mark.parametrize(
    ("changes", "name", "status", "words"),
    [
        ({"python": (3, 9, 1)}, "Python", Health.MISSING, "3.10"),
        ({"linux": False}, "Python", Health.WARN, "Linux only"),
        ({"torch": ""}, "PyTorch", Health.MISSING, "not installed"),
        ({"torch": "2.4.1"}, "PyTorch", Health.MISSING, "2.8"),
        ({"environment": None, "environment_error": "boom"}, "PyTorch", Health.MISSING, "boom"),
        ({"environment": CPU_BUILD}, "PyTorch", Health.WARN, "a CPU build, and there is a GPU"),
        ({"environment": BLIND}, "PyTorch", Health.WARN, "does not see the GPU"),
        ({"driver_cuda": (12, 4)}, "Driver", Health.MISSING, "runs CUDA 12.4, torch needs 13.0"),
        ({"environment": env(sm_arch=75)}, "Driver", Health.WARN, "sm_75"),
        ({"cupy": ()}, "CuPy", Health.MISSING, "cnn-advisor[cuda13]"),
        ({"cupy": ("cupy-cuda12x 14.2.0",)}, "CuPy", Health.MISSING, "pip uninstall cupy-cuda12x"),
        ({"cupy": ("cupy-cuda13x 14.2", "cupy-cuda12x 13.4")}, "CuPy", Health.WARN, "together"),
        ({"cupy_error": "libnvrtc.so.13: not found"}, "CuPy", Health.MISSING, "libnvrtc.so.13"),
        ({"calls_error": "no C++ compiler"}, "Kernels' calls", Health.WARN, "no C++ compiler"),
        ({"nvml_error": "the NVIDIA driver is not loaded"}, "NVML", Health.WARN, "not loaded"),
        ({"old_pynvml": "11.5.0"}, "NVML", Health.WARN, "pip uninstall pynvml"),
        ({"gpm": False, "gpm_error": "GPM needs Hopper or newer"}, "GPM", Health.WARN, "Hopper"),
        (
            {"counters": False, "counters_error": "no libcupti"},
            "Hardware counters",
            Health.WARN,
            "modelled from shapes",
        ),
        ({"counters": False, "admin_only": True}, "Hardware counters", Health.WARN, "RmProfilingAdminOnly: 1"),
        ({"mig": True}, "MIG", Health.WARN, "slice"),
        ({"processes": (4711,)}, "Other GPU processes", Health.WARN, "4711"),
        ({"processes": None}, "Other GPU processes", Health.WARN, "cannot be told"),
        ({"reading": {"sm_clock_mhz": 900.0, "clock_reasons": 64.0}}, "Clocks", Health.WARN, "throttled"),
        ({"reading": LOW}, "Clocks", Health.WARN, "locked low"),
        ({"reading": {}}, "Clocks", Health.WARN, "cannot be read"),
        ({"triton": ""}, "torch.compile", Health.MISSING, "no Triton"),
        ({"c_compiler": ""}, "torch.compile", Health.MISSING, "no C compiler"),
        ({"compiled_error": "/opt/torch cannot be written"}, "Compiled modules", Health.WARN, "compileall"),
        ({"cache_error": "Read-only file system"}, "Cache folder", Health.WARN, "XDG_CACHE_HOME"),
        (
            {"environment": env(copy_gbps=0.0, notes=("out of memory",))},
            "Measured rates",
            Health.MISSING,
            "out of memory",
        ),
        ({"environment": env(rates_doubt="the GPU throttled")}, "Measured rates", Health.WARN, "measured again"),
    ],
)
def test_each_lack_is_named_with_what_to_do(changes: dict[str, object], name: str, status: Health, words: str) -> None:
    found = check(replace(SERVER, **changes), name)
    assert found.status is status
    assert words in f"{found.found} {found.fix}"
    assert found.fix


def test_a_gpu_at_rest_is_not_throttled() -> None:
    idle = replace(SERVER, reading={"sm_clock_mhz": 345.0, "clock_reasons": 1.0})
    assert check(idle, "Clocks").status is Health.OK


def test_no_cpp_compiler_on_a_laptop() -> None:
    assert check(replace(LAPTOP, compiler=""), "torch.compile").status is Health.MISSING


def test_gathering_survives_a_machine_where_everything_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(**_: object) -> Environment:
        raise AdvisorError("measuring this machine failed (no torch)")

    FakeNvml().use(monkeypatch).faults["nvmlInit"] = 9
    monkeypatch.setattr(machinefacts.environment, "probe", fail)
    monkeypatch.setattr(machinefacts.shutil, "which", lambda name: None)
    monkeypatch.setattr(machinefacts, "PARAMETERS", tmp_path / "none")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    told: list[str] = []
    facts = machinefacts.gather(say=told.append)
    assert "rates" in told[0]  # they are not kept: whoever waits is told for what
    assert facts.nvml_error == "the NVIDIA driver is not loaded"
    assert facts.environment_error.startswith("measuring this machine failed")
    assert facts.cache_error
    assert Health.MISSING in {c.status for c in examination.judge(facts)}


def test_gathering_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parameters = tmp_path / "params"
    parameters.write_text("ResmanDebugLevel: 4294967295\nRmProfilingAdminOnly: 1\n")
    fake = FakeNvml().use(monkeypatch)
    fake.gpus[0].pids = [4711]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(machinefacts.environment, "probe", lambda **_: SERVER.environment)
    monkeypatch.setattr(machinefacts.counters, "preflight", lambda: (False, "refused"))
    monkeypatch.setattr(machinefacts, "try_cupy", lambda: "")
    monkeypatch.setattr(machinefacts, "PARAMETERS", parameters)
    told: list[str] = []
    monkeypatch.setattr(machinefacts.environment, "kept", lambda: SERVER.environment)
    facts = machinefacts.gather(say=told.append)
    assert told[0].startswith("Trying")  # not that it measures: its rates are kept
    assert (facts.admin_only, facts.counters_error, facts.processes) == (True, "refused", (4711,))
    assert facts.driver_cuda == (13, 0)
    assert facts.gpu["driver"] == "580.65.06"
    assert "CAP_SYS_ADMIN" in check(facts, "Hardware counters").fix
    assert fake.open_samples == 0
