"""Budgets of the bundled kernels in a training step on a GPU, held by the project's own pytest plugin.

What is asserted are causes, which are the same on every GPU: kernels, launches, waits, copies, bytes. One time is
compared, in pairs, with the step that the kernels replace.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from advisor.ops import dispatch
from advisor.ops.batchnorm_act import api, spec
from advisor.testing.judged import CannotJudge
from advisor.testing.perf import Perf

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.perf(min_arch="sm_80", gpus=1),
]

SHAPE = (128, 256, 56, 56)  # beyond one launch of the whole GPU (spec.GRID_MOST_BYTES)
ELEMENTS = math.prod(SHAPE)


def tensor() -> torch.Tensor:
    values = torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16)
    return values.to(memory_format=torch.channels_last).requires_grad_()


def bundled_step() -> Callable[[], None]:
    """BatchNorm, add and ReLU, forward and backward, by the bundled kernels."""
    x, residual, grad = tensor(), tensor(), tensor().detach()
    norm = nn.BatchNorm2d(SHAPE[1]).cuda()

    def step() -> None:
        x.grad = residual.grad = None
        norm.zero_grad()
        with dispatch.everything():
            y = api.batchnorm_act(
                x, residual, norm.running_mean, norm.running_var, norm.weight, norm.bias, 0.1, 1e-5, "relu"
            )
        y.backward(grad)

    return step


def plain_step() -> Callable[[], None]:
    """The same by PyTorch's own operators."""
    x, residual, grad = tensor(), tensor(), tensor().detach()
    norm = nn.BatchNorm2d(SHAPE[1]).cuda()

    def step() -> None:
        x.grad = residual.grad = None
        norm.zero_grad()
        torch.relu(norm(x) + residual).backward(grad)

    return step


def test_two_kernels_forward_and_two_backward_and_no_wait(perf_gpu: Perf) -> None:
    result = perf_gpu.measure(bundled_step())
    for entry in (*spec.KERNELS[spec.FORWARD], *spec.KERNELS[spec.BACKWARD]):
        result.assert_kernel(f"^{entry}$", min=1, max=1)
    result.assert_no_kernel("aten::(native_|cudnn_)?batch_norm")
    result.assert_launches(max=8)
    result.assert_kernel_count(max=8)
    result.assert_no_host_sync()
    result.assert_copies("h2d", max=0)
    result.assert_copies("d2h", max=0)
    result.assert_no_layout_conversion()
    result.assert_no_memory_growth()


def test_the_kernels_move_the_bytes_they_must_and_few_more(perf_gpu: Perf) -> None:
    result = perf_gpu.measure(bundled_step())
    least = sum(spec.bytes_moved(elements=ELEMENTS, itemsize=2, activation="relu", residual=True, forked=False))
    try:
        result.assert_dram_bytes(max=1.15 * least)
    except CannotJudge as error:
        pytest.skip(str(error))  # no hardware counters here


def test_the_step_is_faster_than_the_one_it_replaces(perf_gpu: Perf) -> None:
    perf_gpu.compare(plain_step(), bundled_step()).assert_faster(by="10 %")


@pytest.mark.perf(max_kernels=8, no_sync=True)
def test_the_marker_holds_the_same_budget(perf: Perf) -> None:
    perf.measure(bundled_step())
