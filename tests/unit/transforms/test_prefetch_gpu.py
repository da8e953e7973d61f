"""Real copies on a side stream."""

from __future__ import annotations

import os
import time

import pytest
import torch
from loops import make_loop
from torch.utils.data import DataLoader, TensorDataset

from advisor.transforms.prefetch import CudaCopies, DevicePrefetch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("move", ["to", "cuda", "type", "copy"])
def test_values_are_right_while_the_device_is_busy(workers: int, move: str) -> None:
    x = torch.randn(24, 3, 64, 64)
    loop = make_loop(device="cuda", steps=1)
    loop.training.loaders.append(DataLoader(TensorDataset(x, torch.arange(24)), batch_size=4, num_workers=workers))
    assert DevicePrefetch().match(loop.training, {}).applies
    DevicePrefetch().apply(loop.training, {})
    busy = torch.randn(4096, 4096, device="cuda")
    sums = []
    for image, label in loop.training.loaders[0]:
        for _ in range(3):
            busy = busy @ busy / 64
        if move == "to":
            image = image.to("cuda", non_blocking=True)
        elif move == "type":
            image = image.type(torch.cuda.FloatTensor)
        else:
            image = image.cuda() if move == "cuda" else torch.empty_like(image, device="cuda").copy_(image)
        label = label.cuda(non_blocking=True)
        sums.append((image.double().sum(), label.clone()))
        assert image.device.type == label.device.type == "cuda"
        del image
    for index, (total, labels) in enumerate(sums):
        torch.testing.assert_close(total.cpu(), x[4 * index : 4 * index + 4].double().sum())
        assert labels.tolist() == list(range(4 * index, 4 * index + 4))
    check = DevicePrefetch().effect(loop.training, None, None)
    assert check.passed
    assert check.numbers["ahead"] == 10


@pytest.mark.parametrize("pinned", [True, False])
def test_a_copys_memory_is_not_written_while_queued_kernels_read_it(pinned: bool) -> None:
    device = torch.device("cuda")
    copies = CudaCopies(device)
    busy = torch.randn(8192, 8192, device=device)
    first, second = torch.full((1 << 20,), 1.0), torch.full((1 << 20,), 2.0)
    if pinned:
        first, second = first.pin_memory(), second.pin_memory()
    for _ in range(3):
        copy = copies.start(first)()
        for _ in range(4):
            busy = busy @ busy / 90
        total = copy.sum() + 0 * busy[0, 0]  # queued behind the products
        place = copy.data_ptr()
        del copy
        again = copies.start(second)()
        assert again.data_ptr() == place  # the allocator gave the memory out anew at once
        assert total.item() == 1 << 20


def test_what_is_not_pinned_is_pinned_beside_the_step() -> None:
    copies = CudaCopies(torch.device("cuda"))
    batch = torch.randn(64, 3, 512, 512)  # 200 MB
    copies.start(batch)()  # the first takes the pinned memory from the system
    taken, pinned = [], []
    for _ in range(5):
        began = time.perf_counter()
        finish = copies.start(batch)
        taken.append(time.perf_counter() - began)
        assert torch.equal(finish().cpu(), batch)
        began = time.perf_counter()
        batch.pin_memory()
        pinned.append(time.perf_counter() - began)
    assert min(taken) < 0.2 * min(pinned)
    copies.stop()


def test_a_forked_worker_may_free_what_the_parent_copied() -> None:
    copy = CudaCopies(torch.device("cuda")).start(torch.ones(1 << 20))()
    _ = copy.sum().item()
    child = os.fork()
    if not child:
        del copy
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
