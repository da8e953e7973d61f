"""Wrong kernels before the gate, emulated (numbers in catalogue.yaml); test_fault_kernels_gpu.py runs them on a device."""

from __future__ import annotations

from typing import Any

import planted_changes
import pytest
import torch
from emulation.device import emulated
from judging import Judged
from wrong_kernels import FAULTS

__all__ = ["emulated"]


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_rejected(emulated: Any, fault: str) -> None:
    judged = Judged("cpu", batch=1 if fault == "SINGLE_SAMPLE" else 16)
    check = judged.with_kernels(emulated.compiled, lambda: None, fault)
    assert check.passed is False, check


@pytest.mark.parametrize("batch", [1, 16])
def test_the_kernel_without_a_fault_passes(emulated: Any, batch: int) -> None:
    check = Judged("cpu", batch).with_kernels(emulated.compiled, lambda: None, "")
    assert check.passed is True, check


def test_a_result_that_is_filled_in_later_is_rejected() -> None:
    check = Judged("cpu").with_forward(planted_changes.lazy)
    assert check.passed is False, check
