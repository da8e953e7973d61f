"""What counts as clean under compute-sanitizer."""

from __future__ import annotations

from typing import Any

import pytest
import sanitize

from advisor.ops import catalog


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


@pytest.mark.parametrize("name", ["squeeze_excite"])
def test_what_the_slow_tools_watch_runs_every_kernel(emulated: Any, name: str) -> None:
    family = catalog.get(name)
    sanitize.exercise(family, "cpu")
    entries = {entry for entries in family.kernels.values() for entry in entries}
    assert set(emulated.launches) >= entries


def test_a_case_that_runs_no_kernel_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError):
        sanitize.exercise(catalog.get("bias_act"), "cpu")
