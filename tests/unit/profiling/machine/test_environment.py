"""The environment probe: what it measures on a CPU, when it is kept, what its failures say."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import FakeNvml

from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.profiling.machine import environment, hostload, ownprocess, rates

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "advisor"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "CPU_COPY_BYTES", 1 << 20)
    monkeypatch.setattr(rates, "CPU_MATRIX", 128)
    monkeypatch.setattr(rates, "ATTEMPTS", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.usefixtures("small")
def test_a_cpu_is_measured() -> None:
    found = environment.measure()
    assert found.device == "cpu"
    assert found.copy_gbps > 0
    assert set(found.matrix_tflops) == {"fp32", "bf16", "fp16"}
    assert all(rate > 0 for rate in found.matrix_tflops.values())
    assert found.rates_provenance == "measured"
    assert found.torch == torch.__version__
    assert found.python.startswith(f"{sys.version_info[0]}.{sys.version_info[1]}")
    assert (found.gpu_count, found.sm_arch, found.vector_tflops) == (0, 0, 0.0)
    assert 1 <= found.cpu_count <= (os.cpu_count() or 1)
    assert found.host_memory_bytes > 1 << 28


@pytest.mark.usefixtures("small")
def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/usr/bin/g++" if name == "g++" else None)
    assert environment.can_compile()
    monkeypatch.setattr(environment.shutil, "which", lambda name: "/opt/cc" if name == "/opt/cc" else None)
    assert not environment.can_compile()
    monkeypatch.setenv("CXX", "/opt/cc -m64")
    assert environment.can_compile()


def test_compiling_for_a_gpu_needs_triton_and_volta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.shutil, "which", lambda name: name)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 0))
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: object())
    assert environment.can_compile()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    assert not environment.can_compile()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    assert not environment.can_compile()


def answer(found: Environment) -> subprocess.CompletedProcess[str]:
    import json

    return subprocess.CompletedProcess([], 0, "noise\n" + json.dumps(storage.to_plain(found)) + "\n", "")


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Environment]:
    """The environments that probing children will find, in order; popped one by one."""
    queue: list[Environment] = []
    monkeypatch.setattr(environment, "run_module", lambda *_, **__: answer(queue.pop(0)))
    return queue


def test_a_measurement_is_made_once_per_machine(children: list[Environment], cache: Path) -> None:
    first = Environment(copy_gbps=20.0, rates_provenance="measured", matrix_tflops={"fp32": 0.1})
    children += [first]
    assert environment.probe() == first
    assert environment.probe() == first  # no second child: the queue is empty
    assert stat.S_IMODE(cache.stat().st_mode) == 0o700
    assert len(list(cache.iterdir())) == 1


def test_asking_again_replaces_what_was_kept(children: list[Environment]) -> None:
    old, new = (Environment(copy_gbps=rate, rates_provenance="measured") for rate in (20.0, 30.0))
    children += [old, new]
    environment.probe()
    assert environment.probe(use_cache=False) == new
    assert environment.probe() == new


@pytest.mark.parametrize(
    "disturbed",
    [
        Environment(rates_provenance="unavailable", notes=("rates not measured: out of memory",)),
        Environment(copy_gbps=9.0, rates_provenance="measured", rates_doubt="other processes took 40 % of the cores"),
    ],
)
def test_disturbed_rates_are_not_kept(children: list[Environment], disturbed: Environment) -> None:
    quiet = Environment(copy_gbps=20.0, rates_provenance="measured")
    children += [disturbed, quiet]
    assert environment.probe() == disturbed
    assert environment.probe() == quiet


def test_a_broken_cache_file_is_measured_anew(children: list[Environment], cache: Path) -> None:
    found = Environment(copy_gbps=20.0, rates_provenance="measured")
    children += [found, found]
    environment.probe()
    (kept,) = cache.iterdir()
    kept.write_text("{")
    assert environment.probe() == found
    assert children == []


def test_where_the_disk_is_full_it_is_measured_each_time(
    children: list[Environment], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    found = Environment(copy_gbps=20.0, rates_provenance="measured")
    children += [found, found]
    assert environment.probe() == environment.probe() == found
    assert not list(cache.iterdir())


def test_another_gpu_or_thread_count_is_another_machine(
    children: list[Environment], monkeypatch: pytest.MonkeyPatch
) -> None:
    children += [Environment(copy_gbps=float(rate), rates_provenance="measured") for rate in (1, 2, 3)]
    seen = [environment.probe().copy_gbps]
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # not what the tests themselves run with
    seen.append(environment.probe().copy_gbps)
    FakeNvml().use(monkeypatch)
    seen.append(environment.probe().copy_gbps)
    assert seen == [1.0, 2.0, 3.0]


def test_an_unwritable_cache_is_no_error(children: list[Environment], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    found = Environment(copy_gbps=20.0, rates_provenance="measured")
    children += [found]
    assert environment.probe() == found


def test_another_interpreter_is_not_kept(children: list[Environment]) -> None:
    children += [Environment(copy_gbps=float(rate), rates_provenance="measured") for rate in (1, 2)]
    assert environment.probe(python="/elsewhere/python").copy_gbps == 1
    assert environment.probe(python="/elsewhere/python").copy_gbps == 2


def test_no_torch_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nModuleNotFoundError: No module named 'torch'\n")
    monkeypatch.setattr(environment, "run_module", lambda *_, **__: failed)
    with pytest.raises(AdvisorError, match=r"No module named 'torch'.*import torch"):
        environment.probe()


def test_a_probe_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(*_: object, timeout_s: float, **__: object) -> None:
        raise subprocess.TimeoutExpired([], timeout_s)

    monkeypatch.setattr(environment, "run_module", hang)
    with pytest.raises(AdvisorError, match="more than 300 s"):
        environment.probe()


def test_no_interpreter() -> None:
    with pytest.raises(AdvisorError, match="does not start"):
        environment.probe(python="/no/such/python")


def test_own_processes_ignore_the_users_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('imported by mistake')")
    monkeypatch.chdir(tmp_path)
    child = ownprocess.run_module("advisor.profiling.machine.counters", timeout_s=10_000)
    assert child.returncode == 0, child.stderr


def test_the_supervisor_does_not_import_torch() -> None:
    code = (
        "import sys; from advisor.cli import examination; from advisor.profiling.beside import sampler; from advisor.profiling.machine import environment;"
        "environment._key(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_cores_are_never_less_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostload.os, "sched_getaffinity", lambda pid: set(), raising=False)
    assert hostload.cpu_count() == 1


@pytest.mark.gpu
def test_rates_of_a_gpu_are_plausible() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    found = environment.measure()
    assert found.device == "cuda"
    assert found.gpu_uuid.startswith(("GPU-", "MIG-"))
    assert 20 < found.copy_gbps < 20_000
    rates = found.matrix_tflops
    assert rates["fp32"] < 1.3 * found.vector_tflops  # strict fp32 has no matrix units
    if found.sm_arch >= 80:
        assert rates["bf16"] > 2 * rates["fp32"]
        assert rates["tf32"] > rates["fp32"]
