"""CuPy gets its memory from PyTorch's allocator, on the stream that it works on, and its own back."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch

from advisor.loop.training import Training
from advisor.transforms.cupy_shared_pool import CupySharedPool

TRAINING = Training(device=torch.device("cpu"))


class MemoryPool:
    """Stands for CuPy's."""

    def malloc(self, size: int) -> str:
        return f"{size} of CuPy's pool"


class PythonFunctionAllocator:
    """Stands for CuPy's."""

    def __init__(self, malloc: Any, free: Any) -> None:
        self._malloc, self.free = malloc, free

    def malloc(self, size: int) -> Any:
        return self._malloc(size, 0)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = types.ModuleType("cupy")
    now = [MemoryPool().malloc]
    module.cuda = types.SimpleNamespace(
        PythonFunctionAllocator=PythonFunctionAllocator,
        get_allocator=lambda: now[0],
        set_allocator=lambda new: now.__setitem__(0, new),
        get_current_stream=lambda: types.SimpleNamespace(ptr=7),
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


def test_arrays_come_from_torchs_pool_until_that_is_undone(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", lambda *given: asked.append(given) or 4096)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", asked.append)
    change, before = CupySharedPool(), cupy.cuda.get_allocator()
    assert change.match(TRAINING, {}).applies
    undo = change.apply(TRAINING, {})
    assert not change.effect(TRAINING, None, None).passed
    assert cupy.cuda.get_allocator()(512) == 4096
    cupy.cuda.get_allocator().__self__.free(4096, 0)
    assert asked == [(512, 0, 7), 4096]
    assert change.effect(TRAINING, None, None).detail == "PyTorch's pool gave CuPy 1 array"
    assert "allocator of the script's own" in change.match(TRAINING, {}).reason
    undo.run()
    assert cupy.cuda.get_allocator() is before


def test_without_cupy_there_is_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    assert "not imported CuPy" in CupySharedPool().match(TRAINING, {}).reason
