"""Faults that a trial meets on a GPU (numbers in catalogue.yaml). Each search is processes of its own: some lose the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from searching import search_with

from advisor.ops import nvrtc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.skipif(torch.cuda.is_available() and bool(nvrtc.unavailable()), reason="needs CuPy")
def test_an_illegal_access_ends_its_own_trial_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = search_with(tmp_path, monkeypatch, "cuda", "illegal_access", "nothing")
    verdict = found.verdicts["illegal_access"]
    assert verdict.status == "failed", verdict
    assert "illegal memory access" in verdict.reason
    assert "\n" not in verdict.reason
    assert len([line for line in found.said if "illegal memory access" in line]) == 1, found.said
    # The candidate after it was measured in a process of its own, and is not blamed.
    assert found.verdicts["nothing"].numerics is not None
    assert found.verdicts["nothing"].numerics.passed, found.verdicts["nothing"]
    assert found.code in (0, 4)


def test_a_failed_assertion_in_the_users_step_ends_its_own_trial_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = search_with(tmp_path, monkeypatch, "cuda", "failed_assertion", "nothing")
    assert found.verdicts["failed_assertion"].status == "failed", found.verdicts["failed_assertion"]
    assert found.verdicts["nothing"].numerics is not None
    assert found.verdicts["nothing"].numerics.passed, found.verdicts["nothing"]


def test_memory_that_runs_out_costs_the_candidate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the gate, with the process going on, and in the user's own step."""
    found = search_with(tmp_path, monkeypatch, "cuda", "nothing", "out_of_memory", "out_of_memory_later")
    for name in ("out_of_memory", "out_of_memory_later"):
        assert found.verdicts[name].status == "failed", found.verdicts[name]
        assert "out of memory" in found.verdicts[name].reason, found.verdicts[name]
    assert found.verdicts["nothing"].status in ("reverted", "inconclusive")


def test_a_kernel_that_does_not_end_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = search_with(tmp_path, monkeypatch, "cuda", "hangs", "nothing", limit_s=4.0)
    assert found.verdicts["hangs"].status == "failed", found.verdicts["hangs"]
    assert "did not end within" in found.verdicts["hangs"].reason
    assert found.verdicts["nothing"].status in ("reverted", "inconclusive"), found.verdicts["nothing"]


def test_nothing_slow_or_false_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    false, idle = ("cached", "lazy", "side_stream"), ("nothing", "slower")
    found = search_with(tmp_path, monkeypatch, "cuda", *false, *idle)
    for name in false:
        assert found.verdicts[name].status == "reverted", found.verdicts[name]
        assert "changes the training" in found.verdicts[name].reason
    for name in idle:
        assert found.verdicts[name].status in ("reverted", "inconclusive"), found.verdicts[name]
        assert found.verdicts[name].numerics is not None
        assert found.verdicts[name].numerics.passed
