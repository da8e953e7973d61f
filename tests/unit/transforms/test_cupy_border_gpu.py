"""CuPy and PyTorch on one GPU: what goes between them has the same bits by the device, on whichever streams they work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from advisor.loop.training import Training
from advisor.transforms.border import TO_CUPY, TO_TORCH
from advisor.transforms.cupy_border import CupyBorder, made
from advisor.transforms.cupy_shared_pool import CupySharedPool

pytestmark = pytest.mark.gpu
cupy: Any = None
DEVICE = "cuda"


@pytest.fixture(autouse=True)
def _cupy() -> None:
    global cupy
    cupy = pytest.importorskip("cupy")


def step(hook: Callable[[], None], number: int) -> tuple[Any, Any]:
    """Both ways, with arrays that are overwritten at once."""
    x = cupy.arange(1 << 20, dtype="f4") * number
    tensor = torch.from_numpy(cupy.asnumpy(x)).to(DEVICE)
    x.fill(-1)
    source = torch.arange(1 << 20, device=DEVICE) * number
    array = cupy.asarray(source.cpu().numpy())
    source.fill_(-1)
    hook()
    return tensor, array


@pytest.mark.parametrize("own_stream", [False, True])
def test_the_same_bits_come_by_the_device(own_stream: bool) -> None:
    training, change, undo = Training(device=torch.device(DEVICE)), CupyBorder(), []

    def hook() -> None:
        if not undo and change.match(training, {}).applies:
            undo.append(change.apply(training, {}))

    stream = torch.cuda.Stream() if own_stream else torch.cuda.current_stream()
    plain = [step(lambda: None, number) for number in range(4)]
    with torch.cuda.stream(stream):
        step(hook, 1)
        found = [step(lambda: None, number) for number in range(4)]
    undo.pop().run()
    torch.cuda.synchronize()
    for (a, b), (c, d) in zip(plain, found, strict=True):
        assert torch.equal(a, c)
        assert bool((b == d).all())
    assert made == {TO_TORCH: 4, TO_CUPY: 4}


def test_arrays_live_in_torchs_pool() -> None:
    training, change = Training(device=torch.device(DEVICE)), CupySharedPool()
    before = torch.cuda.memory_allocated()
    undo = change.apply(training, {})
    array = cupy.arange(1 << 22, dtype="f4")
    assert torch.cuda.memory_allocated() >= before + array.nbytes
    total = float(array.sum())
    undo.run()
    assert float((array * 1.0).sum()) == total
    assert change.effect(training, None, None).passed
    del array
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
