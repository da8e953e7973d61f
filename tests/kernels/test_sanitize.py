"""What counts as clean under compute-sanitizer."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import sanitize
import torch

from advisor.bench import results
from advisor.ops import catalog
from advisor.ops.family import Case, Family
from benchmark_pages import checks


def test_only_a_summary_of_nothing_is_clean() -> None:
    assert sanitize.judged("========= ERROR SUMMARY: 0 errors\n", 0) == (True, "clean")
    assert sanitize.judged("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0)[0]


def test_errors_hazards_silence_and_a_failing_verification_are_not() -> None:
    text = "========= Invalid __global__ read of size 16 bytes\n========= ERROR SUMMARY: 3 errors\n"
    passed, told = sanitize.judged(text, 0)
    assert not passed
    assert "Invalid __global__ read" in told
    assert not sanitize.judged("========= RACECHECK SUMMARY: 2 hazards displayed (2 errors, 0 warnings)\n", 0)[0]
    assert not sanitize.judged("unrecognised option '-k'\n", 255)[0]
    assert not sanitize.judged("========= ERROR SUMMARY: 0 errors\n", 1)[0]


def test_reads_of_memory_that_nobody_wrote_are_told() -> None:
    text = (
        "========= COMPUTE-SANITIZER\n========= Uninitialized __global__ memory read of size 16 bytes\n"
        "=========     at max_pool_forward+0x1120\n=========     Saved host backtrace up to driver entry point at error\n"
        + "=========         Host Frame: cudaMemcpyAsync [0x70eec] in libcudart.so.13\n" * 20
        + "========= \n========= Uninitialized __global__ memory read of size 2 bytes\n========= ERROR SUMMARY: 48578 errors\n"
    )
    passed, told = sanitize.judged(text, 0)
    assert not passed
    assert told.startswith("ERROR SUMMARY: 48578")
    assert "at max_pool_forward" in told
    assert "read of size 2 bytes" in told
    assert "Frame" not in told


@pytest.mark.parametrize("tool", checks.TOOLS)
def test_what_a_tool_is_asked(monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    asked: dict[str, Any] = {}

    def ran(command: list[str], **rest: Any) -> subprocess.CompletedProcess[str]:
        asked.update(command=command, environment=rest["env"])
        return subprocess.CompletedProcess(command, 0, "========= ERROR SUMMARY: 0 errors\n", "")

    monkeypatch.setattr(subprocess, "run", ran)
    assert sanitize.check(tool, catalog.get("batchnorm_max_pool"), 1.0) == (True, "clean")
    # Its statistics are the other family's kernels: without them in the filter initcheck would not see them written.
    assert {"--kernel-name=kne=batchnorm_act_stats", "--kernel-name=kne=batchnorm_max_pool_forward"} <= set(
        asked["command"]
    )
    assert ("--exercise" in asked["command"]) == (tool != "memcheck")
    assert asked["environment"]["PYTORCH_NO_CUDA_MEMORY_CACHING"] == ("0" if tool == "racecheck" else "1")


def test_a_tool_that_hangs_has_proved_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(command: list[str], **rest: Any) -> Any:
        raise subprocess.TimeoutExpired(command, rest["timeout"])

    monkeypatch.setattr(subprocess, "run", hangs)
    assert sanitize.check("initcheck", catalog.get("pooling"), 7.0) == (False, "not through in 7 s")


def test_without_the_tool_nothing_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(results, "folder", lambda: tmp_path)
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "pooling"])
    with pytest.raises(SystemExit) as ended:
        sanitize.main()
    assert ended.value.code == 2
    assert "compute-sanitizer is not installed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_was_found_goes_on_file_as_soon_as_it_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An interrupted run keeps what it had; what another run found of other families stays."""
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(results, "folder", lambda: tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    file = tmp_path / checks.FILE
    earlier = checks.row(catalog.get("upsample"), "memcheck", True, "clean")
    results.write(file, "sanitizer", [earlier, checks.row(catalog.get("pooling"), "memcheck", False, "3 errors")])

    def checked(tool: str, family: Family, seconds: float) -> tuple[bool, str]:
        if tool == "racecheck":
            raise KeyboardInterrupt
        return True, "clean"

    monkeypatch.setattr(sanitize, "AT_ONCE", 1)
    monkeypatch.setattr(sanitize, "check", checked)
    monkeypatch.setattr(sys, "argv", ["sanitize.py", "pooling"])
    with pytest.raises(KeyboardInterrupt):
        sanitize.main()
    found = [(row["family"], row["tool"], row["clean"]) for row in results.on_file(file)]
    assert found == [("pooling", "memcheck", True), ("upsample", "memcheck", True)]


@pytest.mark.parametrize("family", catalog.FAMILIES, ids=lambda family: family.id)
def test_the_slow_tools_watch_every_kernel_in_every_dtype_and_every_variant(family: Family) -> None:
    def brought(cases: Iterable[Case]) -> tuple[set[tuple[str, str]], set[str]]:
        cases = list(cases)
        kernels = {(k, case.dtype) for case in cases for work in case.passes.values() for k in work.kernels}
        return kernels, {case.name for case in cases}

    few = sanitize.chosen(family)
    assert brought(few) == brought(family.verification)
    assert len(few) <= sum(map(len, brought(few)))  # each brings something


def test_of_alike_cases_the_smallest_is_watched() -> None:
    family = catalog.get("squeeze_excite")
    few = sanitize.chosen(family)
    for case in few:
        alike = [c for c in family.verification if (c.name, c.dtype) == (case.name, case.dtype)]
        assert math.prod(case.shape) == min(math.prod(c.shape) for c in alike)


@pytest.mark.parametrize("name", ["squeeze_excite"])
def test_what_the_slow_tools_watch_runs_every_kernel(emulated: Any, name: str) -> None:
    family = catalog.get(name)
    sanitize.exercise(family, "cpu")
    entries = {entry for entries in family.kernels.values() for entry in entries}
    assert set(emulated.launches) >= entries


def test_a_case_that_runs_no_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError):
        sanitize.exercise(catalog.get("bias_act"), "cpu")
