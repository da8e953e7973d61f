"""Wrong kernels and false speed before the gate, on a GPU (numbers in catalogue.yaml)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import planted_changes
import pytest
import torch
from judging import Judged
from wrong_kernels import FAULTS, TYPES

from advisor.ops import cuda_driver, nvrtc

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
needs_cupy = pytest.mark.skipif(torch.cuda.is_available() and bool(nvrtc.unavailable()), reason="needs CuPy")


@pytest.fixture(autouse=True)
def _strict_fp32() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def compiled(source: str, entry: str, defines: dict[str, int]) -> Any:
    import cupy

    raw = cupy.RawModule(code=source, options=nvrtc.options(defines), backend="nvrtc").get_function(entry)
    return cuda_driver.Kernel(raw.kernel, entry, TYPES[entry])


def stream() -> int:
    return nvrtc.stream(torch.cuda.current_device())


@needs_cupy
@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_is_rejected_on_a_gpu(fault: str) -> None:
    judged = Judged("cuda", batch=1 if fault == "SINGLE_SAMPLE" else 16)
    check = judged.with_kernels(compiled, stream, fault)
    assert check.passed is False, check


@needs_cupy
@pytest.mark.parametrize("batch", [1, 16])
def test_the_kernel_without_a_fault_passes_on_a_gpu(batch: int) -> None:
    check = Judged("cuda", batch).with_kernels(compiled, stream, "")
    assert check.passed is True, check


@pytest.mark.parametrize(
    "cheat",
    [planted_changes.cached, planted_changes.lazy, planted_changes.on_a_side_stream],
    ids=lambda cheat: cheat.__name__,
)
def test_a_step_that_only_looks_done_is_rejected_on_a_gpu(cheat: Any) -> None:
    check = Judged("cuda").with_forward(cheat)
    assert check.passed is False, check


@pytest.mark.parametrize("same", [lambda forward: forward, planted_changes.slower], ids=["nothing", "slower"])
def test_what_computes_the_same_passes_on_a_gpu(same: Any) -> None:
    check = Judged("cuda").with_forward(same)
    assert check.passed is True, check
